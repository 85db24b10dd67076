"""What installers of environments for tests share: steps that say what failed, and a stamp that is written last.

A stamp holds what the environment was made from, so that installing again costs nothing, and an installation that was
cut off counts as none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

STEP_TIMEOUT_S = 1800.0
STAMP = "warmroute-stamp.txt"


class InstallFailed(RuntimeError):
    """A step failed; the message names the step and shows the end of what it printed."""


def run(what: str, step: str, command: list[str], timeout_s: float = STEP_TIMEOUT_S) -> str:
    """Run one step and return what it printed; InstallFailed with its last 40 lines when it fails."""
    print(f"[{what}] {step} ...", flush=True)
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise InstallFailed(f"{step}: not done after {timeout_s:.0f} s") from late
    except OSError as broken:
        raise InstallFailed(f"{step}: {broken}") from broken
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise InstallFailed(f"{step}: exit {done.returncode}\n{tail}")
    print(f"[{what}] {step}: {time.monotonic() - started:.0f} s", flush=True)
    return done.stdout


def python_of(venv: Path) -> Path:
    """The interpreter of a virtual environment."""
    return venv / "bin" / "python"


def pip(venv: Path, *words: str) -> list[str]:
    """A command of this interpreter's pip upon the environment, which has none: the one that Python brings is as old as
    it, and takes twice the CPU. What is installed is compiled as it is imported: of vLLM's 21,000 modules most never
    are."""
    if words[:1] == ("install",):
        words = ("install", "--no-compile", *words[1:])
    options = ["--python", str(python_of(venv)), "--disable-pip-version-check", "--quiet"]
    return [sys.executable, "-m", "pip", *options, *words]


def stamped(venv: Path, text: str) -> bool:
    """Whether the environment was made from that."""
    stamp = venv / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == text


def make(what: str, contents: str, venv: Path, text: str, fill: Callable[[Path], None], *, done: bool) -> None:
    """Make the environment anew, unless it is done, let `fill` install into it, and stamp it with what it was made
    from. `contents` is for the line that says that it is there already."""
    if done:
        print(f"[{what}] {contents} already in {venv}", flush=True)
        return
    run(what, "make the environment", [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)])
    fill(venv)
    (venv / STAMP).write_text(text, encoding="utf-8")
    print(f"[{what}] ready in {venv}", flush=True)


def command(what: str, module: str, description: str, venv: Path, install: Callable[[Path], None]) -> int:
    """The command line of an installer; 1 when a step failed. `venv` is the environment where none is named."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--venv", type=Path, default=venv, help=f"default: {venv.name} in the repository")
    try:
        install(parser.parse_args().venv.absolute())
    except InstallFailed as broken:
        print(f"[{what}] FAILED: {broken}", file=sys.stderr)
        return 1
    return 0
