"""Clients that do not read: the engine stops, the router keeps little, and nothing is lost when they read again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import router.http.upstream
from router.http.exchange import UpstreamResponse
from router.router_server import RouterServer
from tests.http.wire import STREAM, Client, RawEngine, Wire, on_uvloop, post, proxied, settled
from tests.support.fakes import running
from tests.support.recorded import SSE, head

KEPT_BYTES_MAX = 1 << 20
OFFERED = 700  # pieces; more bytes than all the kernel's buffers on the way take
PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60_000 + b'"},"finish_reason":"stop"}]}'
EVENT, CRLF_EVENT = PIECE + b"\n\n", PIECE + b"\r\n\r\n"
ASKED = b'{"model":"m","messages":[]}'


def chunk(data: bytes) -> bytes:
    """Framed."""
    return b"%x\r\n%b\r\n" % (len(data), data)


KINDS = {  # head, piece, end, whether each piece is a read of its own
    "chunk by chunk": (head(SSE, "transfer-encoding: chunked"), chunk(EVENT), b"0\r\n\r\n", True),
    "chunks together": (head(SSE, "transfer-encoding: chunked"), chunk(EVENT) * 4, b"0\r\n\r\n", False),
    "CRLF": (head(SSE, "transfer-encoding: chunked"), chunk(CRLF_EVENT), b"0\r\n\r\n", False),
    "until close": (head(SSE), EVENT, b"", False),
    "by length": (head(f"content-length: {OFFERED * len(EVENT)}"), EVENT, b"", False),
    "no stream": (head("transfer-encoding: chunked"), chunk(EVENT), b"0\r\n\r\n", False),
}


class Source:
    """An engine with more to say than anyone keeps."""

    def __init__(self, kind: str) -> None:
        self.head, self.piece, self.end, self.one_by_one = KINDS[kind]
        self.count = OFFERED if self.piece.count(b"data: ") == 1 else OFFERED // 4
        self.app: RouterServer | None = None
        self.kept_max = 0
        self.engine = RawEngine(self.play)

    async def play(self, wire: Wire) -> None:
        """The engine's part."""
        wire.transport.write(self.head)
        await self.engine.spied.heard(len(self.head))
        for _ in range(self.count):
            if self.one_by_one:
                await wire.send(self.piece)
                self.engine.poured += len(self.piece)
            else:
                await wire.pour(self.piece, 1)
            self.look()
            await asyncio.sleep(0)
        wire.transport.write(self.end)
        if self.end == b"" and b"content-length" not in self.head:
            wire.transport.close()

    def look(self) -> None:
        """How much the router keeps."""
        assert self.app is not None
        self.kept_max = max(self.kept_max, *(each.unread_bytes for each in self.app.http._server.clients))


async def asks_and_does_not_read(app: RouterServer, raw: bytes, *methods: str) -> Client:
    """A client with a small socket buffer, not reading."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    host, port = app.url.removeprefix("http://").split(":")
    await loop.sock_connect(sock, (host, int(port)))
    _, client = await loop.create_connection(Client, sock=sock)
    client.ask(raw, *methods)
    client.transport.pause_reading()
    return client


async def stalls(engine: RawEngine) -> int:
    """Wait until no more is taken from the engine; returns how much was."""
    unchanged, poured = 0, -1
    while unchanged < 300:
        await asyncio.sleep(0)
        unchanged, poured = (unchanged + 1, poured) if engine.poured == poured and poured else (0, engine.poured)
    return poured


@asynccontextmanager
async def stalled(
    kind: str, monkeypatch: pytest.MonkeyPatch, version: str = "1.1", **settings: Any
) -> AsyncIterator[tuple[Source, RouterServer, Client]]:
    """An engine that was stopped by a client that does not read."""
    source = Source(kind)
    async with source.engine as engine, proxied(engine, monkeypatch, **settings) as app:
        source.app = app
        streams = b"event-stream" in source.head
        client = await asks_and_does_not_read(app, post(body=STREAM if streams else ASKED, version=version))
        taken = await stalls(engine)
        assert taken < OFFERED * len(EVENT) * 3 // 4, "the kernel took all; offer more"
        yield source, app, client
        client.transport.abort()


@pytest.mark.promise(
    "A client that does not read costs at most 1 MiB and is ended after `listen.send_timeout_s`.", "clients"
)
@pytest.mark.inside
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("kind", KINDS)
@on_uvloop
async def test_a_client_that_does_not_read(kind: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops the engine; the router keeps a megabyte at most (and what it holds of answers that do not stream);
    once it reads, all of it comes."""
    async with stalled(kind, monkeypatch, version) as (source, _, client):
        client.transport.resume_reading()
        answer = await client.answer()
        if version == "1.0":
            await client.lost.wait()
        streams = b"event-stream" in source.head
        assert source.kept_max <= KEPT_BYTES_MAX * (1 if streams else 2)
        assert client.error is None
        event = CRLF_EVENT if kind == "CRLF" else EVENT
        assert answer.body == event * OFFERED


@pytest.mark.inside
@pytest.mark.parametrize("kind", ["chunk by chunk", "CRLF", "no stream"])
@on_uvloop
async def test_it_leaves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while the engine is stopped for it ends the engine's work."""
    async with stalled(kind, monkeypatch) as (source, app, client):
        client.transport.abort()
        await source.engine.wires[-1].lost.wait()
        await settled(app)


@pytest.mark.inside
@on_uvloop
async def test_usage_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with an event to be left out of the stream."""
    async with stalled("chunk by chunk", monkeypatch, api__ask_usage=True) as (source, _, client):
        client.transport.resume_reading()
        assert (await client.answer()).body == EVENT * OFFERED
        assert source.kept_max <= KEPT_BYTES_MAX


@pytest.mark.inside
@on_uvloop
async def test_more_held_than_the_client_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the client stalls on what was held of an answer, before the rest of it has come."""
    held_bytes = 8 << 20
    async with stalled("no stream", monkeypatch, limits__buffered_response_bytes_max=held_bytes) as (source, _, client):
        client.transport.resume_reading()
        assert (await client.answer()).body == EVENT * OFFERED
        assert source.kept_max <= held_bytes + KEPT_BYTES_MAX


@pytest.mark.inside
@on_uvloop
async def test_our_pause_is_not_the_engines_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a client does not read, its answer does not time out."""
    monkeypatch.setattr(router.http.upstream, "WATCH_INTERVAL_S", 0.001)
    async with stalled("chunk by chunk", monkeypatch) as (_, app, client):
        (answer,) = app.http.upstream._answers
        looked, silent_since = 0, UpstreamResponse.silent_since

        def looks(self: UpstreamResponse, now_s: float) -> float:
            nonlocal looked
            looked += 1
            self.since_s -= 1_000.0  # as if the last look had been so long ago
            return silent_since(self, now_s)

        monkeypatch.setattr(UpstreamResponse, "silent_since", looks)
        while looked < 3:
            await asyncio.sleep(0)
        app.http.on_replica_unreachable(answer.replica)
        client.transport.resume_reading()
        assert (await client.answer()).whole


@pytest.mark.inside
@on_uvloop
async def test_answers_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and asks and does not read gets no further answer made than the ones that fit."""
    count, body = 60, b'"' + b"x" * 900_000 + b'"'
    asked = post(body=ASKED)

    async def play(wire: Wire) -> None:
        wire.transport.write(head(f"content-length: {len(body)}") + body)
        engine.poured += len(body)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await asks_and_does_not_read(app, asked * count, *["POST"] * count)
        await stalls(engine)
        assert len(engine.seen) < count // 2
        (server_side,) = app.http._server.clients
        assert server_side.unread_bytes < 3 << 20
        client.transport.resume_reading()
        await client.answer(count - 1)
        assert (client.error, len(engine.seen)) == (None, count)
        assert all(answer.body == body for answer in client.answers)
        client.transport.close()


@on_uvloop
async def test_stopping_does_not_wait_for_it() -> None:
    """A router that is told to stop ends in time, with a client that does not read too."""
    source = Source("chunk by chunk")
    source.one_by_one = False
    async with source.engine as engine:
        async with running(engine.url, listen__drain_s=0.05) as app:
            source.app = app
            client = await asks_and_does_not_read(app, post())
            engine.spied.unread = 1 << 30
            await stalls(engine)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not app.http._server.clients
        client.transport.resume_reading()
        await client.lost.wait()
        assert not client.answers[0].whole
