"""A queue in the hub, and requests of several workers in it, whoever goes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from router.config.schema import AdmissionSettings
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.requests import Priority, RequestSpec
from router.multiprocess.remote_placement import RemotePlacementService
from tests.multiprocess.stubs import StubHub, serving, until, worker
from tests.support.patient import Patient

OK = Outcome(EndReason.OK, Usage(10, 2, 4))
NOBODY: frozenset[str] = frozenset()


class Ahead:
    """A clock that is ahead by as much as a test sets it."""

    ahead_s = 0.0

    def __call__(self) -> float:
        """The time of `time.monotonic`, and that much more."""
        return time.monotonic() + self.ahead_s


def want(tenant: str = "", priority: Priority = Priority.NORMAL, **more: Any) -> PlacementRequest:
    """A small request."""
    return PlacementRequest(
        RequestSpec("m"), "m", None, "k", body_tokens=10, tenant=tenant, priority=priority, body_bytes=7, **more
    )


def hub_of_one(**limits: Any) -> StubHub:
    """One replica with room for one."""
    return StubHub("http://a", limits=AdmissionSettings(in_flight_max=1, **limits))


def queued(hub: StubHub) -> int:
    """Requests that wait in the hub."""
    return sum(hub.placer.admission.count_queued()[0].values())


async def asking(placer: RemotePlacementService, hub: StubHub, wanted: PlacementRequest) -> asyncio.Task[Any]:
    """A placement that waits in the hub, and of which the worker knows that it does."""
    before = queued(hub), len(placer._hub.queued)
    task = asyncio.create_task(placer.place(wanted, NOBODY))
    await until(lambda: (queued(hub), len(placer._hub.queued)) == (before[0] + 1, before[1] + 1))
    return task


async def test_waiting_for_a_place_is_not_the_hubs_silence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits in the hub far longer than the hub may take to answer, and is then placed by it; the next turn is
    another worker's, by priority. What they waited is known to the edge."""
    monkeypatch.setattr("router.multiprocess.control_health.CHECK_S", 1e9)  # nothing else is owed when the clock is set
    hub, clock = hub_of_one(), Ahead()
    async with serving(hub, path), worker(path, clock=clock) as one, worker(path, 1, clock=clock) as two:
        await until(lambda: one.placing and two.placing)
        first = await one.place(want(), NOBODY)
        wanted, urgent = want("t"), want("u", Priority.HIGH)
        later = await asking(one, hub, wanted)
        sooner = await asking(two, hub, urgent)
        clock.ahead_s = 1_000.0
        await asyncio.sleep(0.2)  # a few looks
        assert one.placing
        assert hub.placer.admission.count_queued() == ({Priority.HIGH: 1, Priority.NORMAL: 1, Priority.LOW: 0}, 14)
        one.finish(first, OK, 1.0)
        lease = await sooner
        assert lease.receipt.policy == "warm"
        assert not later.done()
        two.finish(lease, OK, 2.0)
        lease = await later
        assert lease.receipt.policy == "warm"
        assert wanted.queued_s >= urgent.queued_s >= 1_000.0
        one.finish(lease, OK, 3.0)
        await until(lambda: hub.open == 0)


async def test_a_queue_in_a_hub_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in the queue of a hub that says nothing more goes on by the ring, though nobody else asks it for
    anything."""
    monkeypatch.setattr("router.multiprocess.control_health.CHECK_S", 0.01)
    hub, clock = hub_of_one(), Ahead()
    async with serving(hub, path) as server, worker(path, clock=clock) as placer:
        await until(lambda: placer.placing)
        await placer.place(want(), NOBODY)
        waits = await asking(placer, hub, want())
        for link in server.links:
            link.transport.pause_reading()
        while not waits.done():  # whenever it is asked whether it is there
            clock.ahead_s += 100.0
            await asyncio.sleep(0.05)
        lease = await waits
        assert lease.receipt.policy == "ring"
        assert not placer.placing


async def test_being_turned_away_travels(path: Path) -> None:
    """Code, message and time to come again reach the worker, at once or after waiting."""
    hub = hub_of_one(queue_requests_max=1)
    async with serving(hub, path), worker(path) as placer:
        await until(lambda: placer.placing)
        await placer.place(want(), NOBODY)
        waits = await asking(placer, hub, want(priority=Priority.LOW))
        with pytest.raises(Shed) as shed:
            await placer.place(want(priority=Priority.LOW), NOBODY)
        assert (shed.value.code, shed.value.retry_after_s >= 1.0) == ("overloaded", True)
        assert "busy" in str(shed.value)
        more = await asking_in_place_of(placer, hub, waits)
        hub.ready("http://a", ok=False)
        hub.placer.admission.tick()
        with pytest.raises(NoReplicaReady):
            await more


async def asking_in_place_of(
    placer: RemotePlacementService, hub: StubHub, other: asyncio.Task[Any]
) -> asyncio.Task[Any]:
    """One that matters more takes the place of one in the queue, which is turned away."""
    task = asyncio.create_task(placer.place(want(), NOBODY))
    with pytest.raises(Shed):
        await other
    await until(lambda: len(placer._hub.queued) == 1)
    assert queued(hub) == 1
    return task


async def test_who_leaves_the_queue_is_taken_back(path: Path) -> None:
    """A client that left while its request waited leaves nothing in the hub; nor does one whose turn had just come."""
    hub = hub_of_one()
    async with serving(hub, path), worker(path) as placer:
        await until(lambda: placer.placing)
        first = await placer.place(want(), NOBODY)
        waits = await asking(placer, hub, want())
        waits.cancel()
        await until(lambda: queued(hub) == 0)
        last = await asking(placer, hub, want())
        placer.finish(first, OK, 1.0)
        await until(lambda: queued(hub) == 0)
        last.cancel()
        await asyncio.gather(waits, last, return_exceptions=True)
        if not last.cancelled():  # it came first
            placer.finish(last.result(), OK, 2.0)
        await until(lambda: hub.open == 0)
        assert not placer._hub.queued


async def test_a_request_is_held_for_any_worker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the hub, for as long as is better, and not as the hub's silence; whoever left meanwhile leaves nothing."""
    monkeypatch.setattr("router.multiprocess.control_health.CHECK_S", 1e9)  # nothing else is owed when the clock is set
    hub, clock = StubHub("http://a", limits=AdmissionSettings()), Ahead()
    hub.router.policy = patient = Patient()
    async with serving(hub, path), worker(path, clock=clock) as placer:
        await until(lambda: placer.placing)
        stays, leaves = await asking(placer, hub, want()), await asking(placer, hub, want())
        leaves.cancel()
        await until(lambda: queued(hub) == 1)
        clock.ahead_s = 1_000.0
        await asyncio.sleep(0.2)  # a few looks
        hub.placer.admission.tick()
        assert placer.placing
        assert not hub.open
        patient.hold = False
        hub.placer.admission.tick()
        lease = await stays
        assert lease.receipt.policy == "patient"
        placer.finish(lease, OK, 1.0)
        await until(lambda: hub.open == 0)
        assert not placer._hub.queued


async def test_a_dead_worker_leaves_the_queue(path: Path) -> None:
    """What it had waiting is gone, what it had open makes room for others."""
    hub = hub_of_one()
    async with serving(hub, path) as server, worker(path) as one, worker(path, 1) as two:
        await until(lambda: one.placing and two.placing)
        first = await one.place(want(), NOBODY)
        dead = [await asking(one, hub, want("t")) for _ in range(3)]
        waits = await asking(two, hub, want("u"))
        next(link for link in server.links if link.worker == 0).transport.abort()
        lease = await waits
        assert lease.receipt.policy == "warm"
        assert queued(hub) == 0
        alone = await asyncio.gather(*dead)  # by the ring, as the hub was lost to it
        assert {each.receipt.policy for each in alone} == {"ring"}
        two.finish(lease, OK, 1.0)
        for each in (first, *alone):
            one.finish(each, OK, 1.0)
        await until(lambda: hub.open == 0 and one.placing)


async def test_a_lost_hub_does_not_keep_them_waiting(path: Path) -> None:
    """Who waited in it is placed by the ring."""
    async with worker(path) as placer:
        hub = hub_of_one()
        async with serving(hub, path):
            await until(lambda: placer.placing)
            await placer.place(want(), NOBODY)
            waits = [await asking(placer, hub, want()) for _ in range(5)]
        leases = await asyncio.gather(*waits)
        assert {lease.receipt.policy for lease in leases} == {"ring"}


@pytest.mark.inside
async def test_a_request_that_waited_for_an_event_may_wait_for_a_place(path: Path) -> None:
    """One after the other, and it can still be taken back."""
    hub = hub_of_one()
    async with serving(hub, path), worker(path) as placer:
        await until(lambda: placer.placing)
        first = await placer.place(want(), NOBODY)
        hub.stub.slow = True
        waits = [asyncio.create_task(placer.place(want(), NOBODY)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert queued(hub) == 0
        hub.stub.slow = False
        await until(lambda: queued(hub) == 2)
        waits[0].cancel()
        await until(lambda: queued(hub) == 1)
        placer.finish(first, OK, 1.0)
        lease = await waits[1]
        placer.finish(lease, OK, 2.0)
        await until(lambda: hub.open == 0)
