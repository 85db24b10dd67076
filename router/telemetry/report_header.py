"""Envelope of a document of measurements, with command, commit, machine, date and rows."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def document(command: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return a JSON document of the rows that a run of the package in `folder` measured."""
    return {
        "command": command,
        "commit": commit(folder),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": list(rows),
    }


def commit(folder: Path) -> str | None:
    """Return the commit that the package was checked out at, with `+` if files differ from it; None outside a
    checkout."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603 - git
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Describe the machine that the numbers were measured on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
