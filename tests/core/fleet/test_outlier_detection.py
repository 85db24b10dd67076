"""Slow replicas are taken out and come back; busy ones and merely slower ones stay: scenarios in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from router.core.fleet import outlier_detection as pace
from router.core.fleet.breaker import Cause
from router.core.fleet.evidence import TtftSample
from router.core.placement.placement_request import PlacementRequest
from router.core.types.requests import RequestSpec
from tests.core.fleet.simulated import Engine, World


def fleet(count: int = 4) -> dict[str, Engine]:
    """Engines alike."""
    return {f"http://{n}": Engine() for n in range(count)}


@pytest.mark.promise(
    "A replica that fails, hangs or crawls is ejected; a long prefill is never taken for that.", "faults"
)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("tokens", [400, 3_000])
def test_ten_times_slower_than_its_peers(count: int, tokens: int) -> None:
    """A replica that becomes ten times slower is out after some dozen requests, draws at most 2 % of the next 1,000,
    and is back after a trial that is fast."""
    world = World(fleet(count), policy="least_loaded")
    every_s = 1.0 / count  # a third of what the fleet can do
    world.run(30, every_s=every_s, tokens=tokens)
    slow = world.engines["http://0"]
    slow.speed /= 10
    if tokens < 1_000:
        slow.floor_s = 0.3
    before, at_s = world.sent["http://0"], world.now_s
    while not world.opened and world.now_s < at_s + 60:
        world.run(every_s, every_s=every_s, tokens=tokens)
    assert world.opened == ["http://0"]
    assert world.sent["http://0"] - before <= 40
    before, number = world.sent["http://0"], world.number
    while world.number < number + 1_000:
        world.run(every_s, every_s=every_s, tokens=tokens)
    assert world.sent["http://0"] - before <= 20
    assert world.opened == ["http://0"]
    slow.speed, slow.floor_s = 10_000.0, 0.0
    world.run(65, every_s=every_s, tokens=tokens)
    assert not world.router.fleet.members["http://0"].breaker.backoff_s
    assert world.ended["failed twice"] == world.ended["nowhere"] == 0


@pytest.mark.parametrize("times", [2.0, 3.0])
def test_other_hardware_stays(times: float) -> None:
    """Replicas two or three times apart are all used."""
    world = World(fleet(), policy="least_loaded")
    world.engines["http://0"].speed /= times
    world.run(120, every_s=0.25, tokens=3_000)
    assert world.opened == []
    assert world.sent["http://0"] > 20


def test_all_become_slow() -> None:
    """When all become ten times slower at once nobody is out, whatever their share of the traffic."""
    world = World(fleet())
    for n in range(400):
        world.send(3_000, only="http://0" if n % 2 else None)
        world.run(1.0 if n < 100 else 2.0)
        if n == 100:
            for engine in world.engines.values():
                engine.speed /= 5
    assert world.opened == []


@pytest.mark.long
def test_busy_with_a_long_prefill() -> None:
    """Short prompts behind long ones are slow for that; their replica stays."""
    world = World(fleet())
    world.run(30, every_s=0.1, tokens=2_000)
    for _ in range(12):
        world.send(100_000, only="http://0")
        world.send(100_000, only="http://0", stream=False)
        for _ in range(3):
            world.send(1_500, only="http://0")
        world.run(25, every_s=0.1, tokens=2_000)
    assert world.opened == []


def test_one_slow_trial_prolongs_the_rest() -> None:
    """A trial that is slow doubles the rest, without another eight requests."""
    world = World(fleet(), policy="least_loaded")
    world.run(30, every_s=0.25, tokens=3_000)
    world.engines["http://0"].speed /= 10
    world.run(60, every_s=0.25, tokens=3_000)
    breaker = world.router.fleet.members["http://0"].breaker
    assert (world.opened, breaker.cause) == (["http://0"], Cause.SLOW)
    assert breaker.backoff_s > 4.0


@pytest.mark.parametrize(
    ("peer_s", "queued", "slow"), [(0.0, False, False), (100.0, False, True), (100.0, True, False)]
)
def test_peers_are_compared_in_the_same_span(peer_s: float, queued: bool, slow: bool) -> None:
    """What peers took before that span says nothing, nor do tokens of requests that waited behind others."""
    router = World(fleet(2)).router
    member, peer = router.fleet.members.values()
    for n in range(8):
        member.evidence.timed.append(TtftSample(100.0 + n, 1_000.0, False, 100.0))
        peer.evidence.timed.append(TtftSample(peer_s + n, 100.0, queued, 100.0))
    lease = router.route(PlacementRequest(RequestSpec("m", stream=True), "m", None, "k"), 100.0, only=member.id)
    lease.measurements.own_ms, lease.first_token_s = 1_000.0, 109.0
    assert pace.observe(router.fleet, member, lease, 1_000, 0) is slow


def answers(count: int, took_ms: list[float], *, expected_ms: float = 40.0) -> int:
    """How many peers are asked what they took when this is what the first of so many replicas took."""
    router = World({f"http://{n}": Engine() for n in range(count)}).router
    member, *peers = router.fleet.members.values()
    asked = 0

    class Asked(deque[TtftSample]):
        """Counts who goes through it."""

        def __iter__(self) -> Iterator[TtftSample]:
            nonlocal asked
            asked += 1
            return super().__iter__()

    for peer in peers:
        peer.evidence.timed = Asked([TtftSample(100.0 + n, 40.0, False, 40.0) for n in range(8)], maxlen=8)
    for n, each_ms in enumerate(took_ms):
        member.evidence.timed.append(TtftSample(100.0 + n, each_ms, False, expected_ms))
    lease = router.route(PlacementRequest(RequestSpec("m", stream=True), "m", None, "k"), 100.0, only=member.id)
    lease.measurements.own_ms, lease.first_token_s = took_ms[-1], 109.0
    assert pace.observe(router.fleet, member, lease, 1_000, 0) is (min(took_ms) > 300)
    return asked


@pytest.mark.parametrize("once_ms", [45.0, 51.0])
def test_one_that_was_in_time_spares_the_peers(once_ms: float) -> None:
    """Where one of the eight took no longer than 50 ms, or than it should have, none of a thousand peers is asked."""
    assert answers(1_000, [900.0] * 4 + [once_ms] + [900.0] * 3, expected_ms=once_ms + 1) == 0


def test_a_few_peers_say_what_is_usual() -> None:
    """For whoever looks slow some 32 of a thousand peers are asked; of a few all are."""
    assert answers(1_000, [900.0] * 8) <= pace.LEVELS_MAX
    assert answers(8, [900.0] * 8) == 7


def test_a_replica_that_decoded_slowly_at_first_is_used_again() -> None:
    """One of two idle replicas compiles kernels while its first answers decode, ten times as long as they will: within
    two minutes it has a fair share of the traffic again, though it is asked nothing until then."""
    world = World({f"http://{n}": Engine(counters=True) for n in range(2)})
    first = world.engines["http://0"]
    first.decode_s = 10.0
    for _ in range(3):
        world.send(100, only="http://0")
        world.run(11)
    first.decode_s = 1.0
    world.run(120, every_s=0.7, tokens=100)
    world.sent.clear()
    world.run(60, every_s=0.7, tokens=100)
    assert world.sent["http://0"] >= 0.3 * world.sent.total()
