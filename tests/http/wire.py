"""Both ends of the wire, byte by byte: an engine that writes exactly what it is told, and a client that judges every
byte it gets.

Nothing here waits for time: `Spied` counts the bytes that the router has read, so that a piece is written when the one
before it has been read, and never together with it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import h11
import pytest
import uvloop

import router.http.pool
from router.http.engine_connection import UpstreamConnection
from router.router_server import RouterServer
from tests.compiled import COMPILED
from tests.support.fakes import idle, running

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"m","stream":true,"messages":[]}'
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"fake","created":1}]}'
PAGES = {
    b"/health": (200, b""),
    b"/v1/models": (200, MODELS),
    b"/metrics": (404, b""),
    b"/kv_event_sources": (404, b""),
    b"/server_info": (404, b""),
    b"/version": (404, b""),
}


class Wire(asyncio.Protocol):
    """The engine's end of one connection."""

    def __init__(self, engine: RawEngine) -> None:
        self.engine = engine
        self.transport = cast("asyncio.Transport", None)
        self.got = bytearray()
        self.asked = 0  # generation requests on this connection
        self.lost = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.writing = asyncio.Event()
        self.writing.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)
        self.engine.wires.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.lost.set()
        self.writing.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.writing.clear()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.writing.set()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.got += data
        self.engine.heard.set()
        while (end := self.got.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.got[: end + 4])
            length = next((int(v) for n, v in fields(head) if n == b"content-length"), 0)
            if len(self.got) < end + 4 + length and not self.engine.hasty:
                return
            body = bytes(self.got[end + 4 : end + 4 + length])
            del self.got[: end + 4 + length]
            self._asked(head, body)

    def _asked(self, head: bytes, body: bytes) -> None:
        method, target, _ = head.split(b" ", 2)
        if method == b"GET" and target in PAGES:
            status, page = PAGES[target]
            self.transport.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(page), page))
            return
        self.engine.seen.append((head, body))
        self.asked += 1
        self.task = asyncio.ensure_future(self.engine.play(self))

    async def send(self, *pieces: bytes) -> None:
        """Write pieces, each when the router has read all before it."""
        for piece in pieces:
            if self.lost.is_set():
                return
            self.transport.write(piece)
            await self.engine.spied.heard(len(piece))

    async def pour(self, piece: bytes, count: int) -> int:
        """Write a piece so often as the socket takes it; returns when all is written, the bytes in `engine.poured`."""
        for _ in range(count):
            await self.writing.wait()
            if self.lost.is_set():
                break
            self.transport.write(piece)
            self.engine.poured += len(piece)
        return self.engine.poured

    def reset(self) -> None:
        """End with RST."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Spy:
    """What the router has read from engines since it was last asked about."""

    def __init__(self) -> None:
        self.unread = 0
        self.news = asyncio.Event()

    async def heard(self, count: int) -> None:
        """Return when the router has read so many more bytes."""
        self.unread -= count
        while self.unread < 0:
            self.news.clear()
            await self.news.wait()

    def gone(self) -> None:
        """A connection is gone, and with it what was not read."""
        self.unread = 0
        self.news.set()


class RawEngine:
    """`async with RawEngine(play)`; `play` answers each generation request."""

    def __init__(self, play: Callable[[Wire], Awaitable[Any]], *, hasty: bool = False) -> None:
        self.play = cast("Callable[[Wire], Any]", play)
        self.hasty = hasty  # answers before it has the body
        self.seen: list[tuple[bytes, bytes]] = []
        self.wires: list[Wire] = []
        self.heard = asyncio.Event()
        self.spied = Spy()
        self.poured = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Wire(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def asked(self, count: int) -> None:
        """Wait until that many requests have come."""
        while len(self.seen) < count:
            self.heard.clear()
            await self.heard.wait()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        tasks = [wire.task for wire in self.wires if wire.task is not None]
        for wire in self.wires:
            wire.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(wire.lost.wait() for wire in self.wires))


class Client(asyncio.Protocol):
    """A client's end of one connection; `body` and `done` are what h11, a strict parser, makes of what came."""

    def __init__(self, judge: Callable[[bytes], None] | None = None) -> None:
        """`judge` is shown the body so far whenever more of it came: whole chunks, where there are chunks."""
        self.transport = cast("asyncio.Transport", None)
        self.raw = bytearray()
        self.answers: list[Answered] = []
        self.error: Exception | None = None  # what h11 says against it
        self.lost = asyncio.Event()
        self.reset = False
        self.news = asyncio.Event()
        self._judge = judge
        self._methods: list[bytes] = []
        self._parser: h11.Connection | None = None
        self._fresh = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.raw += data
        self._parse(data)
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.reset = exc is not None
        if not self.reset:
            self._parse(b"")
        self.lost.set()
        self.news.set()

    def ask(self, raw: bytes, *methods: str) -> None:
        """Write a request; `methods` if not one POST."""
        self._methods += [each.encode() for each in methods or ("POST",)]
        self.transport.write(raw)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for `done`, looked at whenever something came."""
        async with asyncio.timeout(60):
            while not done():
                self.news.clear()
                await self.news.wait()

    async def answer(self, n: int = 0) -> Answered:
        """The n-th answer, once it is whole or broken."""
        await self.until(lambda: (len(self.answers) > n and self.answers[n].whole) or self.lost.is_set())
        return self.answers[n]

    def _parse(self, data: bytes) -> None:
        if self.error is not None:
            return
        try:
            self._feed(data)
        except (h11.RemoteProtocolError, AssertionError) as error:
            self.error = error

    def _feed(self, data: bytes) -> None:
        while True:
            if self._parser is None:
                if not data or not self._methods:
                    if data:
                        raise h11.RemoteProtocolError("an answer to nothing")
                    return
                self._parser = h11.Connection(h11.CLIENT)
                method = self._methods.pop(0)
                self._parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
                self._parser.send(h11.EndOfMessage())
            self._parser.receive_data(data)
            if not self._events(self._parser):
                return
            data = self._parser.trailing_data[0]
            self._parser = None

    def _events(self, parser: h11.Connection) -> bool:
        """True when an answer is whole."""
        while True:
            event = parser.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                return False
            if isinstance(event, h11.Response):
                self.answers.append(Answered(event.status_code, dict(event.headers)))
            elif isinstance(event, h11.Data):
                self.answers[-1].body += event.data
                chunked = b"transfer-encoding" in self.answers[-1].headers
                if self._judge is not None and (event.chunk_end or not chunked):
                    self._judge(bytes(self.answers[-1].body))
            elif isinstance(event, h11.EndOfMessage):
                self.answers[-1].whole = True
                return True
            elif isinstance(event, h11.ConnectionClosed):
                return False


@dataclass
class Answered:
    """An answer as far as it came."""

    status: int
    headers: dict[bytes, bytes]
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False


def fields(head: bytes) -> list[tuple[bytes, bytes]]:
    """Header names in lower case, and values."""
    lines = head.split(b"\r\n")[1:]
    return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines if line)]


def post(
    path: str = CHAT, body: bytes = b'{"model":"m","stream":true,"messages":[]}', *lines: str, version: str = "1.1"
) -> bytes:
    """A request with its length."""
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def connect(url: str, judge: Callable[[bytes], None] | None = None) -> Client:
    """A client's connection to the router."""
    host, port = url.removeprefix("http://").split(":")
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(judge), host, int(port))
    return client


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop that the router runs on; its transports differ from asyncio's."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(240):  # of what hangs
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(limited())

    return run


@asynccontextmanager
async def proxied(engine: RawEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[RouterServer]:
    """A router before this engine. Leaving it, nothing may be left behind, and nothing have gone wrong unheard."""
    assert not COMPILED, "connections that are looked into cannot be made of compiled ones: mark such a test `inside`"
    loop, wrong = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    spied = engine.spied

    class Spied(UpstreamConnection):
        __slots__ = ()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            spied.unread += len(data)
            spied.news.set()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            spied.gone()

    monkeypatch.setattr(router.http.pool, "UpstreamConnection", Spied)
    async with running(engine.url, **settings) as app:
        yield app
        await settled(app)
    gc.collect()
    assert not wrong, wrong
    bodies = app.http._server.bodies
    assert (bodies.held_bytes, bodies._of_holder, bodies._waiting) == (0, {}, {})


async def settled(app: RouterServer) -> None:
    """Wait until nothing is open; what stays open is a leak."""
    async with asyncio.timeout(60):
        while not idle(app) or app.http.upstream._answers:
            await asyncio.sleep(0)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One way of a connection through a plain load balancer, to its end."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def spliced(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, pipes: set[asyncio.Task[None]]
) -> bool:
    """Pass bytes both ways between a connection and this port, as a load balancer does, in tasks that are in `pipes`
    until they end. False where nobody listens on the port."""
    try:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    for pair in ((reader, far_writer), (far_reader, writer)):
        pipe = asyncio.create_task(pass_on(*pair))
        pipes.add(pipe)
        pipe.add_done_callback(pipes.discard)
    return True
