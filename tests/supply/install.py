"""Install what tests of the supply chain need into `.venv-supply`: `python -m tests.supply.install`.

Theory: the tools are Python packages of pinned versions in an environment of their own, and what makes the wheel comes
from its lock, with hashes. Running it again costs nothing: a stamp holds the pins and is written last.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-supply"
TOOLS = Path(__file__).with_name("requirements.txt")
BUILD = REPO / "requirements" / "build.lock"
STEP_TIMEOUT_S = 900.0


class InstallFailed(RuntimeError):
    """A step failed; the message names the step and shows the end of what it printed."""


def run(step: str, command: list[str]) -> None:
    """Run one step; InstallFailed with its last 40 lines when it fails."""
    print(f"[supply] {step} ...", flush=True)
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise InstallFailed(f"{step}: not done after {STEP_TIMEOUT_S:.0f} s") from late
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise InstallFailed(f"{step}: exit {done.returncode}\n{tail}")


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return "\n".join([sys.version.split()[0], TOOLS.read_text(encoding="utf-8"), BUILD.read_text(encoding="utf-8")])


def installed(venv: Path = VENV) -> bool:
    """Whether the stamp says that nothing is left to do."""
    stamp = venv / "warmroute-stamp.txt"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == stamp_text()


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; InstallFailed with the step that broke."""
    if installed(venv):
        print(f"[supply] tools are already in {venv}", flush=True)
        return
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run("make the environment", [sys.executable, "-m", "venv", "--clear", str(venv)])
    run("tools", [*pip, "-r", str(TOOLS)])
    run("what makes the wheel", [*pip, "--require-hashes", "-r", str(BUILD)])
    (venv / "warmroute-stamp.txt").write_text(stamp_text(), encoding="utf-8")
    print(f"[supply] ready in {venv}", flush=True)


def main() -> int:
    """The command line; 1 when a step failed."""
    try:
        install()
    except InstallFailed as broken:
        print(f"[supply] FAILED: {broken}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
