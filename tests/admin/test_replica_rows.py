"""Rows of replicas: the reason of each state, and which replica is slower than its peers or gets nothing."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession

from router.admin.replica_rows import Peers, explain_state
from router.core.estimators.first_token_delay import SAMPLES
from router.core.fleet.breaker import Cause
from router.core.fleet.member import ReplicaState
from router.core.insights.ledger.recent_traffic import ReplicaTraffic
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica, ServedModel
from tests.core.fleet.simulated import Engine, World
from tests.core.ready import router_of
from tests.support.fakes import FakeEngine, running, status

IDS = [f"http://{number}" for number in range(4)]
CHAT = "/v1/chat/completions"


def members(world: World) -> dict[str, ReplicaState]:
    """Those of a simulated fleet."""
    return dict(world.router.fleet.members)


def same(requests: float = 30.0, **more: Any) -> dict[str, ReplicaTraffic]:
    """The same traffic at each replica."""
    return {id_: ReplicaTraffic(requests, requests / 120, 0.25, requests, **more) for id_ in IDS}


def explained(world: World, traffic: dict[str, ReplicaTraffic]) -> tuple[dict[str, str], dict[str, str]]:
    """The slow replicas and the idle ones, each with its reason."""
    found = members(world)
    peers = Peers(found.values(), traffic)
    slow = {id_: why for id_, member in found.items() if (why := peers.explain_slow(member))}
    idle = {id_: why for id_, member in found.items() if (why := peers.explain_idle(member, world.now_s))}
    return slow, idle


@pytest.mark.parametrize(("times", "named"), [(6.0, True), (3.0, True), (1.2, False)])
def test_a_slower_engine_is_named_for_as_long_as_it_is_avoided(times: float, named: bool) -> None:
    """Its breaker stays closed and clients wait for nothing, so only its learned speed shows it: at each of many looks,
    though few requests go there. Small differences are noise."""
    world = World({id_: Engine() for id_ in IDS})
    world.engines[IDS[0]].speed /= times
    world.run(60, every_s=0.25, tokens=3_000)
    for _ in range(20):
        world.run(7, every_s=0.25, tokens=3_000)
        slow, _ = explained(world, same())
        assert set(slow) == ({IDS[0]} if named else set())
        assert all(why.startswith("prefill takes ") for why in slow.values())
    assert world.opened == []


def test_first_tokens_that_come_late_behind_a_quick_engine() -> None:
    """What is between router and engine is in no learned speed, and in the times to first token."""
    world = World({id_: Engine() for id_ in IDS})
    late = ReplicaTraffic(30, 0.25, 0.25, 30, 3.1, 3.4)
    usual = same(ttft_p50_s=0.4, ttft_p90_s=0.9)
    why = "half of its first tokens take 3.10 s or longer, and 0.40 s on its peers"
    assert explained(world, usual | {IDS[2]: late})[0] == {IDS[2]: why}
    assert explained(world, usual)[0] == {}
    few = late._replace(first_tokens=3.0)
    assert explained(world, usual | {IDS[2]: few})[0] == {}
    short = same(ttft_p50_s=0.01) | {IDS[2]: late._replace(ttft_p50_s=0.1)}
    assert explained(world, short)[0] == {}, "a tenth of a second is no trouble"


def test_a_proxy_that_delays_first_tokens_is_named() -> None:
    """Its requests overlap, so no speed shows the delay, and no median is needed to see it."""
    world = World({id_: Engine() for id_ in IDS})
    for number, late_ms in enumerate((0.0, 3_000.0, 300.0, 900.0)):
        for _ in range(SAMPLES):
            members(world)[IDS[number]].own_speed.delay.observe(200.0, 200.0 + late_ms, 1.0)
    why = "its first tokens come 3.00 s later than its work explains: check the network and the proxies before it"
    assert explained(world, same())[0] == {IDS[1]: why}


def test_a_replica_that_gets_nothing() -> None:
    """Only one that could take requests, while its peers get some."""
    world = World({id_: Engine() for id_ in IDS})
    idle = same() | {IDS[3]: ReplicaTraffic(share=0.0)}
    assert explained(world, idle)[1] == {IDS[3]: "it got 0 requests in the last minutes, and its peers got 30 each"}
    assert explained(world, {id_: ReplicaTraffic() for id_ in IDS})[1] == {}
    world.router.observations.observe_models(IDS[3], [ServedModel("another")])
    assert explained(world, idle)[1] == {}, "no peer serves its model"
    world.router.observations.observe_models(IDS[3], [ServedModel("m")])
    world.router.fleet.observe_health(IDS[3], False, "connection refused", proof=True)
    assert explained(world, idle)[1] == {}, "its health checks say more"


def test_peers_serve_the_same_models() -> None:
    """Large models take longer than small ones, and that makes no replica slow."""
    world = World({id_: Engine() for id_ in IDS})
    for id_ in IDS[:2]:
        world.router.observations.observe_models(id_, [ServedModel("large")])
    times = {id_: ReplicaTraffic(30, 0.25, 0.25, 30, 4.0 if id_ in IDS[:2] else 0.3, 5.0) for id_ in IDS}
    assert explained(world, times) == ({}, {})


def test_the_reason_of_each_state() -> None:
    """The breaker's, the replica's own request, discovery's, or that of the health checks."""
    router = router_of(IDS)
    member = router.fleet.members[IDS[0]]
    healthy = explain_state(member, 10.0)
    member.breaker.trip(Cause.SLOW, "first tokens take five times as long as its peers'", 10.0)
    assert explain_state(member, 10.25) == "first tokens take five times as long as its peers'; for another 0.8 s"
    assert explain_state(member, 12.0) == "first tokens take five times as long as its peers'; one trial at a time"
    member.breaker.close()
    assert explain_state(member, 12.0) == healthy
    router.rest(IDS[0], 15.0)
    assert explain_state(member, 12.0) == "requested by the replica; for another 3.0 s"
    router.fleet.observe_health(IDS[1], ok=False, why="connection refused", proof=True)
    assert explain_state(router.fleet.members[IDS[1]], 12.0) == "connection refused"
    router.replace(Replica(id_, ready=id_ != IDS[2]) for id_ in IDS)
    assert explain_state(router.fleet.members[IDS[2]], 12.0) == "not ready according to discovery"


async def test_an_open_breaker_says_why_on_the_page(client: ClientSession) -> None:
    """A replica that fails all requests and passes its health checks: the data of page and `top` has the failures, and
    each replica's rate, share and times."""
    async with FakeEngine() as failing, FakeEngine() as good, running(failing, good) as app:
        failing.script.extend([status(500)] * 40)
        for number in range(40):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number} " * 40}], "stream": True}
            async with client.post(app.url + CHAT, json=body) as response:
                await response.read()
        async with client.get(app.admin_url + "/admin/observatory") as response:
            page = await response.json()
    rows = {row["id"]: row for row in page["replicas"]}
    sick, well = rows[failing.url], rows[good.url]
    assert sick["ready"]
    assert sick["state"] != "closed"
    assert sick["why"].startswith("3 failures in a row; ")
    assert well["request_share"] > 0.5
    assert well["requests_per_s"] > 0
    assert 0 < well["ttft_p50_s"] <= well["ttft_p90_s"]
    assert page["tenants"][0]["request_share"] == 1.0


async def test_falls_of_a_grade_are_counted(client: ClientSession) -> None:
    """Each fall of a ready replica, in the page's data and as a metric; no rise, and none of a replica that is down."""
    async with FakeEngine() as engine, running(engine) as app:
        grades = (Confidence.EXACT, Confidence.CATCHING_UP, Confidence.EXACT, Confidence.ESTIMATED, Confidence.EXACT)
        for grade in grades:
            app.control.lifecycle.on_grade_changed(engine.url, grade, "events are missing")
        assert app.control.lifecycle.count_grade_falls(engine.url) == 2
        app.router.fleet.observe_health(engine.url, False, "connection refused", proof=True)
        app.control.lifecycle.on_grade_changed(engine.url, Confidence.ESTIMATED, "gone")
        async with client.get(app.admin_url + "/admin/observatory") as response:
            (row,) = (await response.json())["replicas"]
        async with client.get(app.admin_url + "/metrics") as response:
            text = await response.text()
    assert row["grade_falls"] == 2
    assert f'warmroute_replica_grade_falls_total{{replica="{engine.url}"}} 2.0' in text
    assert f'warmroute_replica_slowness_ratio{{replica="{engine.url}"}} 1.0' in text
    assert f'warmroute_replica_first_token_delay_seconds{{replica="{engine.url}"}} 0.0' in text
