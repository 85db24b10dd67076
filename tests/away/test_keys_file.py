"""The keys file away: gone, a pipe, written slowly, wrong, empty, yesterday's."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.away.cells import Cell
from tests.away.rig import REFUSED, RELOADED, World, world

PART = "Keys file"
REFUSED_WHY = "SIGHUP is refused, and the previous keys remain valid. A router that starts with this file fails."
CELLS = {
    "killed": Cell("The file is removed, and the router gets SIGHUP.", why=REFUSED_WHY),
    "frozen": Cell("A pipe without a writer has its name. The router stops reading after 2 s.", why=REFUSED_WHY),
    "slow": Cell("A pipe has its name, and its content arrives in pieces."),
    "lying": Cell("It contains a mapping instead of keys, or a duplicate key.", why=REFUSED_WHY),
    "emptied": Cell("It is empty.", why=REFUSED_WHY),
    "old": Cell("It is yesterday's file.", opens=("revoked key",), why="The file alone determines the valid keys."),
}


def write_slowly(path: Path, text: str) -> None:
    """Write into a pipe, in pieces."""
    with path.open("w", encoding="utf-8") as stream:
        for n in range(0, len(text), 200):
            stream.write(text[n : n + 200])
            stream.flush()
            time.sleep(0.01)


async def starts(it: World) -> int:
    """Start another router with the same file. Returns its exit status."""
    arguments = ["-m", "router", "serve", "--port", "0", "--admin-port", "0", "--replica", it.engines[0].url]
    for key, value in it.settings.items():
        arguments += ["--set", f"{key.replace('__', '.')}={value}"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(60):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def put(it: World, state: str) -> None:
    """Put the file into the state, and have it read again."""
    file = it.ring.file
    text = file.read_text(encoding="utf-8")
    if state in ("killed", "frozen", "slow"):
        file.unlink()
    if state in ("frozen", "slow"):
        os.mkfifo(file)
    if state == "slow":
        threading.Thread(target=write_slowly, args=(file, text), daemon=True).start()
    if state == "lying":
        for wrong in ("keys: all\n", text + text):
            file.write_text(wrong, encoding="utf-8")
            await it.reload(REFUSED)
    if state in ("emptied", "old"):
        file.write_text(it.yesterday if state == "old" else "", encoding="utf-8")
    await it.reload(RELOADED if state in ("slow", "old") else REFUSED)
    if state not in ("slow", "old"):
        assert await starts(it) == 2
    if state == "frozen":  # No later reload is held up.
        await it.holds(CELLS[state])
        file.unlink()
        file.write_text(text, encoding="utf-8")
        await it.reload()


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    async with world(tmp_path) as it:
        await put(it, state)
        await it.holds(CELLS[state])
