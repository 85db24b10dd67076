"""Routers that share a store: what one knows holds at the others, and no request notices what becomes of the store."""

from __future__ import annotations

import asyncio
import time
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
from aiohttp import ClientSession

from router.core.fleet.breaker import State
from router.router_server import RouterServer
from tests.peering.routers import routers_of, several, whole
from tests.peering.stores import StoreServer
from tests.support.fakes import FakeEngine, running, status
from tests.support.figures import figure
from tests.support.keyring import Keyring
from tests.support.waiting import until

pytestmark = [
    pytest.mark.promise("No request waits for the shared store or fails with it.", "store"),
    pytest.mark.promise("A stored response stays its tenant's through every router.", "store"),
]

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.figures
async def test_a_stored_response_is_known_to_all_routers(
    tmp_path: Path, client: ClientSession, engine: FakeEngine, other: FakeEngine
) -> None:
    """The very next request, through another router than the one that answered, finds the response, at the replica that
    has it: 200. Another tenant's does not: 404."""
    ring = Keyring(tmp_path, acme={}, few={})

    async def ask(app: RouterServer, tenant: str, **body: Any) -> int:
        sent = {"model": "m", "input": "x", **body}
        async with client.post(app.url + RESPONSES, json=sent, headers=ring.of(tenant)) as response:
            await response.read()
            return response.status

    async with StoreServer() as server, several(3, server.url, engine, other, **ring.settings) as apps:
        turns, missed, late = cycle(apps), 0, 0
        app = next(turns)
        for n in range(40):
            for each in (engine, other):
                each.script.clear()
                each.script.append(status(200, f'{{"id": "resp_{n}", "object": "response"}}'))
            engine.seen.clear()
            other.seen.clear()
            assert await ask(app, "acme") == 200
            made_by = engine if engine.seen else other
            app, stranger = next(turns), apps[(n + 2) % 3]
            if await ask(app, "acme", previous_response_id=f"resp_{n}") != 200:  # this machine may be too busy for it
                late += 1
                await until(lambda known=app.control.placer.owners.knows, id_=f"resp_{n}": known(id_))
                assert await ask(app, "acme", previous_response_id=f"resp_{n}") == 200
            assert made_by.seen[-1].json["previous_response_id"] == f"resp_{n}"
            missed += await ask(stranger, "few", previous_response_id=f"resp_{n}") != 404
        figure("stored responses that the next request did not find, of 40", 0, late)
        assert not missed
        assert await ask(app, "acme", previous_response_id="resp_unknown") == 404


async def test_a_replica_that_three_have_found_dead_is_dead_for_all(client: ClientSession, engine: FakeEngine) -> None:
    """Three routers have had three failures each of one replica: the fourth sends it nothing more, without a failure of
    its own; its trial brings the replica back."""
    async with StoreServer() as server, FakeEngine() as dead:
        async with several(4, server.url, dead, engine, upstream__retries_max=0) as apps:
            for app in apps[:3]:
                member = app.router.fleet.member(dead.url)
                assert member is not None
                for _ in range(3):
                    member.breaker.count_failure(time.monotonic())
                app.router.fitness._guard(member)
            last = apps[3].router.fleet.member(dead.url)
            assert last is not None
            await until(lambda: last.breaker.backoff_s)
            assert last.state(time.monotonic()) is State.OPEN
            assert last.breaker.failures == 0
            assert "3 other routers" in last.breaker.why
            apps[3].router.fleet.observe_health(engine.url, False, "as if it were gone", proof=True)
            async with client.post(apps[3].url + CHAT, json=BODY) as response:
                assert response.status == 200
            assert not last.breaker.backoff_s


@pytest.mark.long
@pytest.mark.figures
@pytest.mark.parametrize("how", ["frozen", "killed", "full", "flushed"])
async def test_no_request_notices_what_becomes_of_the_store(
    how: str, client: ClientSession, engine: FakeEngine, other: FakeEngine
) -> None:
    """A store that is frozen, killed, full or emptied in mid-load: every request is answered, and no slower than
    before; the routers are alone within a second and whole within a second of its return."""
    async with StoreServer() as server, several(2, server.url, engine, other) as apps:
        took: list[float] = []

        async def load(for_s: float, seen: list[float]) -> None:
            until_s = time.monotonic() + for_s
            for app in cycle(apps):
                began_s = time.monotonic()
                async with client.post(app.url + CHAT, json=BODY) as response:
                    assert response.status == 200
                    await response.read()
                seen.append(time.monotonic() - began_s)
                if time.monotonic() >= until_s:
                    return

        await load(1.0, took)
        during: list[float] = []
        task = asyncio.create_task(load(4.0, during))
        began_s = time.monotonic()
        match how:
            case "frozen":
                server.freeze()
            case "killed":
                await server.kill()
            case "full":
                await server.ask("CONFIG", "SET", "maxmemory", "1")
            case _:
                await server.ask("FLUSHALL")
        if how != "flushed":
            await until(lambda: not any(map(whole, apps)))
            figure(f"store {how}: alone after s", 1.0, time.monotonic() - began_s)
            await asyncio.sleep(1.0)
            match how:
                case "frozen":
                    server.thaw()
                case "killed":
                    await server.start()
                case _:
                    await server.ask("CONFIG", "SET", "maxmemory", "0")
            began_s = time.monotonic()
            await until(lambda: all(whole(app) and routers_of(app) == 2 for app in apps))
            figure(f"store {how}: whole again after s", 1.0, time.monotonic() - began_s)
        await task
        before_ms, during_ms = (1e3 * quantiles(seen, n=100)[98] for seen in (took, during))
        figure(f"store {how}: added to the p99 of a request, ms", 2.0, during_ms - before_ms)
        await until(lambda: all(whole(app) for app in apps))


async def test_a_router_starts_and_serves_without_its_store(client: ClientSession, engine: FakeEngine) -> None:
    """A store that is not there when the router starts costs nothing; the router's pages say that it is alone, and why,
    and it hears the others as soon as there is a store."""
    server = StoreServer()
    try:
        async with running(engine, peering__redis_url=server.url) as app:
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert response.status == 200
            async with client.get(f"{app.admin_url}/admin/replicas") as response:
                said = (await response.json())["sharing"]
            assert (said["whole"], said["routers"], said["fleet"]) == (False, [], "fleet")
            assert said["why"].startswith("unreachable")
            await server.start()
            await until(lambda: whole(app))
            page = (await app.control.metrics.page_in_slices()).decode()
            assert "warmroute_peering_connected 1.0" in page
            assert "warmroute_peering_routers 1.0" in page
    finally:
        await server.__aexit__()


@pytest.mark.long
@pytest.mark.figures
async def test_a_tenants_rate_is_one_through_four_routers(
    tmp_path: Path, client: ClientSession, engine: FakeEngine
) -> None:
    """A tenant that asks four routers at once gets its rate and not four times as much; without the store each router
    has a part of it, and the parts are the whole."""
    ring = Keyring(tmp_path, acme={"requests_per_min": 120})
    async with StoreServer() as server, several(4, server.url, engine, **ring.settings) as apps:

        async def ask(app: RouterServer) -> int:
            async with client.post(app.url + CHAT, json=BODY, headers=ring.of("acme")) as response:
                await response.read()
                return response.status

        began_s, statuses, elapsed_s = time.monotonic(), list[int](), 0.0
        while elapsed_s < 10.0 or len(statuses) < 240:  # what went over in a burst is a debt, which is paid by then
            statuses += await asyncio.gather(*map(ask, apps))
            elapsed_s = time.monotonic() - began_s
            await asyncio.sleep(0.02)
        allowed = 120 + 2 * elapsed_s  # the bucket, and what it was filled with
        passed, share = statuses.count(200), statuses.count(200) / allowed
        assert share < 1.25  # routers that knew nothing of each other would let in all, 1.6 of it and more
        assert passed > 0.75 * min(allowed, len(statuses))  # where the machine is slow, less is asked than is allowed
        figure("sharing_tenants_rate_error_share", 0.05, abs(share - 1))
        await server.kill()
        await until(lambda: not any(map(whole, apps)))
        parts = [app.control.admission.quotas.part("acme") for app in apps]
        assert sum(parts) == pytest.approx(1.0, abs=0.1)
        assert min(parts) > 0
