"""Requests in two legs that a worker calls: what the hub tells it of them, and what it tells the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec
from tests.multiprocess.stubs import StubHub, serving, until, worker
from tests.multiprocess.test_hub_lost import NOBODY

P, D = "http://p", "http://d"
USAGE = Usage(1_000, 1, 100)


def _hub() -> StubHub:
    """A hub with one replica of SGLang's that prefills and one that decodes, which take requests in two legs alone."""
    hub = StubHub(P, D)
    router = hub.router
    router.replace([Replica(P, role=Role.PREFILL), Replica(D, role=Role.DECODE)])
    for id_ in (P, D):
        router.observe_models(id_, [ServedModel("m", owned_by="sglang")])
        router.observe_health(id_, True)
        router.set_kv_connector(id_, KvConnector.SGLANG, "p:8998" if id_ == P else "")
    for pair in router.pairs_to_warm(0.0):
        router.pair_warmed(*pair, ok=True, now_s=0.0)
    return hub


def _wanted() -> PlacementRequest:
    prompt = Prompt(b"", 0, (), skipped_bytes=4_000)
    want = PlacementRequest(RequestSpec("m", prompt, stream=True), "m", Chain([1, 2, 3], 1, 9, (), 1), "key")
    want.may_split = True
    return want


async def test_a_worker_tells_when_a_prefill_leg_has_ended(tmp_path: Path) -> None:
    """It is told where to prefill; when that leg has ended, its replica is free, and the other one still at work. A
    second time, or one behind the end, changes nothing."""
    path, hub = tmp_path / "hub", _hub()
    async with serving(hub, path), worker(path) as one:
        await until(lambda: one.placing)
        lease = await one.place(_wanted(), NOBODY)
        leg = lease.receipt.leg
        assert leg is not None
        assert (lease.replica, leg.replica, leg.handshake, leg.address) == (D, P, KvConnector.SGLANG, "p:8998")
        members = hub.router.fleet.members
        assert (len(members[P].leases), len(members[D].leases)) == (1, 1)
        for _ in range(2):
            one.finish_prefill(lease, Outcome(EndReason.OK, USAGE), 1.0)
        await until(lambda: not members[P].leases)
        assert len(members[D].leases) == 1
        one.finish(lease, Outcome(EndReason.OK, USAGE), 2.0)
        one.finish_prefill(lease, Outcome(EndReason.FAILED), 3.0)
        await until(lambda: not members[D].leases)
        assert members[P].breaker.failures == 0
        assert not hub.router.fleet.legs.open


async def test_without_the_hub_nothing_goes_to_half_a_pair(tmp_path: Path) -> None:
    """Neither server of SGLang's takes a whole request, and the worker knows it from the last view."""
    path, hub = tmp_path / "hub", _hub()
    async with worker(path) as one:
        async with serving(hub, path):
            await until(lambda: one.placing)
            await one.place(_wanted(), NOBODY)
        await until(lambda: not one.placing)
        with pytest.raises(NoReplicaReady):
            await one.place(_wanted(), NOBODY)


async def test_a_worker_that_leaves_gives_both_legs_back(tmp_path: Path) -> None:
    """Whatever was open."""
    path, hub = tmp_path / "hub", _hub()
    async with serving(hub, path):
        async with worker(path) as one:
            await until(lambda: one.placing)
            await one.place(_wanted(), NOBODY)
        members = hub.router.fleet.members
        await until(lambda: not members[P].leases and not members[D].leases)
        assert not hub.router.fleet.legs.open


async def test_a_worker_tells_of_a_pair_that_broke(tmp_path: Path) -> None:
    """The hub lets it rest."""
    path, hub = tmp_path / "hub", _hub()
    members, legs = hub.router.fleet.members, hub.router.fleet.legs
    for id_ in (P, D):
        hub.router.set_kv_connector(id_, KvConnector.NIXL, "")
    for pair in hub.router.pairs_to_warm(0.0):
        hub.router.pair_warmed(*pair, ok=True, now_s=0.0)
    assert legs.is_warm(members[P], members[D])
    async with serving(hub, path), worker(path) as one:
        await until(lambda: one.placing)
        one.report_pair_failure(P, D)
        await until(lambda: not legs.is_warm(members[P], members[D]))
