"""Waiting for a place and being turned away, through the whole router."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.core.placement.policies import POLICIES
from router.core.types.requests import Priority
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, half_then_waits, idle, mute, running, settings, silent
from tests.support.patient import Patient

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello " * 50}]}


def queued(app: RouterServer) -> int:
    """Requests that wait."""
    return sum(app.control.admission.count_queued()[0].values())


async def until(app: RouterServer, waiting: int) -> None:
    """Return when so many wait."""
    while queued(app) != waiting:
        await asyncio.sleep(0.002)


async def all_leave(app: RouterServer, leaving: list[asyncio.Task[Any]], waiting: int) -> None:
    """These clients leave; return when only so many wait."""
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    async with asyncio.timeout(60):
        await until(app, waiting)


async def asked(client: ClientSession, app: RouterServer, **more: Any) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of an answer."""
    async with client.post(app.url + CHAT, json={**BODY, **more}) as response:
        body = await (response.text() if more.get("stream") else response.json())
        return response.status, body, dict(response.headers)


async def page(client: ClientSession, app: RouterServer) -> str:
    """The metrics."""
    async with client.get(app.url + "/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_a_place(client: ClientSession, engine: FakeEngine, stream: bool) -> None:
    """While the fleet is full the next request waits here, is sent the moment an answer has ended, and is answered as
    if nothing had been; how long it waited is in metrics and `/admin/decisions`, and is no overhead of ours."""
    engine.script.append(half_then_waits if stream else mute)
    async with running(engine, admission__in_flight_max=1) as app:
        first = asyncio.create_task(asked(client, app, stream=stream))
        await engine.at_work.wait()
        second = asyncio.create_task(asked(client, app, stream=stream))
        await until(app, 1)
        assert 'warmroute_queued_requests{model="m",priority="normal"} 1.0' in await page(client, app)
        await asyncio.sleep(1.0)
        assert len(engine.seen) == 1
        engine.go_on.set()
        assert [(await each)[0] for each in (first, second)] == [200, 200]
        text = await page(client, app)
        assert 'warmroute_queue_seconds_count{model="m"} 1.0' in text
        assert 'warmroute_queued_requests{model="m",priority="normal"} 0.0' in text
        overhead = re.search(r"^warmroute_overhead_seconds_sum (\S+)$", text, re.MULTILINE)
        records = [
            (each.times.overhead_s or 0.0, each.times.queued_s, each.times.duration_s)
            for each in app.control.pages.decisions
        ]
        async with client.get(app.admin_url + "/admin/decisions") as response:
            newest = (await response.json())["decisions"][0]
        assert newest["queued_s"] >= 0.9
        assert overhead
        assert float(overhead[1]) == pytest.approx(sum(overhead_s for overhead_s, *_ in records))
        assert all(overhead_s + queued_s <= duration_s for overhead_s, queued_s, duration_s in records)
        async with client.get(app.admin_url + "/admin/replicas") as response:
            (row,) = (await response.json())["replicas"]
        assert row["window"] == 1
        assert idle(app)


@pytest.mark.promise(
    "The admission queue is bounded in requests, bytes and time, and holds no client that left.", "clients"
)
async def test_too_many_are_turned_away_at_once(client: ClientSession, engine: FakeEngine) -> None:
    """Beyond the queue's bound: 429 `overloaded` with Retry-After, in the dialect's own words, counted by reason;
    whoever waits is not touched."""
    engine.script.append(mute)
    async with running(engine, admission__in_flight_max=1, admission__queue_requests_max=2) as app:
        tasks = [asyncio.create_task(asked(client, app))]
        await engine.at_work.wait()
        tasks += [asyncio.create_task(asked(client, app)) for _ in range(2)]
        await until(app, 2)
        for _ in range(3):
            status, body, headers = await asked(client, app)
            assert (status, body["error"]["code"]) == (429, "overloaded")
            assert 1 <= int(headers["Retry-After"]) <= 60
        async with client.post(app.url + "/v1/messages", json={**BODY, "max_tokens": 5}) as response:
            assert response.status == 429
            assert (await response.json())["type"] == "error"
        shed = 'warmroute_shed_requests_total{code="overloaded",model="m",priority="normal"} 4.0'
        assert shed in await page(client, app)
        engine.go_on.set()
        assert [(await each)[0] for each in tasks] == [200] * 3
        assert idle(app)


@pytest.mark.promise(
    "The admission queue is bounded in requests, bytes and time, and holds no client that left.", "clients"
)
async def test_a_client_that_leaves_the_queue_is_gone(client: ClientSession, engine: FakeEngine) -> None:
    """Its place in line is another's at once, and no replica ever hears of it."""
    engine.script.append(silent)
    async with running(engine, admission__in_flight_max=1) as app:
        first = asyncio.create_task(asked(client, app, stream=True))
        await engine.at_work.wait()
        leaving = [asyncio.create_task(asked(client, app)) for _ in range(20)]
        await until(app, 20)
        stays = asyncio.create_task(asked(client, app))
        await until(app, 21)
        await all_leave(app, leaving, 1)
        engine.go_on.set()
        assert [(await each)[0] for each in (first, stays)] == [200, 200]
        assert len(engine.seen) == 2
        assert app.control.admission.count_queued() == (dict.fromkeys(Priority, 0), 0)
        assert idle(app)


async def test_nobody_waits_for_ever(client: ClientSession, engine: FakeEngine) -> None:
    """After queue_timeout_s it is 429, and what is being answered goes on."""
    engine.script.append(mute)
    async with running(engine, admission__in_flight_max=1, admission__queue_timeout_s=0.3) as app:
        first = asyncio.create_task(asked(client, app))
        await engine.at_work.wait()
        status, body, _ = await asked(client, app)
        assert (status, body["error"]["code"]) == (429, "overloaded")
        engine.go_on.set()
        assert (await first)[0] == 200


async def test_nothing_there_is_503_and_not_429(client: ClientSession, engine: FakeEngine) -> None:
    """Who waits for replicas that are gone is told 503: asking less would not help."""
    engine.script.append(mute)
    async with running(engine, admission__in_flight_max=1) as app:
        first = asyncio.create_task(asked(client, app))
        await engine.at_work.wait()
        second = asyncio.create_task(asked(client, app))
        await until(app, 1)
        app.router.fleet.observe_health(engine.url, ok=False, why="gone", proof=True)
        assert (await second)[0] == 503
        engine.go_on.set()
        await first


async def test_an_engines_own_queue_closes_it(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A replica whose engine says that too many wait there gets no more while another has room."""
    engine.metrics = "vllm:num_requests_running 4.0\nvllm:num_requests_waiting 500.0\n"
    other.metrics = "vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    async with running(engine, other) as app:
        await asyncio.sleep(0.3)  # a tick
        for fake in (engine, other):
            fake.script.extend([mute] * 40)
        tasks = [asyncio.create_task(asked(client, app, user=str(n))) for n in range(40)]
        while len(engine.seen) + len(other.seen) < 40:
            await asyncio.sleep(0.01)
        assert len(engine.seen) <= 4
        engine.go_on.set()
        other.go_on.set()
        assert {(await each)[0] for each in tasks} == {200}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    """The policy of the routers that are started."""
    policy = Patient()
    monkeypatch.setitem(POLICIES, "warm", lambda: policy)
    return policy


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_held_goes_as_soon_as_that_is_better(
    client: ClientSession, engine: FakeEngine, patient: Patient, stream: bool
) -> None:
    """No replica hears of it before, and it is seen waiting in the metrics; then it is answered as if nothing had been,
    and how long it waited is in `/admin/decisions`."""
    async with running(engine) as app:
        held = asyncio.create_task(asked(client, app, stream=stream))
        await until(app, 1)
        assert app.control.admission.count_queued()[1] > 0
        assert 'warmroute_queued_requests{model="m",priority="normal"} 1.0' in await page(client, app)
        assert not engine.seen
        patient.hold = False
        assert (await held)[0] == 200
        async with client.get(app.admin_url + "/admin/decisions") as response:
            assert (await response.json())["decisions"][0]["queued_s"] > 0
        assert app.control.admission.count_queued() == (dict.fromkeys(Priority, 0), 0)
        assert idle(app)


@pytest.mark.usefixtures("patient")
async def test_nobody_is_held_for_longer_than_is_allowed(client: ClientSession, engine: FakeEngine) -> None:
    """After `admission.defer_max_s` it goes all the same; with 0 at once, however patient the policy is."""
    for defer_max_s in (0.3, 0):
        async with running(engine, admission__defer_max_s=defer_max_s) as app, asyncio.timeout(60):
            assert (await asked(client, app))[0] == 200
            assert idle(app)


@pytest.mark.usefixtures("patient")
async def test_who_must_not_wait_is_not_held(client: ClientSession, engine: FakeEngine) -> None:
    """Those of high priority, those whose body would be too much to keep, and those beyond what may wait."""
    async with running(engine, admission__queue_bytes_max=400) as app, asyncio.timeout(60):
        headers = {"x-warmroute-priority": "high"}
        async with client.post(app.url + CHAT, json={**BODY, "messages": []}, headers=headers) as response:
            assert response.status == 200
        assert len(str(BODY)) > 300
        assert (await asked(client, app, more="x" * 400))[0] == 200
    async with running(engine, admission__queue_requests_max=2) as app, asyncio.timeout(60):
        held = [asyncio.create_task(asked(client, app)) for _ in range(2)]
        await until(app, 2)
        assert (await asked(client, app))[0] == 200
        for each in held:
            each.cancel()


@pytest.mark.usefixtures("patient")
async def test_a_client_that_leaves_while_held_is_gone(client: ClientSession, engine: FakeEngine) -> None:
    """No replica ever hears of it, and nothing is left of it."""
    async with running(engine) as app:
        leaving = [asyncio.create_task(asked(client, app)) for _ in range(9)]
        await until(app, 9)
        await all_leave(app, leaving, 0)
        assert not engine.seen
        assert idle(app)


async def test_who_is_held_finds_a_place_or_is_turned_away(
    client: ClientSession, engine: FakeEngine, patient: Patient
) -> None:
    """Held for long enough, it still needs a place: it waits for one as long as others do, and is told 429 then."""
    limits = {"admission__in_flight_max": 1, "admission__defer_max_s": 0.3, "admission__queue_timeout_s": 0.3}
    async with running(engine, admission__in_flight_max=1) as app, asyncio.timeout(60):
        held = [asyncio.create_task(asked(client, app)) for _ in range(2)]
        await until(app, 2)
        engine.script.append(mute)
        patient.hold = False
        await engine.at_work.wait()
        patient.hold = True
        app.apply(resolve(settings(engine, **limits)))  # now that both have come
        done, (first,) = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result()[:1] for each in done] == [(429,)]
        engine.go_on.set()
        assert (await first)[0] == 200
        assert idle(app)


async def test_who_is_held_does_not_mind_a_rest(client: ClientSession, engine: FakeEngine, patient: Patient) -> None:
    """While every replica has asked to be left alone it goes on waiting, and is answered behind that."""
    async with running(engine) as app, asyncio.timeout(60):
        held = asyncio.create_task(asked(client, app))
        await until(app, 1)
        patient.hold = False
        app.control.placer.set_cooldown(engine.url, 200.0)
        await asyncio.sleep(0.4)  # a tick
        assert queued(app) == 1
        app.router.fleet.members[engine.url].restrictions.rest_until_s = 0.0
        assert (await held)[0] == 200


@pytest.mark.usefixtures("patient")
async def test_a_router_that_ends_lets_them_go(client: ClientSession, engine: FakeEngine) -> None:
    """While it drains nobody is held: who was, is answered before it ends."""
    async with running(engine) as app:
        held = asyncio.create_task(asked(client, app))
        await until(app, 1)
        app.control.drain()
        async with asyncio.timeout(60):
            assert (await held)[0] == 200
