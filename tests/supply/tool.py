"""The tools of .venv-supply as one function."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.supply.install import REPO, VENV

TOOL_TIMEOUT_S = 300.0


def program(
    command: Sequence[str | Path], *, cwd: Path = REPO, timeout_s: float = TOOL_TIMEOUT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a command says; its exit code is the caller's to judge."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def tool(name: str, *words: str | Path, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a tool says; its exit code is the caller's to judge."""
    return program([VENV / "bin" / name, *words], cwd=cwd, **environment)


def quick_compiler(place: Path, compiler: str) -> Path:
    """A program at `place` that is this C compiler, told last not to optimise.

    Whether what is installed has libraries that load and serve is asked of them here, and optimising is two thirds of
    making them; what they do is tested with those that are optimised, by `make test-compiled`.
    """
    place.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n', encoding="utf-8")
    place.chmod(0o755)
    return place
