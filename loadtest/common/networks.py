"""A network in front of a server on loopback, which can be cut in either direction or redirected to another server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self


class Network:
    """Forwards a port to another one until one direction or both are cut: `async with Network(port) as network`."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._to, self._tls = port, tls
        self.port = self.passed_late = 0  # pieces that came late
        self.delay_s = 0.0  # delay of all data from the server; it may be changed at any time
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self._there.set()
        self._back.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.lose()

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """Stop all data in these directions; connections stay open."""
        if there:
            self._there.clear()
        if back:
            self._back.clear()

    def mend(self) -> None:
        """Open both directions again. Delayed data passes first."""
        self._there.set()
        self._back.set()

    async def lead(self, port: int) -> None:
        """Redirect to another port: all connections end, as with `lose`."""
        self._to = port
        await self.lose()

    async def lose(self) -> None:
        """End all connections. Delayed data never arrives."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far: asyncio.StreamWriter | None = None
        try:
            back, far = await asyncio.open_connection("127.0.0.1", self._to)
            ways = (_pass(reader, far, self._there), _pass(back, writer, self._back, self._be_late))
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # a cancelled task is an error to the loop that made it (uvloop)
            pass
        finally:
            writer.transport.abort()
            if far is not None:
                far.transport.abort()

    async def _be_late(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
            self.passed_late += 1


async def _skip_delay() -> None:
    """Return without a wait."""


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    is_open: asyncio.Event,
    wait: Callable[[], Awaitable[None]] = _skip_delay,
) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            await wait()
            await is_open.wait()
            writer.write(data)
            await writer.drain()
