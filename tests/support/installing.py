"""What installers of environments for tests share: steps that say what failed, and a stamp that is written last.

A stamp holds what the environment was made from, so that installing again costs nothing, and an installation that was
cut off counts as none.
"""

from __future__ import annotations

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
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
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


def stamped(venv: Path, text: str) -> bool:
    """Whether the environment was made from that."""
    stamp = venv / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == text


def stamp(venv: Path, text: str) -> None:
    """It is, from now on."""
    (venv / STAMP).write_text(text, encoding="utf-8")


def finish(what: str, install: Callable[[], None]) -> int:
    """The end of a command line; 1 when a step failed."""
    try:
        install()
    except InstallFailed as broken:
        print(f"[{what}] FAILED: {broken}", file=sys.stderr)
        return 1
    return 0
