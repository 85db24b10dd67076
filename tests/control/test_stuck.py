"""Replicas that accept and never answer, through the whole router."""

import asyncio

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import named_event
from tests.support.fakes import FakeEngine, events, half_then_waits, idle, running, silent
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
QUICK = {"upstream__stall_timeout_s": 2.0}  # a tenth of what is late by any measure, so that a pause of a second is not


def body(text: str = "x", *, stream: bool = True) -> dict[str, object]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}


async def ask(client: ClientSession, url: str, text: str = "x") -> str:
    """One request that must be answered well; returns who did."""
    async with client.post(url + CHAT, json=body(text)) as response:
        assert response.status == 200
        assert await response.read() == b"".join(events())
        return response.headers["x-warmroute-replica"]


@pytest.mark.promise(
    "A replica that fails, hangs or crawls is ejected; a long prefill is never taken for that.", "faults"
)
async def test_silent_requests_move(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A replica that accepts and stays silent is found though its health checks are fine: what is silent there is
    answered by another, nothing more is sent there, metrics and admin page say why, and a trial brings it back."""
    async with running(engine, other, **QUICK) as app:
        first = engine if await ask(client, app.url) == engine.url else other
        for n in range(8):  # so that the speed of short prompts is known
            await ask(client, app.url, f"warm {n}")
        first.script.extend([silent] * 400)
        asked, seen = [], len(first.seen)
        while not app.router.fleet.restricted:
            asked.append(asyncio.ensure_future(ask(client, app.url)))
            await asyncio.sleep(0.05)
        breaker = app.router.fleet.members[first.url].breaker
        assert breaker.backoff_s == 1.0
        breaker.until_s += 600.0  # so that it is open for as long as it is looked at
        for request in asked:
            assert await request in (engine.url, other.url)
        stuck = len(first.seen) - seen
        member = app.router.fleet.members[first.url]
        assert member.breaker.backoff_s
        async with client.get(app.admin_url + "/admin/replicas") as response:
            row = next(row for row in (await response.json())["replicas"] if row["id"] == first.url)
        assert row["breaker"]["state"] == "open"
        assert "no answer for" in row["breaker"]["why"]
        assert row["breaker"]["for_s"] > 0
        async with client.get(app.admin_url + "/metrics") as response:
            page = await response.text()
        assert f'warmroute_replica_breaker{{replica="{first.url}",state="open"}} 1.0' in page
        assert f'warmroute_replica_failures_total{{kind="stuck",replica="{first.url}"}} {stuck}.0' in page
        assert "warmroute_panic_mode_placements_total 0.0" in page
        first.script.clear()
        breaker.until_s -= 600.0
        while member.breaker.backoff_s:
            await ask(client, app.url)
            await asyncio.sleep(0.05)
        assert idle(app)


async def test_streams_that_go_on_are_life(client: ClientSession, engine: FakeEngine) -> None:
    """While a replica's streams go on, a request that waits there is only queued, however long."""

    async def drips(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in events(30):
            await response.write(piece)
            await asyncio.sleep(0.1)
        return response

    async with running(engine, **QUICK) as app:
        member = app.router.fleet.members[engine.url]
        engine.script.append(drips)
        async with client.post(app.url + CHAT, json=body()) as response:
            begun_s = member.evidence.alive_s
            await until(lambda: member.evidence.alive_s > begun_s + 1.0)
            assert response.status == 200
        engine.script.append(half_then_waits)
        async with client.post(app.url + CHAT, json=body()) as response:
            await response.content.readany()
            await asyncio.sleep(0.6)
            before_s = member.evidence.alive_s
            await asyncio.sleep(1.2)
            assert member.evidence.alive_s == before_s
            engine.go_on.set()
            await response.read()


async def test_events_before_any_work_are_no_life(client: ClientSession, engine: FakeEngine) -> None:
    """The API server of a dead engine begins streams of the Responses API: that is no sign of life."""

    async def begins(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(named_event("response.created", response={}))
        await fake.go_on.wait()
        return response

    async with running(engine) as app:
        engine.script.append(begins)
        async with client.post(
            app.url + "/v1/responses", json={"model": "m", "stream": True, "input": "x"}
        ) as response:
            await response.content.readany()
            await asyncio.sleep(1.2)
            assert app.router.fleet.members[engine.url].evidence.alive_s == 0.0
            engine.go_on.set()


async def test_clients_that_give_up_show_it(engine: FakeEngine, other: FakeEngine) -> None:
    """Clients that time out on a silent replica take it out, though none of them waited for the router to notice."""
    async with running(engine, other, upstream__stall_timeout_s=1.0) as app:
        async with ClientSession() as client:
            first = engine if await ask(client, app.url) == engine.url else other
            for n in range(8):
                await ask(client, app.url, f"warm {n}")
            for fake in (engine, other):
                fake.script.extend([silent] * 20)
            asked = 0
            while not app.router.fleet.restricted:
                first.at_work.clear()
                giving_up = asyncio.ensure_future(ask(client, app.url))
                await first.at_work.wait()
                await asyncio.sleep(1.0)
                giving_up.cancel()
                await asyncio.gather(giving_up, return_exceptions=True)
                await until(lambda: idle(app))
                asked += 1
            assert asked <= 6
            assert list(app.router.fleet.restricted) == [first.url]
            await until(lambda: idle(app))
