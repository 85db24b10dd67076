"""Attempts that fail before the first byte: who is tried next, how often, and at whose cost."""

from __future__ import annotations

import os
import random
import socket

import pytest
from aiohttp import ClientSession, web

from tests.fakes import (
    FakeEngine,
    Reply,
    empty_stream,
    error_event,
    events,
    headers_then_reset,
    idle,
    reset,
    running,
    status,
)
from tests.io.wire import RawEngine, Wire, connect, on_uvloop, post, proxied

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "stream": True, "messages": []}
FAULTS = int(os.environ.get("WARMROUTE_FAULTS", "100"))  # 1000 for the full size
SHUTDOWN = status(500, '{"error": {"message": "EngineCore encountered an issue", "code": 500}}')
EARLY: dict[str, Reply] = {
    "reset": reset,
    "headers, then reset": headers_then_reset,
    "empty stream": empty_stream,
    "error event": error_event,
    "502": status(502),
    "503": status(503),
    "shut down": SHUTDOWN,
}
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Hole:
    """A port at which connections are neither taken nor refused: the queue of its listener is full."""

    def __init__(self, port: int) -> None:
        self._sockets = [socket.socket() for _ in range(4)]
        listener, *fillers = self._sockets
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))

    def close(self) -> None:
        """From now on connections are refused."""
        for each in self._sockets:
            each.close()


async def test_no_connection_in_time_costs_no_attempt(
    client: ClientSession, engine: FakeEngine, other: FakeEngine
) -> None:
    """A replica that could not be reached in time is asked once more when the only other one says that it is shutting
    down: nothing was sent to the first, so that attempt does not count."""
    async with running(engine, other, upstream__connect_timeout_s=0.2, routing__policy="round_robin") as app:
        async with client.post(app.url + CHAT, json=BODY):
            right, left = (engine, other) if engine.seen else (other, engine)  # whose turn is next
        await left.stop()
        hole = Hole(left.port)

        async def shuts_down(asked: FakeEngine, request: web.Request) -> web.StreamResponse:
            hole.close()
            await left.__aenter__()
            return await SHUTDOWN(asked, request)

        right.script.append(shuts_down)
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 200
            assert await response.read() == b"".join(events())
        record = app.hub.pages.decisions[-1]
        assert record.retries == (("connect", left.url), ("engine", right.url))
        assert idle(app)


async def test_connects_are_bounded(client: ClientSession, engine: FakeEngine) -> None:
    """The only replica, out of reach, is tried twice and no more; the client is told when to come back."""
    async with running(engine, upstream__connect_timeout_s=0.05) as app:
        await engine.stop()
        hole = Hole(engine.port)
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica_ready")
            assert "Retry-After" in response.headers
        hole.close()
        assert len(app.hub.pages.decisions[-1].retries) == 1
        assert idle(app)


async def test_without_retries_there_are_none(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Told to retry nothing, the router makes one attempt, whatever it costs."""
    for fake in (engine, other):
        fake.script.append(reset)
    async with running(engine, other, upstream__retries_max=0) as app:
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 502
        assert len(engine.seen) + len(other.seen) == 1
        assert idle(app)


@pytest.mark.parametrize("ends", ["FIN", "RST"])
@on_uvloop
async def test_stale_connections(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free connection that the engine closes while a request is on its way is nobody's fault: the request goes out
    again on a fresh one, once, and what breaks there is a failure."""
    stale, broken = False, False

    async def play(wire: Wire) -> None:
        if (stale and wire.asked > 1) or broken:
            wire.reset() if ends == "RST" else wire.transport.close()
            return
        await wire.send(OK)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=b'{"model":"m","messages":[]}'))
        assert (await client.answer()).status == 200
        stale = True
        client.ask(post(body=b'{"model":"m","messages":[]}'))
        assert (await client.answer(1)).status == 200
        assert app.router.fleet.members[engine.url].breaker.failures == 0
        broken = True
        client.ask(post(body=b'{"model":"m","messages":[]}'))
        assert (await client.answer(2)).status == 502
        assert len(engine.seen) == 5
        assert app.router.fleet.members[engine.url].breaker.failures == 1
        client.transport.close()


async def test_one_faulty_replica_fails_nobody(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Whatever one of three replicas does before its first byte, no client sees it: two attempts at most, and none on
    the replica that had just failed."""
    rng = random.Random(5)
    async with FakeEngine() as third:
        async with running(engine, other, third, routing__policy="round_robin") as app:
            faults = 0
            while faults < FAULTS:
                engine.script.clear()
                engine.script.append(EARLY[rng.choice(list(EARLY))])
                seen = len(engine.seen)
                async with client.post(app.url + CHAT, json=BODY) as response:
                    assert (response.status, await response.read()) == (200, b"".join(events()))
                assert len(engine.seen) - seen <= 1, "asked the replica that had failed"
                faults += len(engine.seen) - seen
                record = app.hub.pages.decisions[-1]
                assert len(record.retries) == len(engine.seen) - seen
                app.router.fleet.members[engine.url].breaker.observe(True, 0.0)  # or it would be left alone
            assert idle(app)
