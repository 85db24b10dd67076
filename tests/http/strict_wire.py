"""An engine whose HTTP is read strictly, and what reached it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self, cast

import h11

from router.router_server import RouterServer
from tests.http.test_server import BODY, length
from tests.http.wire import PAGES, Client, connect

QUIET_S = 0.01


WHOLE = length(len(BODY)) + b"\r\n" + BODY


@dataclass
class Said:
    """A message as h11 reads it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Read:
    """h11's reading of what came on one connection."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.whole = 0  # of these
        self.error = ""
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)

    def feed(self, data: bytes) -> list[Said]:
        """Read on; returns messages that are whole now."""
        whole: list[Said] = []
        if self.error:
            return whole
        try:
            self._parser.receive_data(data)
            while (event := self._parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self.said.append(Said(event.method, event.target, list(event.headers), b""))
                elif isinstance(event, h11.Data):
                    self.said[-1].body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    whole.append(self.said[-1])
                    self.whole += 1
                    self._next()
                else:
                    break
        except h11.RemoteProtocolError as error:
            self.error = str(error)
        return whole

    def _next(self) -> None:
        left = self._parser.trailing_data[0]
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        if left.lstrip(b"\r\n"):
            self._parser.receive_data(left.lstrip(b"\r\n"))


class StrictWire(asyncio.Protocol):
    """The engine's end of a connection."""

    def __init__(self, engine: StrictEngine) -> None:
        self._engine, self._read = engine, Read()
        self._transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self._engine.transports.append(self._transport)
        self._engine.reads.append(self._read)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for said in self._read.feed(data):
            page = PAGES.get(said.target) if said.method == b"GET" else None
            if page is None:
                self._engine.seen.append(said)
            status, body = page or (200, b'{"usage":{"prompt_tokens":1}}')
            self._transport.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        if self._read.error:
            self._engine.errors.append(self._read.error)


@dataclass
class StrictEngine:
    """`async with StrictEngine() as engine`."""

    seen: list[Said] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    transports: list[asyncio.Transport] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(lambda: StrictWire(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for transport in self.transports:
            transport.abort()


async def exchanged(app: RouterServer, engine: StrictEngine, raw: bytes, messages: int) -> tuple[Client, list[Said]]:
    """Send it and wait for an end, for so many answers, or until nothing moves; what came, and what went on."""
    engine.seen.clear()
    client = await connect(app.url)
    client.ask(raw, *["POST"] * 50)
    before, quiet = -1, 0
    while not client.lost.is_set() and len([each for each in client.answers if each.whole]) < messages and quiet < 5:
        moved = before != (before := len(client.raw) + len(engine.seen)) or app.http.in_flight > 0
        quiet = 0 if moved else quiet + 1
        await asyncio.sleep(QUIET_S)
    client.transport.abort()
    return client, list(engine.seen)
