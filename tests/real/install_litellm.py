"""Install LiteLLM's proxy into `.venv-litellm`: `python -m tests.real.install_litellm`.

An environment of its own, since LiteLLM pins some hundred packages at versions that neither the router nor the engines
have. Nothing of it is in the product: it stands in front of the router in one test, as many teams have it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from tests.real.install import REPO
from tests.support import installing

VENV_LITELLM = REPO / ".venv-litellm"
LITELLM = "1.108.7"
# Part of the stamp: raise it when the steps below change.
RECIPE = 1
run = partial(installing.run, "litellm")


def program(venv: Path = VENV_LITELLM) -> Path:
    """The proxy's command."""
    return venv / "bin" / "litellm"


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return json.dumps({"recipe": RECIPE, "litellm": LITELLM, "python": sys.version.split()[0]})


def fill(venv: Path) -> None:
    """Install the proxy into the environment."""
    run(f"litellm {LITELLM}", installing.pip(venv, "install", f"litellm[proxy]=={LITELLM}"))


def install(venv: Path = VENV_LITELLM) -> None:
    """Bring `venv` to what the test needs; InstallFailed with the step that broke."""
    done = installing.stamped(venv, stamp_text())
    installing.make("litellm", f"litellm {LITELLM} is", venv, stamp_text(), fill, done=done)


if __name__ == "__main__":
    sys.exit(installing.command("litellm", "tests.real.install_litellm", "LiteLLM's proxy", VENV_LITELLM, install))
