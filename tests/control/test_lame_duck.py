"""The end of a router: no longer ready, yet open; then drained; then what is left is cut, and told so."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import ClientSession

from tests.http.wire import CHAT, RawEngine, Wire, connect, on_uvloop, post
from tests.support.fakes import FakeEngine, half_then_waits, mute, running
from tests.support.recorded import head

ASKED = b'{"model":"m","messages":[]}'
BODY = {"model": "m", "stream": True, "messages": []}


async def whole(wire: Wire) -> None:
    """An answer."""
    wire.transport.write(head("content-length: 2") + b"{}")


@on_uvloop
async def test_a_lame_duck_serves_and_says_close() -> None:
    """Connections kept alive from before get one more answer each, which ends them; new ones are accepted and answered
    likewise; those that ask for nothing stay open until the drain."""
    async with RawEngine(whole) as engine, running(engine.url) as app:
        kept = [await connect(app.url) for _ in range(3)]
        for client in kept:
            client.ask(post(CHAT, ASKED))
            assert b"connection" not in (await client.answer()).headers
        app.lame_duck()
        app.http._server._sweep()
        assert len(app.http._server.clients) == 3
        fresh = [await connect(app.url) for _ in range(3)]
        for client, n in [*((client, 1) for client in kept[:2]), *((client, 0) for client in fresh[:2])]:
            client.ask(post(CHAT, ASKED))
            answer = await client.answer(n)
            assert answer.whole
            assert answer.headers[b"connection"] == b"close"
            await client.lost.wait()
        assert not kept[2].lost.is_set()
        assert not fresh[2].lost.is_set()
    for client in (kept[2], fresh[2]):
        await client.lost.wait()


async def test_a_lame_duck_is_not_ready(client: ClientSession, engine: FakeEngine) -> None:
    """`/readyz` says 503 on both listeners, and `/healthz` that it is alive; what runs is counted as before."""
    engine.script.append(half_then_waits)
    async with running(engine) as app:
        stream = await client.post(app.url + CHAT, json=BODY)
        for url in (app.url, app.admin_url):
            assert (await client.get(url + "/readyz")).status == 200
        app.lame_duck()
        for url in (app.url, app.admin_url):
            assert (await client.get(url + "/readyz")).status == 503
            assert (await client.get(url + "/healthz")).status == 200
            async with client.get(url + "/metrics") as page:
                assert 'warmroute_in_flight_requests{model="m"} 1.0' in await page.text()
        engine.go_on.set()
        assert b"[DONE]" in await stream.read()
        while app.http.in_flight:
            await asyncio.sleep(0)
        async with client.get(app.admin_url + "/metrics") as page:
            assert 'warmroute_in_flight_requests{model="m"} 0.0' in await page.text()


async def test_readiness_needs_no_hub(client: ClientSession, engine: FakeEngine) -> None:
    """A frontend as a lame duck answers 503 by itself, whatever its control plane reports."""
    async with running(engine) as app:
        app.http.lame_duck()
        assert (await client.get(app.url + "/readyz")).status == 503
        assert (await client.get(app.admin_url + "/readyz")).status == 200


async def test_what_is_cut_by_the_drain_says_so(client: ClientSession, engine: FakeEngine) -> None:
    """An answer that takes longer than the drain is not the client's doing: one that has not begun ends with 503 in
    the words of its dialect, one that has begun in its error event; both are recorded as drained, nobody is blamed."""
    engine.script.extend([mute, half_then_waits])
    async with running(engine, listen__drain_s=0.2) as app:
        waiting = asyncio.ensure_future(client.post(app.url + CHAT, json=BODY | {"stream": False}))
        await engine.at_work.wait()
        stream = await client.post(app.url + CHAT, json=BODY)
        await stream.content.readany()
    refused = await waiting
    assert (refused.status, refused.headers["Connection"]) == (503, "close")
    assert json.loads(await refused.read())["error"]["code"] == "drained"
    *_, last = (await stream.read()).removesuffix(b"\n\n").split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "drained"
    rows = app.control.pages.decisions
    assert sorted((row.status, row.ending, row.error) for row in rows) == [
        (200, "drained", "drained"),
        (503, "drained", "drained"),
    ]
    member = app.router.fleet.members[engine.url]
    assert (app.http.in_flight, len(member.leases), member.breaker.failures) == (0, 0, 0)


async def test_who_left_before_the_cut_has_left(client: ClientSession, engine: FakeEngine) -> None:
    """A client that leaves while the router drains is recorded as one that left."""
    engine.script.append(mute)
    async with running(engine, listen__drain_s=60.0) as app:
        waiting = asyncio.ensure_future(client.post(app.url + CHAT, json=BODY))
        await engine.at_work.wait()
        asyncio.get_running_loop().call_later(0.05, waiting.cancel)
    assert [(row.status, row.ending) for row in app.control.pages.decisions] == [(499, "client_left")]


async def test_a_second_signal_does_not_wait(client: ClientSession, engine: FakeEngine) -> None:
    """A router whose block is cancelled ends at once, and still tells its clients."""
    engine.script.append(mute)
    asked = list[asyncio.Future[aiohttp.ClientResponse]]()

    async def serve() -> None:
        async with running(engine, listen__drain_s=600.0) as app:
            asked.append(asyncio.ensure_future(client.post(app.url + CHAT, json=BODY)))
            await engine.at_work.wait()
            app.lame_duck()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await engine.at_work.wait()
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert (await asked[0]).status == 503


async def test_who_has_just_connected_may_ask(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """A connection on which nothing has come yet is not closed under the request that is on its way; one that has had
    its answer is."""
    monkeypatch.setattr("router.http.server.LATE_S", 0.01)
    page = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with running(engine) as app:
        host, port = app.url.removeprefix("http://").split(":")
        (new, asks), (old, asked) = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        asked.write(page)
        assert (await old.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        draining = asyncio.create_task(app.http._server.drain())
        assert await old.read() == b""
        asks.write(page)
        assert (await new.read()).startswith(b"HTTP/1.1 200")
        await draining
        for writer in (asks, asked):
            writer.close()


@pytest.mark.parametrize("drained", [False, True])
async def test_who_was_not_told_may_ask_at_once(
    engine: FakeEngine, drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that began before the end of the router was known said nothing of closing. A client that sends its next
    request with the last byte of it is answered, and told then; in the lame duck and in the drain."""
    monkeypatch.setattr("router.http.client_connection.NEXT_S", 60.0)  # time for the machine, not for the client
    engine.script.append(half_then_waits)
    async with running(engine, listen__drain_s=60.0) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, json.dumps(BODY).encode()))
        await engine.at_work.wait()
        while app.http._server.clients and not client.answers:
            await asyncio.sleep(0)
        app.lame_duck()
        draining = asyncio.create_task(app.http._server.drain()) if drained else None
        await asyncio.sleep(0.2 if drained else 0)  # the drain has closed whom it closes at its beginning
        engine.go_on.set()
        assert (await client.answer()).whole
        client.ask(post(CHAT, ASKED))
        answer = await client.answer(1)
        assert (answer.whole, answer.headers[b"connection"]) == (True, b"close")
        await client.lost.wait()
        assert not client.reset
        if draining is not None:
            await draining
