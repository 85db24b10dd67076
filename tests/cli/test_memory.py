"""How memory is given back by a process that serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.eventloop import MAPPED_BYTES

PAGE_BYTES, CHUNK_HEAD_BYTES = 4_096, 16  # of x86-64 and AArch64 with glibc
PROGRAM = """
from router import eventloop

async def serve():
    freed = [bytes(SIZE) for _ in range(4)]
    del freed
    for _ in range(8):
        block = bytes(SIZE)
        print(id(block) % PAGE)

eventloop.run(serve())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone has this setting")
def test_large_blocks_are_mapped_alone_also_after_some_were_freed() -> None:
    """A block at the beginning of a page, but for its own head, is a mapping, which is gone when it is freed."""
    program = PROGRAM.replace("SIZE", str(MAPPED_BYTES)).replace("PAGE", str(PAGE_BYTES))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == {str(CHUNK_HEAD_BYTES)}
