"""The shared store away, before two routers that share: what each of them opens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from router.sharing.frames import Frame, Spent, packed
from tests.away.cells import Cell
from tests.away.rig import World, world
from tests.sharing.stores import StoreServer
from tests.support.waiting import until

PART = "Shared store"
CELLS = {
    "killed": Cell("SIGKILL."),
    "frozen": Cell("SIGSTOP."),
    "slow": Cell("Each answer and message comes a second late."),
    "lying": Cell(
        "It says that stored responses belong to another tenant, that nothing was used, and that replicas are dead, "
        "without the fleet's secret; and every message again."
    ),
    "emptied": Cell("`FLUSHALL`."),
    "old": Cell("`FLUSHALL`, and all keys of before the responses were stored."),
}
CHANNEL, OWNERS = "warmroute:{fleet}:said", "warmroute:{fleet}:responses"
DELAY_S = 1.0


class Late:
    """`async with Late(port) as late`: a port that leads to the store; `delay_s` may be changed at any time."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.delay_s = 0.0
        self.port = self.passed = 0  # pieces that passed late
        self._tasks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> Late:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            back, far = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, far, late=False))
                group.create_task(self._pass(back, writer, late=True))
        except* OSError:
            pass
        finally:
            for each in (writer, far):
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool) -> None:
        while data := await reader.read(1 << 16):
            if late and self.delay_s:
                await asyncio.sleep(self.delay_s)
                self.passed += 1
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


async def sharing(it: World, n: int) -> dict[str, object]:
    """What a router's page says of its link."""
    said: dict[str, object] = json.loads(await it.page("/admin/replicas", it.routers[n]))["sharing"]
    return said
