"""The world of a simulation keeps its books, and routers in it know what their grade lets them."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.common.traces import Request
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Limits
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.engine.workload import SimRequest, Workload, open_workload, prepare
from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS
from router.core.types.placements import Confidence

BLOCK = 16
MACHINE = CALIBRATIONS[CALIBRATION]


def ask(at_s: float, path: tuple[int, ...], outputs: int, *, think_s: float = 0.0, tail: int = 7) -> Request:
    """A prompt of 64-token blocks named by a path in a tree, and `tail` tokens of the next."""
    runs = tuple((hash(path[: depth + 1]) & 0xFFFF, 1) for depth in range(len(path)))
    return Request(at_s, think_s, 64 * len(path) + tail, outputs, "t", 64, runs, tail=str(path), cuts=(64,))


def turns_of(requests: list[Request], session: str = "s") -> list[SimRequest]:
    """Prepared for blocks of BLOCK tokens."""
    return prepare([(session, each) for each in requests], BLOCK, output_tokens_max=500)


def run(workload: Workload, setting: ClusterSpec, row: str = "warm") -> tuple[Simulation, Result]:
    """One run, and the world it leaves."""
    world = Simulation(workload, setting, ROWS[row].make)
    return world, world.run()


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple)
REQUESTS = st.builds(ask, st.floats(0, 30), PATHS, st.integers(1, 120), think_s=st.floats(0, 5))
FAULTS = st.builds(
    Fault,
    st.sampled_from(["restart", "slow", "join"]),
    st.floats(0, 25),
    replica=st.integers(0, 2),
    lasts_s=st.floats(0.1, 20),
)
SETTINGS = st.builds(
    ClusterSpec,
    replicas=st.just(3),
    kv_tokens=st.sampled_from([4_000, 40_000]),
    routers=st.integers(1, 3),
    grade=st.sampled_from(["exact", "estimated", "none"]),
    event_delay_s=st.sampled_from([0.0, 0.005, 0.7]),
    event_loss=st.sampled_from([0.0, 0.2]),
    faults=st.lists(FAULTS, max_size=3).map(tuple),
    timeout_s=st.sampled_from([3.0, 300.0]),
    patience_s=st.sampled_from([None, 0.2, 2.0]),
    retries=st.integers(0, 2),
    seed=st.integers(1, 3),
)
ROW = st.sampled_from(["warm", "round_robin", "longest_match", "least_loaded"])


class Watched(Simulation):
    """Notes what must never happen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.in_flight_max = 0

    def call_at(self, when_s: float, act: Any, argument: Any = None) -> None:
        """Time never goes back."""
        assert when_s >= self.now_s
        super().call_at(when_s, act, argument)

    def _arrive(self, what: Any) -> None:
        super()._arrive(what)
        self.in_flight_max = max(self.in_flight_max, len(self._open))


def assert_kept(world: Simulation, result: Result, workload: Workload) -> None:
    """Every request ended once, no lease is open, nothing runs, prompts were computed or found cached."""
    assert len(result.sent) == workload.request_count
    assert not world._open
    for sent in result.sent:
        assert sent.e2e_s is not None
        assert 0 <= sent.e2e_s <= world.setting.longest_s + 1e-9
        assert 1 <= sent.tries <= 1 + world.setting.retries
        if not sent.failure:
            assert sent.ttft_s is not None
            assert sent.ttft_s <= sent.e2e_s
            floor_s = world.setting.calibration.times.mixed_s(sent.turn.prompt_tokens - sent.cached_tokens, 0.0, 0, 0)
            assert sent.ttft_s >= floor_s - 1e-9
    for placer in world.placers:
        for member in placer.router.fleet.members.values():
            assert not member.leases
            assert member.work.kv.blocks == member.work.kv.own_tokens == 0
    assert all(not replica.model.running_n + replica.model.waiting_n for replica in world.replicas.values())
    begun = [sent for sent in result.sent if sent.ttft_s is not None]
    computed = sum(sent.turn.prompt_tokens - sent.cached_tokens for sent in begun)
    assert sum(result.computed_tokens.values()) == computed


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=25), SETTINGS, ROW)
def test_every_request_ends_once_whatever_happens(requests: list[Request], setting: ClusterSpec, row: str) -> None:
    """Open loop: ends, leases, time and tokens add up under any faults, and a second run is the same to the bit."""
    workload = open_workload("t", turns_of(requests), BLOCK)
    first, again = (Watched(workload, setting, ROWS[row].make) for _ in range(2))
    result = first.run()
    assert_kept(first, result, workload)
    figures = [(s.ttft_s, s.e2e_s, s.cached_tokens, s.failure, s.tried) for s in result.sent]
    assert [(s.ttft_s, s.e2e_s, s.cached_tokens, s.failure, s.tried) for s in again.run().sent] == figures


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(REQUESTS, min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 3), SETTINGS, ROW)
def test_a_closed_loop_has_so_many_in_flight_at_most(
    sessions: list[list[Request]], active: int, setting: ClusterSpec, row: str
) -> None:
    """`active` sessions wait for their answers, turn after turn, until all were asked."""
    turns = tuple(tuple(turns_of(each, str(number))) for number, each in enumerate(sessions))
    workload = Workload("t", turns, False, BLOCK, active=active, ramp_s=2.0)
    world = Watched(workload, setting, ROWS[row].make)
    result = world.run()
    assert_kept(world, result, workload)
    assert 1 <= world.in_flight_max <= active


def test_one_replica_behind_a_router_is_the_engine_model_itself() -> None:
    """With nothing to choose, every time is what stepping the model by hand gives."""
    requests = [ask(0.31 * number, (number % 3,) * (1 + number % 20), 5 + 7 * number % 90) for number in range(40)]
    turns = turns_of(requests)
    _, result = run(open_workload("t", turns, BLOCK), ClusterSpec(replicas=1, kv_tokens=4_000))
    model = EngineModel(MACHINE.times, 4_000, Limits(block_tokens=BLOCK))
    now_s, first, finished = 0.0, dict[int, float](), dict[int, float]()
    due, answers = list(turns), iter(range(1 << 63, 1 << 64))
    while due or model.running_n + model.waiting_n:
        while due and (due[0].at_s <= now_s or not model.running_n + model.waiting_n):
            turn = due.pop(0)
            now_s = max(now_s, turn.at_s)
            whole = (turn.prompt_tokens + turn.output_tokens) // BLOCK
            keys = [*turn.engine_keys, *(next(answers) for _ in range(whole - turn.prompt_tokens // BLOCK))]
            model.submit(EngineRequest(turn.number, turn.prompt_tokens, turn.output_tokens, keys))
        step = model.begin()
        assert step is not None
        if due and now_s < due[0].at_s < now_s + step.duration_s:
            model.truncate(step, due[0].at_s - now_s)
        now_s += step.duration_s
        outcome = model.complete(step)
        first |= dict.fromkeys([number for number, _ in outcome.first], now_s)
        finished |= dict.fromkeys(outcome.finished, now_s)
    for sent in result.sent:
        assert sent.ttft_s == pytest.approx(first[sent.turn.number] - sent.turn.at_s)
        assert sent.e2e_s == pytest.approx(finished[sent.turn.number] - sent.turn.at_s)


# -- what routers know -------------------------------------------------------------------------------------------------


def busy(count: int = 120, *, gap_s: float = 0.4, groups: int = 12) -> Workload:
    """Groups of conversations with long prefixes in common."""
    requests = [ask(gap_s * n, (n % groups,) * 40 + (n,) * 8, 20) for n in range(count)]
    return open_workload("t", turns_of(requests), BLOCK)


def go_on(world: Simulation, for_s: float) -> None:
    """Let events land that are on their way when the last answer ends."""
    until_s = world.now_s + for_s
    while world._heap[0][0] <= until_s:
        world.now_s, _, act, argument = heappop(world._heap)
        act(argument)


def wrong(world: Simulation, router: int) -> int:
    """Of how many (prompt, replica) a router's events say another thing than the replica's cache."""
    knowledge, count = world.placers[router].router.knowledge, 0
    for (turn,) in world.workload.sessions:
        keys = turn.engine_keys.tolist()
        said = knowledge.find_stored(world._tokens(turn), world.now_s)
        for name, replica in world.replicas.items():
            held = said.get(name) or knowledge.empty(name)
            assert held is not None
            count += held.tokens != BLOCK * len(replica.model.pool.match(keys, len(keys)))
    return count


def grades(world: Simulation) -> set[Confidence]:
    """Of all replicas, by all routers."""
    return {member.grade for placer in world.placers for member in placer.router.fleet.members.values()}


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("faults", [(), (Fault("restart", 8.0, lasts_s=5.0), Fault("join", 20.0, replica=2))])
def test_exact_knowledge_becomes_every_caches_own(loss: float, faults: tuple[Fault, ...]) -> None:
    """Two routers that saw half of the requests each know to the block what every replica holds, after evictions, lost
    batches, a restart and a newcomer: gaps are found and replayed."""
    setting = ClusterSpec(
        replicas=3, kv_tokens=16_000, routers=2, grade="exact", event_loss=loss, faults=faults, probe_interval_s=0.5
    )
    world, _ = run(busy(), setting)
    go_on(world, 30.0)
    assert sum(replica.model.pool.evicted_blocks for replica in world.replicas.values())
    assert grades(world) == {Confidence.EXACT}
    assert wrong(world, 0) == wrong(world, 1) == 0
    gaps = sum(each.stream.counts.gaps for placer in world.placers for each in placer._followers.values())
    assert (gaps > 0) == (loss > 0)


def test_what_never_arrives_is_found_by_looking() -> None:
    """Where every live batch is lost, the replays that a stream asks for now and then bring most of them."""
    world, _ = run(busy(), ClusterSpec(replicas=2, grade="exact", event_loss=1.0))
    go_on(world, 30.0)
    assert wrong(world, 0) == 0
    streams = [follower.stream for follower in world.placers[0]._followers.values()]
    assert sum(stream.counts.replays for stream in streams) >= 2 * 3
    assert not any(stream.counts.lost for stream in streams)


def test_estimates_of_two_routers_stay_apart() -> None:
    """Without events a router knows what went through itself: of prompts that only the other sent, nothing."""
    world, result = run(busy(groups=13), ClusterSpec(replicas=3, routers=2))
    index = world.placers[0].router.index
    others = [sent for sent in result.sent if sent.router == 1 and sent.turn.number > 100]
    unknown = 0
    for sent in others:
        keys = sent.turn.engine_keys.tolist()
        held = max(len(replica.model.pool.match(keys, len(keys))) for replica in world.replicas.values())
        believed = max(index.depth(name, sent.turn.chain.tolist()) for name in world.replicas)
        unknown += held == len(keys) and believed < len(sent.turn.chain)
    assert unknown == len(others)
    assert grades(world) == {Confidence.ESTIMATED}


def test_each_router_has_the_leases_of_its_own_requests() -> None:
    """Three routers take turns, and none sees what the others sent."""

    class Counted(Simulation):
        """Holds leases against requests under way at each arrival."""

        def _arrive(self, what: Any) -> None:
            super()._arrive(what)
            for number, placer in enumerate(self.placers):
                members = placer.router.fleet.members.values()
                assert sum(len(m.leases) for m in members) == sum(s.router == number for s in self._open.values())

    result = Counted(busy(gap_s=0.05), ClusterSpec(replicas=2, routers=3), ROWS["warm"].make).run()
    assert [sent.router for sent in result.sent[:4]] == [0, 1, 2, 0]


def test_who_knows_nothing_expects_nothing() -> None:
    """Grade `none`: no replica is believed to hold anything; by estimate most prompts are."""
    _, blind = run(busy(), ClusterSpec(replicas=3, grade="none"))
    _, seeing = run(busy(), ClusterSpec(replicas=3))
    assert not any(sent.lease and sent.lease.cached_tokens for sent in blind.sent)
    assert sum(bool(sent.lease and sent.lease.cached_tokens) for sent in seeing.sent) > 60
    assert sum(sent.cached_tokens for sent in seeing.sent) > sum(sent.cached_tokens for sent in blind.sent)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grade", ["estimated", "exact"])
def test_a_replica_that_restarts_comes_back_empty(grade: Any) -> None:
    """Before their first token requests are tried elsewhere and answered, after it they fail; the router forgets what
    the replica held, and uses it again."""
    fault = Fault("restart", 6.0, replica=1, lasts_s=4.0)
    setting = ClusterSpec(replicas=2, grade=grade, faults=(fault,))
    world, result = run(busy(gap_s=0.1), setting, "least_loaded")
    name = "http://replica-1"
    retried = [sent for sent in result.sent if sent.tried]
    broken = [sent for sent in result.sent if sent.failure]
    assert retried
    assert broken
    assert all(sent.tried[0] == name for sent in retried)
    assert all(sent.failure == "broken" and sent.ttft_s is not None for sent in broken)
    assert all(sent.failure == "" for sent in retried if sent.ttft_s and sent.ttft_s > 6.0 - sent.due_s)
    member = world.placers[0].router.fleet.members[name]
    assert member.cache_epoch > 2
    assert member.ready
    back = [s for s in result.sent if s.lease and s.lease.replica == name and s.due_s > 10.0]
    assert back
    assert not any(
        s.lease and s.lease.replica == name and 6.0 < s.due_s + s.ttft_s < 10.0 for s in result.sent if s.ttft_s
    )
    assert not back[0].cached_tokens


def test_a_slow_replica_takes_so_many_times_as_long_and_recovers() -> None:
    """Steps take `factor` times as long while it lasts, whoever placed the request; then as before."""
    setting = ClusterSpec(replicas=2, faults=(Fault("slow", 0.0, lasts_s=43.0, factor=5.0),))
    workload = busy(gap_s=4.0, count=20)
    _, slow = run(workload, setting, "round_robin")
    _, well = run(workload, replace(setting, faults=()), "round_robin")
    for sent, other in zip(slow.sent, well.sent, strict=True):
        assert sent.lease
        assert sent.e2e_s
        factor = 5.0 if sent.lease.replica == "http://replica-0" and sent.due_s < 43.0 else 1.0
        assert sent.e2e_s == pytest.approx(factor * (other.e2e_s or 0.0))


def test_a_spell_ends_in_the_middle_of_an_answer() -> None:
    """What is left of it is as fast as ever, and what comes then does not turn time back."""
    workload = open_workload("t", turns_of([ask(0.0, (0,), 100), ask(1.5, (0,), 20)]), BLOCK)
    ends = []
    for faults in ((Fault("slow", 0.0, lasts_s=1.0),), (), (Fault("slow", 0.0),)):
        result = Watched(workload, ClusterSpec(replicas=1, faults=faults), ROWS["warm"].make).run()
        ends.append([sent.e2e_s or 0.0 for sent in result.sent])
    (spell, after), (well, quick), (slow, _) = ends
    assert well < spell < well + 1.0 < slow
    assert after == pytest.approx(quick, rel=0.05)


def test_a_newcomer_is_used_from_when_it_joins() -> None:
    """Nothing is placed on it before, something after."""
    world, result = run(busy(), ClusterSpec(replicas=2, faults=(Fault("join", 20.0, replica=1),)), "round_robin")
    due = [sent.due_s for sent in result.sent if sent.lease and sent.lease.replica == "http://replica-1"]
    assert 20.0 <= min(due) < 22.0
    assert list(world.placers[0].router.fleet.members) == ["http://replica-0", "http://replica-1"]


def test_faults_that_overlap_last_as_long_as_the_longest() -> None:
    """A slow spell that ends does not bring back a replica that is down, nor does an earlier restart."""
    faults = (
        Fault("restart", 2.0, lasts_s=20.0),
        Fault("restart", 4.0, lasts_s=1.0),
        Fault("slow", 3.0, lasts_s=4.0),
    )
    _, result = run(busy(), ClusterSpec(replicas=2, faults=faults), "round_robin")
    begun = [s.due_s + s.ttft_s for s in result.sent if s.ttft_s and s.lease and s.lease.replica == "http://replica-0"]
    assert not [at_s for at_s in begun if 2.0 < at_s < 22.0]
    assert max(begun) > 22.0


def test_a_client_that_had_no_token_in_time_asks_again_and_counts_from_its_first_try() -> None:
    """Eight prompts of 40,000 tokens, 3.4 s of prefill each, one after the other. Who has waited 5 s without a token
    leaves and comes again, and whoever has no try left fails; who has begun to answer is not cut off."""
    requests = [ask(0.0, (number,) * 625, 500) for number in range(8)]
    workload = open_workload("t", turns_of(requests), BLOCK)
    patient = ClusterSpec(replicas=1, kv_tokens=400_000)
    _, calm = run(workload, patient)
    _, hasty = run(workload, replace(patient, patience_s=5.0, retries=2))
    _, once = run(workload, replace(patient, patience_s=5.0))

    assert [sent.tries for sent in calm.sent] == [1] * 8
    assert [sent.failure for sent in once.sent].count("timeout") == sum(sent.tries > 1 for sent in hasty.sent)
    assert any(sent.tries > 1 and not sent.failure and (sent.ttft_s or 0) > 5.0 for sent in hasty.sent)
    assert all(sent.e2e_s == 5.0 for sent in once.sent if sent.failure)
    assert all((sent.e2e_s or 0) > 5.0 for sent in once.sent if not sent.failure), "500 tokens take longer"
    assert replace(patient, patience_s=5.0, retries=2).longest_s == 310.0
    assert all(sent.e2e_s == 15.0 for sent in hasty.sent if sent.failure)
