"""Stuck replicas are found, and busy ones are left alone: scenarios in virtual time."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.registry import Fleet
from router.core.fleet.stall_detector import PeerProgress
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica, ServedModel
from router.core.types.requests import RequestSpec
from tests.core.fleet.simulated import Engine, World
from tests.core.work import interpreted, steps
from tests.support.examples import examples

pytestmark = pytest.mark.promise(
    "A replica that fails, hangs or crawls is ejected; a long prefill is never taken for that.", "faults"
)

RUNS = examples(int(os.environ.get("WARMROUTE_SILENCE_RUNS", "40")))  # 1,000 for a thorough look: two minutes


def fleet(count: int = 4, **how: float | bool) -> dict[str, Engine]:
    """Engines alike."""
    return {f"http://{n}": Engine(**how) for n in range(count)}  # type: ignore[arg-type]


@pytest.mark.long
def test_hung_in_mid_work() -> None:
    """A replica that hangs with streams under way is out within the allowance and three seconds; no request is lost,
    and of the next 1,000 at most 2 % are sent there. One trial readmits it once it works."""
    world = World(fleet())
    world.run(30, every_s=0.05, tokens=2_000)
    assert world.opened == []
    hung = world.engines["http://0"]
    hung.hung, at_s = True, world.now_s
    while not world.opened and world.now_s < at_s + 20:
        world.run(0.05, every_s=0.05, tokens=2_000)
    assert world.opened == ["http://0"]
    assert world.now_s - at_s < 3 * 0.25 + 3.0 + 0.5
    before, number = world.sent["http://0"], world.number
    while world.number < number + 1_000:
        world.run(0.05, every_s=0.05, tokens=2_000)
    assert world.sent["http://0"] - before <= 20
    hung.hung = False
    hung.waiting.clear()
    world.run(65, every_s=0.1, tokens=2_000)
    assert world.router.fleet.members["http://0"].breaker.backoff_s == 0
    assert world.ended["failed twice"] == world.ended["nowhere"] == 0


@pytest.mark.parametrize("tokens", [100, 2_000])
def test_hung_from_the_start(tokens: int) -> None:
    """One that never answered anything is found as well, though nothing is known of its speed."""
    engines = fleet()
    engines["http://0"].hung = True
    world = World(engines)
    world.run(30, every_s=0.05, tokens=tokens)
    assert "http://0" in world.opened
    assert set(world.opened) == {"http://0"}
    assert world.sent["http://0"] < 40
    assert world.ended["nowhere"] == world.ended["failed twice"] == 0


def test_clients_that_leave_after_four_seconds() -> None:
    """A hung replica is found by the clients that give up on it, whatever its health checks say; clients that leave
    early or for a legitimately long prompt blame nobody."""
    world = World(fleet())
    world.run(20, every_s=0.1, tokens=2_000, patience_s=4.0)
    world.run(20, every_s=0.5, tokens=100_000, patience_s=4.0)
    world.run(20, every_s=0.1, tokens=2_000, patience_s=0.05)
    assert world.opened == []
    world = World(fleet(2), policy="least_loaded")
    world.run(20, every_s=0.1, tokens=2_000, patience_s=4.0)
    for engine in world.engines.values():
        engine.hung = True  # so that nobody shows how it should be
    number = world.number
    while not world.opened and world.number < number + 40:
        world.send(2_000, patience_s=4.0, only="http://0")
        world.run(4.5)
    assert world.number - number <= 6
    assert world.opened == ["http://0"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("counters", [True, False])
def test_dead_engine_behind_green_health(stream: bool, counters: bool) -> None:
    """Only requests show that an engine is dead; of answers that do not stream too, with counters or without."""
    world = World(fleet(counters=counters))
    world.run(30, every_s=0.1, tokens=2_000, stream=stream)
    world.engines["http://1"].hung = True
    world.run(40, every_s=0.1, tokens=2_000, stream=stream)
    assert set(world.opened) == {"http://1"}
    assert world.ended["failed twice"] == world.ended["nowhere"] == 0


@pytest.mark.parametrize("speed", [300.0, 1_000.0, 10_000.0, 100_000.0])
@pytest.mark.parametrize("learned", [True, False])
def test_a_long_prefill_is_left_alone(speed: float, learned: bool) -> None:
    """200,000 tokens alone, with short requests behind them and beside them, at 300 tokens/s too, and before anything
    was learned: nobody is stuck, and nothing is tried elsewhere."""
    world = World(fleet(speed=speed))
    if learned:
        world.run(60, every_s=4_000 / speed, tokens=2_000)
    world.send(200_000, only="http://0")
    for _ in range(10):
        world.send(500, only="http://0")
    world.run(220_000 / speed + 5, every_s=max(0.5, 4_000 / speed), tokens=2_000)
    assert (world.opened, world.moved) == ([], 0)
    assert world.ended["ok"] > 10


def test_attention_makes_long_prompts_dear() -> None:
    """Speeds learned of short prompts say little of long ones: five times slower per token is not stuck."""
    world = World(fleet())
    world.run(30, every_s=0.1, tokens=1_500)
    world.engines["http://0"].speed /= 5
    world.send(200_000, only="http://0")
    world.run(110, every_s=0.2, tokens=1_500)
    assert (world.opened, world.moved) == ([], 0)


@pytest.mark.parametrize("slower", [20.0, 100.0])
def test_all_slow_alike(slower: float) -> None:
    """When all replicas become slow alike, none is taken out and no request is tried elsewhere for that."""
    world = World(fleet())
    world.run(30, every_s=0.1, tokens=2_000)
    for engine in world.engines.values():
        engine.speed /= slower
    world.run(120, every_s=slower * 0.15, tokens=2_000)
    assert (world.opened, world.moved) == ([], 0)


@pytest.mark.long
def test_a_queue_that_is_worked_off() -> None:
    """Five times the load that the fleet can bear: everybody waits, and nobody is stuck."""
    world = World(fleet())
    world.run(20, every_s=0.05, tokens=2_000)
    world.run(40, every_s=0.01, tokens=2_000)
    world.run(200)
    assert (world.opened, world.moved) == ([], 0)
    assert world.ended["ok"] == world.number


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("counters", [True, False])
def test_a_full_engine(stream: bool, counters: bool) -> None:
    """Requests may wait for a seat as long as other answers take: 8 seats, 20 s an answer."""
    world = World(fleet(2, seats=8, decode_s=20.0, counters=counters))
    world.run(40, every_s=1.5, tokens=2_000, stream=stream)
    world.run(60, every_s=0.8, tokens=2_000, stream=stream)
    assert (world.opened, world.moved) == ([], 0)


def test_mixed_traffic() -> None:
    """Streams wait behind answers that do not stream; a hung replica among them is found."""
    world = World(fleet(decode_s=5.0))
    for n in range(400):
        world.send(3_000, stream=n % 2 == 0)
        world.run(0.1)
    assert (world.opened, world.moved) == ([], 0)
    world.engines["http://2"].hung = True
    for n in range(600):
        world.send(3_000, stream=n % 2 == 0)
        world.run(0.1)
    assert set(world.opened) == {"http://2"}


def test_a_fleet_of_one_and_a_lonely_request() -> None:
    """Where there is no elsewhere nobody is stuck; a request without any other traffic moves in the end."""
    world = World(fleet(1))
    world.run(20, every_s=0.5)
    world.engines["http://0"].hung = True
    world.run(120, every_s=1.0)
    assert (world.opened, world.moved) == ([], 0)
    world = World(fleet(2))
    world.run(20, every_s=0.5)
    world.engines["http://0"].hung = True
    world.send(1_000, only="http://0")
    world.run(60)
    assert world.moved == 1
    assert world.ended["failed"] == 0


ENGINES = st.lists(st.tuples(st.floats(0.4, 1.0), st.booleans()), min_size=2, max_size=4)
PHASES = st.lists(
    st.tuples(st.sampled_from([200, 2_000, 20_000, 200_000]), st.floats(0.1, 3.0), st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)


@given(st.sampled_from([750.0, 3_000.0, 30_000.0]), ENGINES, PHASES)
@settings(deadline=None, max_examples=RUNS)
def test_whoever_works_is_never_stuck(
    speed: float, engines: list[tuple[float, bool]], phases: list[tuple[int, float, bool, bool]]
) -> None:
    """Engines up to 2.5 times apart, from 300 tokens/s on, that prefill whatever comes in order: none is taken out,
    whatever the sizes, rates, streams or not, clients with patience or without."""
    world = World({f"http://{n}": Engine(speed * part, counters=c) for n, (part, c) in enumerate(engines)})
    for tokens, load, stream, patient in phases:
        every_s = tokens / speed / load
        world.run(
            min(40.0, 30 * every_s), every_s=every_s, tokens=tokens, stream=stream, patience_s=1e9 if patient else 4
        )
    world.run(20)
    assert (world.opened, world.moved) == ([], 0), world.told


def test_requests_on_a_replica_that_is_out_already() -> None:
    """When health checks have taken a hung replica out first, what is silent there is tried elsewhere all the same."""
    world = World(fleet())
    world.run(20, every_s=0.1, tokens=2_000)
    world.engines["http://0"].hung = True
    for _ in range(3):
        world.send(2_000, only="http://0")
    for _ in range(2):
        world.router.fleet.observe_health("http://0", False, "no answer in time", silent=True)
    world.run(12, every_s=0.1, tokens=2_000)
    assert world.moved >= 3
    assert not world.engines["http://0"].waiting


def test_a_long_prefill_beside_short_prompts() -> None:
    """Short prompts answered on time elsewhere prove nothing of a long one, before any speed is learned either."""
    world = World(fleet(2, speed=300.0))
    world.send(100_000, only="http://0")
    for _ in range(200):
        world.send(50, only="http://1")
        world.run(1.0)
    assert world.router.fleet.members["http://1"].evidence.on_time_s > world.now_s - 5
    assert (world.opened, world.moved) == ([], 0)


def waiting(count: int, leases: int = 2) -> Router:
    """A router whose replicas have answered nothing for a while, of which all owe something."""
    router = Router(
        POLICIES["least_loaded"](), index_bytes_max=1 << 20, remembered_prompts_max=100, default_cache_blocks=100
    )
    router.replace(Replica(f"http://{n}") for n in range(count))
    for id_ in list(router.fleet.members):
        router.fleet.observe_health(id_, True)
        router.observations.observe_models(id_, [ServedModel("m"), ServedModel(f"lora{len(id_)}", parent="m")])
    for _ in range(leases * count):
        router.route(PlacementRequest(RequestSpec("m", stream=True), "m", None, "k", body_tokens=100), 100.0)
    return router


@interpreted
def test_a_silent_fleet_is_looked_at_once_and_not_once_for_each() -> None:
    """Where nobody gave a sign of life a look is as much work a replica with 200 as with 50, and a slice of it is as
    much in all."""

    def spent(count: int) -> tuple[int, int]:
        looks = waiting(count).scan_for_stalls(103.0)
        slices = [steps(lambda: next(looks, None)) for _ in range(count)]
        return sum(slices), max(slices)

    (few, _), (all_, longest) = spent(50), spent(200)
    assert all_ < 4.4 * few
    assert longest < 0.4 * all_
    assert spent(400)[1] < 1.3 * longest


def test_slices_find_whom_a_whole_look_finds() -> None:
    """With a peer on time everybody else is stuck, in whatever slices; who left between two of them is passed over."""
    whole, sliced = waiting(100), waiting(100)
    for router in (whole, sliced):
        router.fleet.members["http://42"].evidence.on_time_s = 104.9
        router.fleet.members["http://42"].evidence.alive_s = 104.9
    found, left = list[str](), {f"http://{n}" for n in range(100) if n % 10 == 0}
    looks = sliced.scan_for_stalls(105.0)
    found += next(looks)
    assert found
    sliced.replace([m.replica for m in sliced.fleet.members.values() if m.id not in left - set(found)])
    for each in looks:
        found += each
    stuck = [id_ for found in whole.scan_for_stalls(105.0) for id_ in found]
    assert len(stuck) == 99
    assert [id_ for id_ in stuck if id_ not in left - set(found)] == found


MEMBERS = st.lists(st.tuples(st.sets(st.sampled_from("mnx")), st.booleans(), st.integers(0, 5)), min_size=1, max_size=6)


@given(members=MEMBERS, since=st.integers(0, 6))
@settings(deadline=None)
def test_peers_are_those_with_a_model_in_common(members: list[tuple[set[str], bool, int]], since: int) -> None:
    """Whether one of them was on time is as by asking each, and whether there are any."""
    fleet = Fleet()
    fleet.replace([Replica(f"http://{n}") for n in range(len(members))])
    for (names, fit, on_time), member in zip(members, fleet.members.values(), strict=True):
        fleet.observe_models(member, [ServedModel(name) for name in names])
        fleet.observe_health(member.id, fit)
        member.evidence.on_time_s = float(on_time)
    looked = PeerProgress(fleet)
    for member in fleet.members.values():
        peers = [m for m in fleet.usable() if m is not member and not m.models.keys().isdisjoint(member.models)]
        assert looked.any(member) is bool(peers)
        assert looked.on_time(member, since) is any(m.evidence.on_time_s >= since for m in peers)
