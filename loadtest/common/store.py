"""A store that routers share, where this machine has a server of Redis' protocol."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from loadtest.common.processes import free_port, started, until_ready

PROGRAMS = ("valkey-server", "redis-server")
READY_EVERY_S = 0.05


def program() -> str | None:
    """The server of this machine; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name)) is not None), None)


@asynccontextmanager
async def serving(server: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a fresh store without a disk, once it answers. Raises ProcessError."""
    port = free_port()
    words = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]

    async def missing() -> str:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"PING\r\n")
                return "" if await reader.readuntil(b"\r\n") == b"+PONG\r\n" else "it answers something else"
            finally:
                writer.close()
        return "it does not answer"

    async with started("store", [*words, "--dir", str(folder)], folder) as process:
        await until_ready(process, missing, READY_EVERY_S)
        yield f"redis://127.0.0.1:{port}"
