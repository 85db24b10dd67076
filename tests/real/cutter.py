"""A proxy before a real engine that breaks a stream behind an event of its choice, as an engine does whose process
dies: what it wrote arrives, and then the connection is closed without the answer's end.

Two things would make what a router does depend on how busy the machine is. A reset lets the kernel throw away what was
not read yet. And where a stream's beginning and its break are read at once, the client has heard nothing, so that the
request is sent again as a whole: a stream can be held open until its client has heard something.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

READ_BYTES = 1 << 16
CLOSED_WITHIN_S = HEARD_WITHIN_S = 60.0  # until a client has heard something, and the router has closed its own side


@dataclass
class Cut:
    """The next stream is broken behind so many events (None: none is), once `heard` is set."""

    after: int | None = None
    made: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.heard.set()


class Cutter:
    """`async with Cutter(port, cut) as cutter`: bytes pass both ways, until so many events of a stream have passed;
    then both connections end. Several share a cut, which is made once."""

    def __init__(self, port: int, cut: Cut) -> None:
        self._port = port
        self.cut = cut
        self.asked: list[bytes] = []  # requests for generation, as they came
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        to_engine: asyncio.StreamWriter | None = None
        try:
            from_engine, to_engine = await asyncio.open_connection("127.0.0.1", self._port)
            there = asyncio.create_task(self._there(reader, to_engine))
            try:
                if await self._back(from_engine, writer):
                    to_engine.transport.abort()
                    await asyncio.wait([there], timeout=CLOSED_WITHIN_S)
            finally:
                there.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await there
        except (OSError, asyncio.CancelledError):
            pass  # the end of the test, or of a connection
        finally:
            for each in (writer, to_engine):
                if each is not None:
                    each.transport.abort()

    async def _there(self, reader: asyncio.StreamReader, to_engine: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            if data.startswith(b"POST /v1/"):
                self.asked.append(b"")
            if self.asked and not data.startswith(b"GET "):
                self.asked[-1] += data
            to_engine.write(data)
            await to_engine.drain()
        to_engine.close()

    async def _back(self, from_engine: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the stream was cut."""
        seen = 0
        while data := await from_engine.read(READ_BYTES):
            at, cut = 0, self.cut
            while cut.after is not None and (at := data.find(b"\n\n", at) + 2) > 1:
                seen += 1
                if seen == cut.after:
                    cut.after, cut.made = None, cut.made + 1
                    writer.write(data[:at] + b"\r\n")  # the end of the event's chunk
                    await writer.drain()
                    async with asyncio.timeout(HEARD_WITHIN_S):
                        await self.cut.heard.wait()
                    writer.write_eof()
                    return True
            writer.write(data)
            await writer.drain()
        return False
