"""Attempts that fail before the first byte: who is tried next, how often, and at whose cost."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.config.runtime import resolve
from router.config.schema import UpstreamSettings
from router.http.failures import ConnectFailed
from router.http.upstream import Upstream
from tests.http.wire import RawEngine, Wire, connect, on_uvloop, post, proxied
from tests.support.examples import examples
from tests.support.fakes import (
    FakeEngine,
    Reply,
    empty_stream,
    error_event,
    events,
    headers_then_reset,
    idle,
    reset,
    running,
    settings,
    status,
    stream,
)

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "stream": True, "messages": []}
FAULTS = examples(int(os.environ.get("WARMROUTE_FAULTS", "100")))  # 1000 for the full size
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
    policy = {"routing__policy": "round_robin"}
    async with running(engine, other, upstream__connect_timeout_s=0.2, **policy) as app:
        async with client.post(app.url + CHAT, json=BODY):
            right, left = (engine, other) if engine.seen else (other, engine)  # whose turn is next
        await left.stop()
        hole = Hole(left.port)

        async def shuts_down(asked: FakeEngine, request: web.Request) -> web.StreamResponse:
            hole.close()
            await left.__aenter__()
            app.apply(resolve(settings(engine, other, **policy)))  # now a connection comes, however long it takes
            return await SHUTDOWN(asked, request)

        right.script.append(shuts_down)
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 200
            assert await response.read() == b"".join(events())
        record = app.control.pages.decisions[-1]
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
        assert len(app.control.pages.decisions[-1].retries) == 1
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


async def test_no_tls_is_no_connection(engine: FakeEngine) -> None:
    """A replica that should speak TLS and does not is a failed connection: nothing was sent, and another may try."""
    upstream = Upstream(UpstreamSettings(connect_timeout_s=60.0, first_byte_timeout_s=60.0), whole_bytes_max=1_000)
    with pytest.raises(ConnectFailed) as caught:
        await upstream.call(engine.url.replace("http:", "https:"), "POST", CHAT, [], b"{}", whole=True)
    assert (caught.value.refused, caught.value.timed_out, caught.value.retry) == (False, False, True)
    assert "127.0.0.1" not in str(caught.value)
    assert engine.seen == []
    await upstream.close()


@pytest.mark.inside
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


@pytest.mark.parametrize("retries_max", [0, 1])
@on_uvloop
async def test_stale_connections_are_no_tries(retries_max: int) -> None:
    """Every second request on a connection finds it closed, at both replicas: nobody sees it, though nothing may be
    retried; and what would store an answer, or may be done once only, never meets such a connection."""

    async def play(wire: Wire) -> None:
        if wire.asked > 1:
            wire.transport.close()
            return
        await wire.send(OK)

    more = {"upstream__retries_max": retries_max, "routing__policy": "round_robin"}
    async with (
        RawEngine(play) as one,
        RawEngine(play) as two,
        running(one.url, two.url, **more) as app,
        ClientSession() as client,
    ):
        for _ in range(6):
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert response.status == 200
        sent = len(one.seen) + len(two.seen)
        assert sent > 6
        asked = {"POST": "/v1/responses", "DELETE": "/v1/responses/resp_1", "GET": "/v1/responses/resp_1"}
        for method, path in [*asked.items()] * 2:
            async with client.request(method, app.url + path, json={"model": "m", "input": "x"}) as response:
                assert response.status == 200
        assert len(one.seen) + len(two.seen) == sent + 6
        assert not any(member.breaker.failures for member in app.control.router.members)


@on_uvloop
async def test_engines_that_reset_every_request_get_two_attempts() -> None:
    """A used connection that is reset looks like a stale one. A new one that is reset as well shows that it was not,
    so the request is not sent a third time."""
    resets = False

    async def play(wire: Wire) -> None:
        if resets:
            wire.reset()
            return
        await wire.send(OK)

    more = {"upstream__retries_max": 1, "routing__policy": "round_robin"}
    async with (
        RawEngine(play) as one,
        RawEngine(play) as two,
        running(one.url, two.url, **more) as app,
        ClientSession() as client,
    ):
        for status, attempts in ((200, 1), (200, 1), (502, 2), (502, 2)):
            resets, before = status == 502, len(one.seen) + len(two.seen)
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert response.status == status
            assert len(one.seen) + len(two.seen) == before + attempts


async def test_a_connection_that_waited_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the watchdog did not come round to close it: engines close such connections just when a request comes."""
    async with RawEngine(lambda wire: wire.send(OK)) as engine:
        upstream = Upstream(UpstreamSettings(connect_timeout_s=60.0, first_byte_timeout_s=60.0), whole_bytes_max=1_000)
        loop, later_s = asyncio.get_running_loop(), 0.0
        time_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: time_s() + later_s)
        for more_s, wires in ((0.0, 1), (2.0, 1), (4.0, 2), (1.0, 2)):
            later_s += more_s
            answer = await upstream.call(engine.url, "POST", CHAT, [], b"{}", whole=True)
            upstream.done(answer)
            assert len(engine.wires) == wires
        await upstream.close()


async def test_one_faulty_replica_fails_nobody(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Whatever one of three replicas does before its first byte, no client sees it: two attempts at most, and none on
    the replica that had just failed."""
    rng = random.Random(5)
    async with FakeEngine() as third:
        # A third of all requests fail here, far more often than a budget is for.
        more = {"routing__policy": "round_robin", "upstream__retry_ratio": 1.0}
        async with running(engine, other, third, **more) as app:
            faults = 0
            while faults < FAULTS:
                engine.script.clear()
                engine.script.append(EARLY[rng.choice(list(EARLY))])
                seen = len(engine.seen)
                async with client.post(app.url + CHAT, json=BODY) as response:
                    assert (response.status, await response.read()) == (200, b"".join(events()))
                assert len(engine.seen) - seen <= 1, "asked the replica that had failed"
                faults += len(engine.seen) - seen
                record = app.control.pages.decisions[-1]
                assert len(record.retries) == len(engine.seen) - seen
                app.router.fleet.members[engine.url].breaker.close()  # or it would be left alone
            assert idle(app)


def sheds(after: str | None, code: int = 429) -> Reply:
    """Turned away for load."""
    return status(code, '{"error": "busy"}', {"Retry-After": after} if after is not None else None)


async def test_shed_moves_on_and_is_remembered(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A replica that sheds load is left alone for as long as it asks, and its request goes to another one; that is no
    failure of the replica's."""
    async with running(engine, other, routing__policy="round_robin") as app:
        for after in ("30", "Fri, 31 Dec 2100 23:59:59 GMT"):
            for fake in (engine, other):
                fake.script.clear()
                fake.seen.clear()
            app.router.fleet.members[engine.url].restrictions.rest_until_s = 0.0
            engine.script.append(sheds(after, 503))
            for _ in range(10):
                async with client.post(app.url + CHAT, json=BODY) as response:
                    assert (response.status, await response.read()) == (200, b"".join(events()))
            assert (len(engine.seen), len(other.seen)) == (1, 10)
        assert app.router.fleet.members[engine.url].breaker.failures == 0
        assert b'warmroute_attempts_total{outcome="shed"} 2.0' in app.control.metrics.page()
        assert b'warmroute_attempts_total{outcome="ok"} 20.0' in app.control.metrics.page()
        assert idle(app)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, lambda body: body["error"]["code"]),
        ("/v1/messages", lambda body: (body["type"], body["error"]["code"])[1]),
        ("/generate", lambda body: body["code"]),
    ],
)
async def test_all_shed(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str, error: Callable[[Any], str]
) -> None:
    """When all shed load the client hears it in its own dialect, with the shortest of their times; nobody is asked
    before that is over, and of many replicas only one alternative is."""
    engine.script.append(sheds("300"))
    other.script.append(sheds("70", 503))  # longer than a test may take: nobody waits for it
    async with FakeEngine() as third:
        third.script.append(sheds("200"))
        async with running(engine, other, third, upstream__retries_max=5) as app:
            for asked in (2, 3, 3):
                body = BODY | {"max_tokens": 8, "text": "x"}
                async with client.post(app.url + path, json=body) as response:
                    assert response.status == 429
                    assert error(await response.json()) == "overloaded"
                    waits = [300 * bool(engine.seen), 70 * bool(other.seen), 200 * bool(third.seen)]
                    assert 0 <= min(filter(None, waits)) - int(response.headers["Retry-After"]) <= 60
                assert sum(len(fake.seen) for fake in (engine, other, third)) == asked
            assert idle(app)


@pytest.mark.promise("A `Retry-After` header sets a replica aside for at most 300 s.", "engines")
@pytest.mark.parametrize("after", ["soon", "", "-1", "1.5", "Fri, 99 Dec 2100 23:59:59 GMT"])
async def test_odd_retry_after(client: ClientSession, engine: FakeEngine, after: str) -> None:
    """Garbage in Retry-After is nothing: a 503 is then an engine that fails, a 429 a second's rest."""
    engine.script.extend([sheds(after, 503), sheds(after)])
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 503
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")


async def test_an_engines_4xx_is_the_clients(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Whatever is wrong with the request reaches the client as the engine said it; no replica is blamed or left out."""
    for fake in (engine, other):
        fake.script.extend([status(400 + n, '{"odd": 1}', {"Retry-After": "9"}) for n in (0, 4, 9, 13, 22)] * 10)
    async with running(engine, other) as app:
        for _ in range(50):
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert 400 <= response.status < 423
                assert (await response.read(), response.headers["Retry-After"]) == (b'{"odd": 1}', "9")
        assert len(engine.seen) + len(other.seen) == 50
        assert all(m.breaker.failures == 0 for m in app.router.fleet.members.values())


NOT_STREAMS = {
    "words": b"Internal Server Error\n\n",
    "a page": b"<html></html>\n\n",
    "no JSON": b"data: {oops\n\n",
    "a number": b"data: 1\n\n",
    "done at once": b"data: [DONE]\n\n",
}


@pytest.mark.parametrize("kind", NOT_STREAMS)
async def test_a_stream_that_is_none(client: ClientSession, engine: FakeEngine, other: FakeEngine, kind: str) -> None:
    """What should be a stream of events and does not begin as one is tried elsewhere."""

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [NOT_STREAMS[kind], *events()])

    engine.script.extend([reply] * 2)
    async with running(engine, other, routing__policy="round_robin") as app:
        for _ in range(2):
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert (response.status, await response.read()) == (200, b"".join(events()))
        assert sum(kind == "garbage" for record in app.control.pages.decisions for kind, _ in record.retries) >= 1
        assert idle(app)


@pytest.mark.parametrize("first", [b": hello\n\n", b"\r\nevent: ping\ndata: {}\r\n\r\n", b"id: 1\nretry: 5\n\n"])
async def test_odd_but_well(client: ClientSession, engine: FakeEngine, first: bytes) -> None:
    """Comments, names and other fields are a good beginning too."""

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [first, *events()])

    engine.script.append(reply)
    async with running(engine) as app, client.post(app.url + CHAT, json=BODY) as response:
        assert (response.status, await response.read()) == (200, first + b"".join(events()))
