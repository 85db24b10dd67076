"""The tools of .venv-supply as one function."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.supply.install import REPO, VENV

TOOL_TIMEOUT_S = 300.0


def tool(name: str, *words: str | Path, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a tool says; its exit code is the caller's to judge."""
    return subprocess.run(
        [str(VENV / "bin" / name), *map(str, words)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
