"""Tenants' rates with several workers: nobody gets more, whoever is away."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.api_keys import Tenant
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.requests import Priority, RequestSpec
from router.multiprocess.rate_quota import WorkerQuotas
from router.multiprocess.remote_placement import RemotePlacementService
from tests.multiprocess.stubs import StubHub, serving, worker
from tests.multiprocess.test_files import ask, killed
from tests.multiprocess.test_processes import command
from tests.multiprocess.test_processes import pytestmark as looks_into_proc
from tests.support.fakes import FakeEngine
from tests.support.keyring import ADMIN, SECRET, Keyring
from tests.support.waiting import until

pytestmark = [
    looks_into_proc,
    pytest.mark.promise("No tenant gets more than its rate, through any worker.", "tenants"),
    pytest.mark.promise(
        "While the hub is away, only the part of a worker that dies with it can be spent twice.", "tenants"
    ),
]

NOBODY: frozenset[str] = frozenset()
OK = Outcome(EndReason.OK, Usage(10, 2, 4))


def hub_of(tenants: dict[str, Tenant]) -> StubHub:
    """A hub with two replicas and these tenants."""
    hub = StubHub("http://a", "http://b")
    hub.placer.admission.set_tenants(tenants)
    return hub


async def passes(placer: RemotePlacementService, tenant: str = "t") -> bool:
    """Whether one more request of the tenant passes, as an edge asks."""
    wanted = PlacementRequest(RequestSpec("m"), "m", None, "k", tenant=tenant, body_tokens=10)
    try:
        wanted.charged = placer.reserve_rate(tenant, Priority.NORMAL)
        lease = await placer.place(wanted, NOBODY)
    except Shed:
        return False
    placer.finish(lease, OK, 0.0)
    return True


def left(placer: RemotePlacementService, tenant: str = "t") -> float:
    """Requests that a worker takes to be left to a tenant, as the hub told and it has used itself."""
    levels = placer._rates._whole.levels(time.monotonic())
    return levels[tenant][0] or 0.0 if tenant in levels else math.inf


def left_at(hub: StubHub, tenant: str = "t") -> float:
    """Requests that a hub takes to be left to a tenant."""
    levels = hub.placer.admission.rate_levels(changed=False)
    return levels[tenant][0] or 0.0 if tenant in levels else math.inf


async def count(*placers: RemotePlacementService, times: int = 12) -> int:
    """How many of so many requests at each pass."""
    return sum([await passes(placer) for _ in range(times) for placer in placers])


async def test_without_the_hub_workers_have_what_was_left(path: Path) -> None:
    """Four of six a minute passed with the hub; without it two more do, one at each worker; and the hub that comes anew
    lets none pass, since both have told it."""
    tenants = {"t": Tenant("t", requests_per_min=6), "free": Tenant("free")}
    async with worker(path, workers=2) as one, worker(path, 1, workers=2) as two:
        for placer in (one, two):
            placer.set_tenants(tenants)
        async with serving(hub_of(tenants), path):
            await until(lambda: one.placing and two.placing)
            assert await count(one, times=4) == 4
            await until(lambda: left(two) < 3)  # the hub tells of it every 0.1 s
        await until(lambda: not one.placing and not two.placing)
        assert await count(one, two) == 2
        assert await passes(one, "free")
        hub = hub_of(tenants)
        async with serving(hub, path):
            await until(lambda: one.placing and two.placing)
            await until(lambda: left_at(hub) < 1)  # each has told it
            assert await count(one, two) == 0


async def test_a_worker_that_dies_with_the_hub_takes_its_part_along(path: Path) -> None:
    """The rate was used up; the hub and one of two workers are lost together: at most that worker's part passes."""
    tenants = {"t": Tenant("t", requests_per_min=6)}
    async with worker(path, workers=2) as one:
        one.set_tenants(tenants)
        async with serving(hub_of(tenants), path), worker(path, 1, workers=2) as two:
            two.set_tenants(tenants)
            await until(lambda: one.placing and two.placing)
            assert await count(one, two) == 6
            await until(lambda: left(one) < 1)
        await until(lambda: not one.placing)
        async with serving(hub_of(tenants), path), worker(path, 1, workers=2) as again:
            again.set_tenants(tenants)
            await until(lambda: one.placing and again.placing)
            assert await count(one, again) <= 3


async def test_a_rate_that_another_worker_used_up_is_known_before_a_body_is_read(path: Path) -> None:
    """A worker refuses by itself what the hub would refuse, and the hub counts that; a rate of tokens too."""
    tenants = {"t": Tenant("t", requests_per_min=2), "u": Tenant("u", tokens_per_min=5)}
    hub = hub_of(tenants)
    async with serving(hub, path), worker(path) as one, worker(path, 1) as two:
        for placer in (one, two):
            placer.set_tenants(tenants)
        await until(lambda: one.placing and two.placing)
        assert await count(one, times=2) == 2
        assert await passes(one, "u")
        await until(lambda: left(two) < 1 and "u" in two._rates._whole.levels(time.monotonic()))
        for tenant in ("t", "u"):
            with pytest.raises(Shed) as told:
                two.reserve_rate(tenant, Priority.NORMAL)
            assert told.value.code == "rate_limited"
            assert told.value.retry_after_s > 1
    async with worker(path, 1) as three:  # a worker that comes later is told, too
        three.set_tenants(tenants)
        async with serving(hub, path):
            await until(lambda: three.placing)
            with pytest.raises(Shed):
                three.reserve_rate("t", Priority.NORMAL)


@given(st.integers(1, 600), st.integers(1, 8), st.lists(st.integers(0, 7), max_size=40), st.integers(0, 40))
def test_parts_are_no_more_than_what_was_left(rate: int, workers: int, alone: list[int], before: int) -> None:
    """Whatever was used before, and whichever workers are asked while there is no hub, all together let pass no more
    than was left, but for one request of each."""
    tenants = {"t": Tenant("t", requests_per_min=rate)}
    shares = [WorkerQuotas(workers, lambda: 0.0) for _ in range(workers)]
    left = float(rate - min(before, rate))
    for each in shares:
        each.configure(tenants)
        each.on_control_found(7)
        each.on_levels({"t": (left, None)})
        each.on_control_lost()
    passed = 0
    for number in alone:
        try:
            passed += shares[number % workers].charge("t")
        except Shed:
            continue
    assert passed <= left + workers
    if left >= workers:
        assert passed <= left
    told = [each.take_unreported().get("t", (0.0, 0.0))[0] for each in shares]
    assert sum(told) == passed


@pytest.mark.long
async def test_the_rate_holds_with_real_processes(tmp_path: Path, engine: FakeEngine) -> None:
    """Five a minute, two workers. With the hub stopped, killed, and started again no more than five and one worker's
    part pass, of thirty-six requests."""
    ring = Keyring(tmp_path, few={"requests_per_min": 5})
    settings = {"auth__keys_file": str(ring.file), "auth__secret": SECRET, "admin__token": ADMIN}
    async with command(engine, listen__hub_timeout_s="0.25", **settings) as app:
        codes = [await ask(app, ring.of("few")) for _ in range(5)]
        began_s = time.monotonic()
        assert codes == [200] * 5
        while time.monotonic() < began_s + 0.5:  # the hub tells every 0.1 s
            codes.append(await ask(app, ring.of("few")))
        hub = app.pids("hub")[-1]
        os.kill(hub, signal.SIGSTOP)
        codes += [await ask(app, ring.of("few")) for _ in range(12)]
        os.kill(hub, signal.SIGCONT)
        await killed(app, "hub")
        codes += [await ask(app, ring.of("few")) for _ in range(12)]
        await killed(app, "hub", "worker 0")
        codes += [await ask(app, ring.of("few")) for _ in range(12)]
    assert set(codes) == {200, 429}, json.dumps(codes)
    flowed = math.ceil((time.monotonic() - began_s) * 5 / 60)
    assert codes.count(200) <= 5 + 3 + flowed  # three are the part of the worker that was killed
