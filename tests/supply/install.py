"""Install what tests of the supply chain need into `.venv-supply`: `python -m tests.supply.install`.

Theory: the tools are Python packages of pinned versions in an environment of their own, and what makes the wheel comes
from its lock, with hashes. Running it again costs nothing: a stamp holds the pins and is written last.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.support import installing

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-supply"
TOOLS = Path(__file__).with_name("requirements.txt")
BUILD = REPO / "requirements" / "build.lock"
run = partial(installing.run, "supply")


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return "\n".join([sys.version.split()[0], TOOLS.read_text(encoding="utf-8"), BUILD.read_text(encoding="utf-8")])


def installed(venv: Path = VENV) -> bool:
    """Whether the stamp says that nothing is left to do."""
    return installing.stamped(venv, stamp_text())


def fill(venv: Path) -> None:
    """Install the tools into the environment."""
    run("tools", installing.pip(venv, "install", "-r", str(TOOLS)))
    run("what makes the wheel", installing.pip(venv, "install", "--require-hashes", "-r", str(BUILD)))


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; installing.InstallFailed with the step that broke."""
    installing.make("supply", "tools are", venv, stamp_text(), fill, done=installed(venv))


if __name__ == "__main__":
    sys.exit(installing.command("supply", "tests.supply.install", "tools of the supply chain", VENV, install))
