"""What a request leaves behind when it has ended, and what the end of the router leaves of requests."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from router.http.client_connection import ClientConnection
from router.http.engine_connection import UpstreamConnection
from router.http.exchange import UpstreamResponse
from router.http.receiver import Receiver
from router.http.request import Request
from router.proxy.attempts import UpstreamCall
from router.proxy.relay import Relay
from tests.http.wire import CHAT, STREAM, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.support.fakes import running
from tests.support.recorded import SSE, head

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
ASKED = b'{"model":"m","messages":[]}'
ANSWER_BYTES = 900_000  # less than what is held until it is whole
NARROW_BYTES = 16_384
OURS = (UpstreamCall, ClientConnection, UpstreamResponse, UpstreamConnection, Receiver, Relay, Request)


async def whole(wire: Wire) -> None:
    """An answer that does not stream."""
    wire.transport.write(head("content-length: 2") + b"{}")


async def streamed(wire: Wire) -> None:
    """One that does."""
    wire.transport.write(head(SSE, "transfer-encoding: chunked") + CHUNK * 3 + b"0\r\n\r\n")


async def broken_early(wire: Wire) -> None:
    """None."""
    wire.transport.abort()


async def broken_midway(wire: Wire) -> None:
    """Half of one."""
    await wire.send(head(SSE, "transfer-encoding: chunked") + CHUNK)
    wire.transport.abort()


async def never(_: Wire) -> None:
    """The client is first to leave."""


ENDS = [
    (whole, ASKED),
    (streamed, STREAM),
    (broken_early, ASKED),
    (broken_midway, STREAM),
    (never, ASKED),
]


@pytest.mark.inside
@pytest.mark.parametrize(("play", "body"), ENDS, ids=lambda each: getattr(each, "__name__", ""))
@on_uvloop
async def test_nothing_waits_for_the_collector(
    play: Callable[[Wire], Awaitable[None]], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is freed when its connection is, body and all: the collector of cycles comes too seldom for that."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                client = await connect(app.url)
                client.ask(post(CHAT, body, "Connection: close"))
                if play is never:
                    await engine.heard.wait()
                    client.transport.abort()
                await client.lost.wait()
            await settled(app)
            while app.http._server.clients:
                await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not [each for each in gc.garbage if isinstance(each, OURS)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.inside
@on_uvloop
async def test_an_idle_connection_keeps_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand idle clients are not ten thousand prompts."""
    async with RawEngine(whole) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, ASKED))
        await client.answer()
        await settled(app)
        assert not [each for each in gc.get_objects() if isinstance(each, Request) and each.body_bytes]
        client.transport.abort()


def narrow(fd: int) -> None:
    """Connections accepted here take little at once."""
    with socket.socket(fileno=os.dup(fd)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW_BYTES)


@on_uvloop
async def test_an_answer_is_whole_before_the_end() -> None:
    """Draining waits until clients have taken their answers, not only until engines have given them."""

    async def play(wire: Wire) -> None:
        wire.transport.write(head(f"content-length: {ANSWER_BYTES}") + b"x" * ANSWER_BYTES)

    async with RawEngine(play) as engine:
        async with running(engine.url) as app:
            listener = app.http._server._listener
            assert listener is not None
            narrow(listener.sockets[0].fileno())
            client = await connect(app.url)
            client.transport.pause_reading()
            client.ask(post(CHAT, ASKED))
            while not (clients := app.http._server.clients) or not next(iter(clients)).unread_bytes:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.05, client.transport.resume_reading)
        answer = await client.answer()
        assert answer.whole
        assert len(answer.body) == ANSWER_BYTES


@on_uvloop
async def test_who_was_accepted_is_answered() -> None:
    """A request that comes when draining has begun, on a connection that was there before, is answered."""
    async with RawEngine(whole) as engine:
        async with running(engine.url) as app:
            fresh, kept = await connect(app.url), await connect(app.url)
            kept.ask(post(CHAT, ASKED))
            await kept.answer()
            while len(app.http._server.clients) < 2:
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()

            def ask() -> None:
                for client in (fresh, kept):
                    client.ask(post(CHAT, ASKED))

            loop.call_soon(loop.call_soon, ask)
        for client, n in ((fresh, 0), (kept, 1)):
            answer = await client.answer(n)
            assert answer.whole
            assert answer.headers[b"connection"] == b"close"
