"""Replicas that come and go in front of several workers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from router.core.fleet.models import NoReplicaReady
from router.core.types.placements import Confidence, EndReason, Outcome, PlacementReason
from router.core.types.replicas import Replica, ServedModel
from router.multiprocess import child, control_server, protocol
from router.multiprocess.commands import ProcessSpec
from router.multiprocess.remote_placement import RemotePlacementService
from tests.multiprocess.stubs import StubHub, bound, serving, until, worker
from tests.multiprocess.test_hub_lost import NOBODY, want
from tests.multiprocess.test_processes import HUB, Traffic, command, leases_are, metric, rest_of, streams
from tests.support.discovered import Told, told
from tests.support.fakes import FakeEngine, half_then_waits, settings

__all__ = ["told"]
OK = Outcome(EndReason.OK)


def placed(placer: RemotePlacementService, replica: str) -> protocol.LeaseOpened:
    """The hub's answer to the oldest placement that it owes."""
    return protocol.LeaseOpened(
        next(iter(placer._hub.asked)), (replica, "warm", PlacementReason.COLD, Confidence.ESTIMATED, 1, 0)
    )


@pytest.mark.inside
async def test_a_placement_does_not_stand_when_its_replica_left(tmp_path: Path) -> None:
    """Whether the worker hears of that after the placement, or in the same breath, before anybody has looked at it;
    leases of others stand. The hub's books end empty."""
    hub = StubHub("http://a", "http://b", policy="round_robin")
    async with serving(hub, tmp_path / "hub") as server, worker(tmp_path / "hub") as placer:
        await until(lambda: placer.placing)
        leases = {lease.replica: lease for lease in [await placer.place(want(), NOBODY) for _ in range(2)]}
        assert all(map(placer.is_valid, leases.values()))
        hub.router.replace([Replica("http://b")])
        server.on_replica_removed("http://a")
        await until(lambda: not placer.is_valid(leases["http://a"]))
        assert placer.is_valid(leases["http://b"])
        hub.stub.slow = True
        coming = asyncio.create_task(placer.place(want(), NOBODY))
        await until(lambda: placer._hub.asked)
        placer._on_frame([placed(placer, "http://b"), protocol.RemovedNotice("http://b")])
        lease = await coming
        assert not placer.is_valid(lease)
        for each in (*leases.values(), lease):
            placer.finish(each, OK, 1.0)
        await until(lambda: hub.open == 0)
        assert not placer._leases
        assert not placer._view.loads


@pytest.mark.inside
async def test_a_placement_that_came_too_late_is_given_back(tmp_path: Path) -> None:
    """Its client left between the hub's answer and the turn of whoever asked: it is taken back, once."""
    hub = StubHub("http://a")
    hub.stub.slow = True
    async with serving(hub, tmp_path / "hub"), worker(tmp_path / "hub") as placer:
        await until(lambda: placer.placing)
        coming = asyncio.create_task(placer.place(want(), NOBODY))
        await until(lambda: placer._hub.asked)
        placer._on_frame([placed(placer, "http://a")])
        assert len(placer._leases) == 1
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        assert not placer._leases
        assert not placer._view.loads
        hub.stub.slow = False
        assert placer.is_valid(await placer.place(want(), NOBODY))
        assert hub.open == 1


@pytest.mark.promise("An engine at a reused address is credited with no block of its predecessor.", "discovery")
async def test_another_engine_on_the_same_address(tmp_path: Path) -> None:
    """Its books begin empty, whatever workers have open from before, and end empty."""
    hub = StubHub("http://a")
    async with serving(hub, tmp_path / "hub") as server, worker(tmp_path / "hub") as placer:
        await until(lambda: placer.placing)
        before = await placer.place(want(), NOBODY)
        hub.router.replace([Replica("http://a", "uid-1")])
        assert hub.open == 1
        joined, left = hub.router.replace([Replica("http://a", "uid-2")])
        assert joined == left == ["http://a"]
        server.on_replica_removed("http://a")
        hub.ready("http://a")
        hub.router.observe_models("http://a", [ServedModel("m")])
        assert hub.open == 0
        await until(lambda: not placer.is_valid(before))
        after = await placer.place(want(), NOBODY)
        assert placer.is_valid(after)
        assert hub.open == 1
        placer.finish(before, OK, 1.0)
        placer.finish(after, OK, 1.0)
        await until(lambda: hub.open == 0)


async def test_workers_hear_of_a_ready_replica_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has seen that the router is ready may ask any worker: none waits for its next look at what the hub knows."""
    hub = StubHub("http://a")
    hub.ready("http://a", ok=False)
    monkeypatch.setattr(control_server, "VIEW_S", 3600.0)
    async with serving(hub, tmp_path / "hub") as server, worker(tmp_path / "hub") as placer:
        await until(lambda: placer.placing)
        with pytest.raises(NoReplicaReady):
            placer.resolve("m")
        hub.ready("http://a")
        server.on_replica_ready("http://a")
        server.on_replica_ready("http://a")
        await until(lambda: placer._view.has_other_ready(NOBODY))
        assert placer.resolve("m") == "m"


@pytest.mark.promise("A replica that is not ready or was removed gets no new request, through any worker.", "discovery")
async def test_a_replica_is_taken_away_under_load(engine: FakeEngine, other: FakeEngine) -> None:
    """With two workers: no request fails, none reaches it once both could have heard, its streams end well, and its
    series are gone."""
    for each in (engine, other):
        each.script.extend([half_then_waits] * 4)
    options = {"admin__replicas_allowed": f"http://127.0.0.1:{other.port}", "routing__policy": "round_robin"}
    async with command(engine, **options) as router, aiohttp.ClientSession() as session:
        url = router.admin_url + "/admin/replicas"
        async with session.post(url, json={"url": other.url}) as response:
            assert response.status == 201
        while await metric(router, "warmroute_replica_ready") != 2:
            await asyncio.sleep(0.01)
        async with streams(router.url, 4) as begun:
            assert other.seen
            for each in (engine, other):
                each.script.clear()
            traffic = Traffic(router.url)
            async with traffic.going():
                await traffic.more(20)
                async with session.delete(url, params={"url": other.url}) as response:
                    assert response.status == 200
                while await metric(router, "warmroute_replica_ready") != 1:
                    await asyncio.sleep(0.01)
                await traffic.more(8)  # two of each client, the first of which may have been under way
                reached = len(other.seen)
                await traffic.more(40)
            assert len(other.seen) == reached
            assert not traffic.broken
            for each in (engine, other):
                each.go_on.set()
            assert all([await rest_of(response) for response in begun])
        await leases_are(router, 0)
        async with session.get(router.admin_url + "/metrics") as page:
            assert other.url not in await page.text()
        await until(lambda: router.said("replica left"))  # its line comes by a pipe
        assert router.said("replica left") == 1


def from_dns(name: str, port: int) -> dict[str, str]:
    """Settings of a command that knows replicas from nowhere else."""
    return {
        "discovery__source": "dns",
        "discovery__dns_name": name,
        "discovery__port": str(port),
        "discovery__loopback": "true",
    }


@pytest.mark.long
async def test_replicas_from_dns(engine: FakeEngine) -> None:
    """The command finds them by name; a hub that is killed and started again finds them anew, and no request fails."""
    async with command(**from_dns("localhost", engine.port)) as router:
        traffic = Traffic(router.url)
        async with traffic.going():
            await traffic.more(10)
            os.kill(*router.pids(HUB), signal.SIGKILL)
            await until(lambda: traffic.reasons.count("policy") >= 8)
            await until(lambda: traffic.reasons[-8:].count("policy") == 0)
        assert not traffic.broken
        assert await metric(router, "warmroute_discovery_replicas") == 1
        assert router.said("no replicas are configured: set --replica URL, `replicas` or `discovery`") == 0


class Orders:
    """In the place of what comes on standard input."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def follow(self, _: object) -> None:
        """There are none."""


async def test_a_hub_that_does_not_know_says_nothing(
    engine: FakeEngine, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody has told it of any replica, its workers are not told that there are none: those that know some from
    the hub before it go on by the ring."""
    orders = Orders()
    monkeypatch.setattr(child, "_CommandReader", lambda: orders)
    monkeypatch.setattr(child, "_ready", lambda: None)
    monkeypatch.setattr(child, "SETTLE_S", 5.0)
    with bound(tmp_path / "hub") as listening, socket.create_server(("127.0.0.1", 0)) as admin:
        fds = [os.dup(each.fileno()) for each in (listening, admin)]
        spec = ProcessSpec(settings=settings(), path=str(tmp_path / "hub"), hub_fd=fds[0], admin_fd=fds[1])
        serves = asyncio.create_task(child._hub(spec))
        async with worker(tmp_path / "hub") as placer:
            await until(lambda: told.watches)
            await asyncio.sleep(0.1)
            assert not placer.viewed.is_set()
            told.say(Replica(engine.url))
            await placer.viewed.wait()
            assert placer.resolve(None) == "m", "and what they are told first is what is ready"
        orders.stop.set()
        await serves
