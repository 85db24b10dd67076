"""What tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def until(true: Callable[[], object]) -> None:
    """Return when it is true; TimeoutError if that takes a minute."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
