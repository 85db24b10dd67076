"""Promises about child processes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from loadtest.common.processes import ProcessError, run_process

SERVES = "print('ready http://x', flush=True); import time; time.sleep(600)"
FAILS = "import sys; print('no such flag', file=sys.stderr); sys.exit(3)"
PARENT = """
import subprocess, sys
code = "import sys, time; f = open(sys.argv[1], 'w'); print('ready', flush=True); time.sleep(600)"
subprocess.run([sys.executable, "-c", code, sys.argv[1]])
"""


async def test_child_is_stopped_with_its_block() -> None:
    """A child runs while its block does, and has ended after it."""
    async with run_process("it", [sys.executable, "-c", SERVES]) as process:
        await process.wait_for_output(re.compile("ready"))
        assert process.running

    assert not process.running


async def test_child_is_stopped_when_its_block_fails() -> None:
    """An error in the block stops the child and goes on."""
    with pytest.raises(KeyError):
        async with run_process("it", [sys.executable, "-c", SERVES]) as process:
            raise KeyError

    assert not process.running


async def test_child_takes_along_what_it_started(tmp_path: Path) -> None:
    """Stopping a child stops its own children too."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = asyncio.create_task(asyncio.to_thread(fifo.read_text))
    async with run_process("it", [sys.executable, "-c", PARENT, str(fifo)]) as process:
        await process.wait_for_output(re.compile("ready"))

    # The grandchild holds the other end: the reader ends when it does.
    assert await asyncio.wait_for(reader, 60) == ""


async def test_early_death_is_quoted() -> None:
    """A child that ends before it is ready is an error with its exit code and last words."""
    with pytest.raises(ProcessError, match=r"it ended with exit code 3:\n  no such flag"):
        async with run_process("it", [sys.executable, "-c", FAILS]) as process:
            await process.wait_for_output(re.compile("ready"))
