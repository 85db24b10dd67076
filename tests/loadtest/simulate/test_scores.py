"""Rules that score choose as their published formulas say; expected values are worked out by hand."""

from __future__ import annotations

import pytest

from loadtest.common.traces import Request
from loadtest.fake_engine.calibration import Calibration, LinearTimes
from loadtest.fake_engine.step import Limits
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.engine.placer import Placer, PolicyUnderTest, SimView
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.workload import SimRequest, open_workload, prepare
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.policies.cold_pool import ColdPool
from loadtest.simulate.policies.dualmap import DualMap
from loadtest.simulate.policies.dynamo import Dynamo
from loadtest.simulate.policies.infera import Infera
from loadtest.simulate.policies.lbgr import Lbgr, Remainder
from loadtest.simulate.policies.llmd_affinity import LlmdAffinity
from loadtest.simulate.policies.llmd_weights import LlmdWeights, score_capped_share, score_range, score_share
from loadtest.simulate.policies.lmetric import LMetric
from loadtest.simulate.policies.load_accounting import ScoringPolicy
from loadtest.simulate.policies.lpwl import Lpwl
from loadtest.simulate.policies.mooncake_conductor import MooncakeConductor
from loadtest.simulate.policies.prefill_times import prefill_s
from loadtest.simulate.policies.remaining_work import WorkClasses
from loadtest.simulate.policies.sticky_override import StickyOverride
from router.core.placement.policies import Policy
from router.core.types.placements import Candidate, PlacementContext
from router.core.types.replicas import Load

BLOCK = 128  # tokens of a block of the router's
MARKET = PlacementContext("key", 0.0, 1.0, 0.0)
NAMES = ("a", "b", "c")


def turns(*prompts: tuple[int, ...], output: int = 4, gap_s: float = 0.0) -> list[SimRequest]:
    """Prompts made of blocks by number: equal beginnings are shared."""
    requests = []
    for number, blocks in enumerate(prompts):
        runs = tuple((block, 1) for block in blocks)
        request = Request(number * gap_s, 0.0, len(blocks) * BLOCK, output, "test", BLOCK, runs)
        requests.append((f"s{number}", request))
    return prepare(requests, BLOCK, output_tokens_max=output)


def candidate(name: str, cached: int, uncached: int, in_flight: int = 0) -> Candidate:
    """A replica that holds `cached` tokens of the prompt."""
    return Candidate(name, cached, uncached, 0.0, 0.0, 0.0, 0.0, in_flight)


def placer_of(rule: Policy, loads: dict[str, Load] | None = None) -> Placer:
    """A real router over three replicas, probed once."""
    placer = Placer(lambda: rule)
    placer.join(NAMES)
    for name in NAMES:
        placer.probe(name, (loads or {}).get(name, Load(waiting=0, kv_usage=0.0)), 0.0)
    return placer


def choose(
    rule: ScoringPolicy, turn: SimRequest, *candidates: Candidate, placer: Placer | None = None, now_s: float = 0.0
) -> str:
    """What the rule says, without a booking."""
    rule.see(SimView((placer or placer_of(rule)).router, turn, now_s))
    return rule.choose(MARKET, candidates).id


def book(rule: ScoringPolicy, turn: SimRequest, name: str, uncached: int, now_s: float = 0.0, cached: int = 0) -> None:
    """Place a request of that much work on one replica, whatever the rule would say."""
    choose(rule, turn, candidate(name, cached, uncached), now_s=now_s)
    rule.on_placed(turn, name, now_s)


def test_books_hold_work_from_its_placement_to_its_first_token_or_its_end() -> None:
    """Uncached tokens wait where they were sent, and are counted off once."""
    rule, (one, other) = Lpwl(), turns((1,), (2,))
    book(rule, one, "a", 700)
    book(rule, other, "a", 50)
    assert rule.pending == {"a": 750}
    rule.first_token(one, "a", 1.0)
    rule.on_ended(one, "a", 2.0)
    assert rule.pending == {"a": 50}
    rule.on_ended(other, "a", 2.0)
    assert rule.pending == {"a": 0}


def test_lpwl_takes_the_least_prefill_work_then_the_fewest_requests_then_turns() -> None:
    """600 pending + 100 own beats 0 + 1,000; equal sums go by open requests, equal ones of those by turns."""
    rule, (turn, busy) = Lpwl(), turns((1,), (2,))
    book(rule, busy, "a", 600)
    assert choose(rule, turn, candidate("a", 900, 100, 1), candidate("b", 0, 1_000)) == "a"
    assert choose(rule, turn, candidate("a", 599, 401, 1), candidate("b", 0, 1_000)) == "b"
    assert choose(rule, turn, candidate("a", 600, 400, 3), candidate("b", 0, 1_000, 2)) == "b"
    alike = [candidate(name, 0, 1_000) for name in ("b", "c")]
    assert [choose(rule, turn, *alike) for _ in range(3)] == ["b", "c", "b"]


def test_lmetric_multiplies_work_with_the_batch_and_cannot_tell_idle_replicas_apart() -> None:
    """(200 + 100) x 2 = 600 beats 400 x 2 = 800; an idle replica scores 0 with nothing cached or all of it."""
    rule, (turn, busy) = LMetric(), turns((1,), (2,))
    book(rule, busy, "a", 200)
    assert choose(rule, turn, candidate("a", 300, 100, 2), candidate("b", 0, 400, 2)) == "a"
    assert choose(rule, turn, candidate("a", 399, 1, 1), candidate("b", 0, 400, 0)) == "b"
    idle = [candidate("b", 399, 1), candidate("c", 0, 400)]
    assert {choose(rule, each, *idle) for each in turns(*((n,) for n in range(20)))} == {"b", "c"}
    plus_one = LMetric("lmetric_plus_one", 1)
    assert {choose(plus_one, turn, *idle) for _ in range(20)} == {"b"}


def test_llmd_weights_add_prefix_share_free_kv_and_short_queue() -> None:
    """a: 3 x 0.75 + 2 x 0.5 + 2 x 0 = 3.25; b: 3 x 0 + 2 x 0.8 + 2 x 1 = 3.6; c: 0 + 2 x 0.7 + 2 x 0.5 = 2.4."""
    loads = {"a": Load(waiting=4, kv_usage=0.5), "b": Load(waiting=0, kv_usage=0.2), "c": Load(waiting=2, kv_usage=0.3)}
    rule, (turn,) = LlmdWeights(), turns((1,))
    placer = placer_of(rule, loads)
    three = [candidate("a", 300, 100), candidate("b", 0, 400), candidate("c", 0, 400)]
    assert choose(rule, turn, *three, placer=placer) == "b"
    loads["a"] = Load(waiting=0, kv_usage=0.5)  # no longer last in the queue: 3.25 + 2 x 1
    placer.probe("a", loads["a"], 1.0)
    assert choose(rule, turn, *three, placer=placer) == "a"


def test_llmd_prefix_scores_are_those_of_their_versions() -> None:
    """One belief, three scores: the share of the prompt, the place between holders, the share of the first 4,096."""
    three = [candidate("a", 6_000, 2_000), candidate("b", 2_000, 6_000), candidate("c", 0, 8_000)]
    assert score_share(three) == [0.75, 0.25, 0.0]
    assert score_range(three) == [1.0, 0.0, 0.0]
    assert score_capped_share(three) == [1.0, 2_000 / 4_096, 0.0]
    assert score_range(three[2:]) == [0.0]
    assert score_range([*three[1:], candidate("d", 2_000, 6_000)]) == [1.0, 0.0, 1.0]


def test_llmd_affinity_sticks_above_four_fifths_until_it_costs_eighteen_seconds() -> None:
    """80 % cached sticks while the holder is at most 18 s x 15,928 tok/s = 286,704 tokens ahead; 79 % does not."""
    rule, (turn, busy) = LlmdAffinity(), turns((1,), (2,))
    book(rule, busy, "a", 286_704)
    sticky, cold = candidate("a", 800, 200), candidate("b", 0, 1_000)
    assert choose(rule, turn, sticky, cold) == "a"
    assert choose(rule, turn, candidate("a", 799, 201), cold) == "b"
    (more,) = turns((3,))
    book(rule, more, "a", 1)
    assert choose(rule, turn, sticky, cold) == "b"


def test_llmd_affinity_counts_this_request_and_rotates_ties() -> None:
    """Of two cold replicas the one that holds more of the prompt has less to do; equal ones take turns."""
    rule, (turn,) = LlmdAffinity(), turns((1,))
    assert choose(rule, turn, candidate("a", 0, 1_000), candidate("b", 500, 500)) == "b"
    alike = [candidate(name, 0, 1_000) for name in NAMES]
    assert [choose(rule, turn, *alike) for _ in range(4)] == ["a", "b", "c", "a"]


def test_dynamo_adds_prefill_blocks_to_distinct_active_blocks() -> None:
    """On a, 2 blocks are active and 1 of them is the prompt's: 1 to prefill + 2 + 1 new = 4. On b: 2 + 0 + 2 = 4; once
    a's own prefill is pending, 2 blocks more, b is the cheaper one."""
    rule = Dynamo()
    first, second, third = turns((1, 2), (1, 3), (1, 4))
    book(rule, first, "a", 2 * BLOCK)
    rule.first_token(first, "a", 0.1)
    on_a, on_b = candidate("a", BLOCK, BLOCK, 1), candidate("b", 0, 2 * BLOCK)
    choose(rule, second, on_a, on_b)
    assert (rule._cost(on_a), rule._cost(on_b)) == (4.0, 4.0)
    rule.on_placed(second, "a", 0.2)  # shares block 1: three distinct blocks, one of them to prefill
    choose(rule, third, on_a, on_b)
    assert (rule._cost(on_a), rule._cost(on_b)) == (1 + 1 + 3 + 1, 4.0)
    rule.on_ended(first, "a", 0.3)
    rule.on_ended(second, "a", 0.3)
    choose(rule, third, on_a, on_b)
    assert rule._cost(on_a) == 1 + 0 + 2


def test_work_classes_part_replicas_by_what_is_left_to_compute() -> None:
    """Two of three replicas are for up to 8,192 tokens: 8,000 of 40,000 left go there by what is left, and to the third
    by length; whoever holds 0.80 goes where it is held. Within a class the least work in flight decides."""
    remaining, total = WorkClasses("r", remaining=True), WorkClasses("t", remaining=False)
    turn, busy = turns((1,), (2,))
    three = [candidate("a", 31_000, 9_000), candidate("b", 31_900, 8_100), candidate("c", 0, 40_000)]
    assert choose(remaining, turn, *three) == "b"  # c has long work, which is its class, and more of it
    assert choose(total, turn, *three) == "c"
    book(remaining, busy, "b", 500_000)
    assert choose(remaining, turn, *three) == "c"  # fits its class too
    short = [candidate(name, 0, 8_192) for name in NAMES]
    assert choose(remaining, turn, *short) == "a"
    assert choose(remaining, turn, candidate("a", 0, 8_193), candidate("c", 0, 8_193)) == "c"
    assert choose(remaining, turn, candidate("a", 0, 90_000), candidate("c", 80_000, 10_000)) == "c"
    assert choose(remaining, turn, candidate("a", 80_000, 10_000), candidate("c", 0, 90_000)) == "a"


def test_cold_pool_confines_long_misses_and_drains_its_replica_meanwhile() -> None:
    """65,536 tokens that nobody holds go to c, the last of three, however busy; until its first token others go past
    it, and after that by cost. What is mostly cached is no miss."""
    rule = ColdPool()
    cold, warm, half = turns((1, 2), (3, 4), (5, 6))
    anywhere = [candidate(name, 0, 65_536) for name in NAMES]
    assert choose(rule, cold, *anywhere) == "c"
    rule.on_placed(cold, "c", 0.0)
    on_c = [candidate("a", 0, 2_000), candidate("b", 0, 2_000), candidate("c", 2_000, 0)]
    assert choose(rule, warm, *on_c) in {"a", "b"}
    assert choose(rule, warm, candidate("c", 2_000, 0)) == "c", "there are no others"
    assert choose(rule, half, candidate("a", 65_537, 65_536), candidate("c", 0, 131_073)) == "a"
    rule.first_token(cold, "c", 1.0)
    assert choose(rule, warm, *on_c) == "c"
    assert choose(rule, cold, *[candidate(name, 0, 65_535) for name in ("a", "b")], candidate("c", 1, 65_534)) == "c"


def test_infera_charges_misses_and_lets_them_fade() -> None:
    """An idle fleet ties, and the first of three is picked; its 4 missed blocks, x 0.97 at the next pick, send the next
    cold prompt to the second; a prompt that it holds whole costs a nothing but what it still carries."""
    rule = Infera()
    one, two, held, tiny = turns((1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 3, 4), ())
    cold = [candidate(name, 0, 4 * BLOCK) for name in NAMES]
    assert choose(rule, one, *cold) == "a"
    assert rule.recent == {"a": 4.0}
    assert choose(rule, two, *cold) == "b"
    assert rule.recent == pytest.approx({"a": 4 * 0.97, "b": 4.0})
    on_a = [candidate("a", 4 * BLOCK, 0), candidate("b", 0, 4 * BLOCK)]
    assert choose(rule, held, *on_a) == "a"  # 0 + 3.88 against 4 + 4
    assert rule.recent["a"] == pytest.approx(4 * 0.97**2)
    rule.on_placed(held, "a", 0.0)  # four distinct blocks are in flight there
    assert choose(rule, two, candidate("a", 0, 4 * BLOCK), candidate("b", 0, 4 * BLOCK)) == "b"
    assert choose(rule, tiny, *[candidate(name, 0, 1) for name in NAMES]) == "c"
    assert rule.recent["c"] == 1.0


def test_sticky_override_leaves_a_session_only_at_twice_the_mean() -> None:
    """Pinned to the least loaded; 600 open of a mean of 300 is not over 2 x, 601 of less is; then it is pinned anew."""
    rule, (turn, again, other, last) = StickyOverride(), turns((1,), (1,), (2,), (3,))
    again.session = turn.session
    three = [candidate(name, 0, 300) for name in NAMES]
    assert choose(rule, turn, *three) == "a"
    book(rule, other, "a", 100, cached=500)
    book(rule, last, "b", 300)
    assert rule.pending == {"a": 600, "b": 300}
    rule.first_token(other, "a", 1.0)
    assert choose(rule, again, *three[:2]) == "a"  # 600 <= 2 x 450
    assert choose(rule, again, *three) == "a"  # 600 <= 2 x 300
    rule.on_ended(last, "b", 2.0)
    assert choose(rule, again, *three[1:]) in {"b", "c"}, "who is gone is not waited for"
    rule.pinned[again.session] = "a"
    assert choose(rule, again, *three) in {"b", "c"}  # 600 > 2 x 200
    assert rule.pinned[again.session] in {"b", "c"}


def test_dualmap_takes_the_longer_match_of_two_until_it_is_too_late() -> None:
    """Of three replicas two are a prefix's, the same ones each time. The one that holds it is taken up to 5 s x 15,928
    tokens/s = 79,640 tokens; after that the one with less to do. The third is never asked, however idle."""
    rule = DualMap()
    turn, same, busy = turns((*range(8), 90), (*range(8), 91), (50,))
    cold = [candidate(name, 0, 9 * BLOCK) for name in NAMES]
    choose(rule, turn, *cold)
    first, second = (c.id for c in rule._pair(cold))
    assert first != second
    choose(rule, same, *cold)
    assert [c.id for c in rule._pair(cold)] == [first, second]
    by_name = {name: candidate(name, 0, 2_000) for name in NAMES} | {second: candidate(second, 1_360, 640)}
    assert choose(rule, turn, *by_name.values()) == second
    book(rule, busy, second, 79_000)
    assert choose(rule, turn, *by_name.values()) == second
    book(rule, same, second, 1)
    assert choose(rule, turn, *by_name.values()) == first


def test_mooncake_takes_the_least_queue_and_prefill_time() -> None:
    """Late tokens are dearer: 1,000 behind 9,000 take 0.0975 s, 1,000 behind none 0.0525 s, 1,400 behind 8,600
    take 0.131 s: the first until the second is before it."""
    times = LinearTimes(floor_s=0.010, token_s=40e-6, pair_s=5e-9, read_s=0.0)
    assert prefill_s(times, 1_000, 9_000) == pytest.approx(0.010 + 0.040 + 5e-9 * 1_000 * 9_500.5)
    assert prefill_s(times, 10_000, 0) == pytest.approx(0.020 + 0.400 + 5e-9 * 10_000 * 5_000.5)
    rule, (turn, busy) = MooncakeConductor(), turns((1,), (2,))
    calibration = Calibration(times, 100_000, 100_000)
    replicas = {n: VirtualReplica(n, calibration, 100_000, Limits(), _never, _never) for n in NAMES}
    rule.prepare_run(replicas, open_workload("none", [], BLOCK), rule)
    deep, shallow = candidate("a", 9_000, 1_000), candidate("b", 8_600, 1_400)
    assert choose(rule, turn, deep, shallow) == "a"
    book(rule, busy, "a", 1_000)
    assert choose(rule, turn, deep, shallow) == "b"


def _never(*_: object) -> None:
    raise AssertionError("nothing happens")


def test_lbgr_decays_its_queue_and_learns_what_the_formula_lacks() -> None:
    """1,000 characters are 1,000 ms, 969 a tick of 20 ms later; an answer after 5 s teaches 5,000 - 1,000 ms."""
    rule, (turn, busy) = Lbgr(), turns((1,), (2,))
    book(rule, busy, "a", 250)
    near, far = candidate("a", 1_000, 0), candidate("b", 0, 242)  # b: 968 ms, a: 1 + its queue
    assert choose(rule, turn, near, far) == "b"
    assert choose(rule, turn, near, far, now_s=0.04) == "a"
    rule.first_token(busy, "a", 1.0)
    rule.on_ended(busy, "a", 5.0)
    assert rule._remainder("a").ms == pytest.approx(4_000.0, rel=1e-5)
    assert choose(rule, turn, near, far, now_s=5.0) == "b"


def test_a_remainder_forgets_a_twentieth_an_observation() -> None:
    """Weights 1 and 0.95: the mean of 1,000 and then 3,000 is 2,025.6."""
    remainder = Remainder()
    remainder.learn(1_000.0)
    remainder.learn(3_000.0)
    assert remainder.ms == pytest.approx((0.95 * 1_000 + 3_000) / 1.95, rel=1e-4)


SCORED = [
    name for name, row in ROWS.items() if (row.bound and not row.foreknowledge) or isinstance(row.make(), ScoringPolicy)
]


@pytest.mark.parametrize("name", SCORED)
def test_every_row_answers_a_small_world_and_its_books_close(name: str) -> None:
    """All requests of a conversation-like workload are answered, the same way each time, with nothing left pending."""
    asked = turns(*[(*range(group, group + 8), 100 + n) for n in range(12) for group in (10, 30)], gap_s=0.05)
    workload = open_workload("small", asked, BLOCK)
    runs = []
    for _ in range(2):
        world = Simulation(workload, ClusterSpec(replicas=3), ROWS[name].make)
        result = world.run()
        assert [sent.failure for sent in result.sent] == [""] * len(asked)
        runs.append([(sent.lease.replica if sent.lease else "", sent.ttft_s) for sent in result.sent])
        rule = world.placers[0].policy
        assert isinstance(rule, PolicyUnderTest)
        if isinstance(rule, ScoringPolicy):
            assert set(rule.pending.values()) <= {0}
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", SCORED)
def test_no_row_minds_a_restart_a_newcomer_or_clients_that_give_up(name: str) -> None:
    """Requests are lost, tried again elsewhere and given up before and after their first token; books close all the
    same, on both of two routers."""
    asked = turns(*[tuple(range(1_000 * n, 1_000 * n + 60)) for n in range(1, 41)], gap_s=0.02)
    faults = (Fault("restart", 0.5, 0, lasts_s=2.0), Fault("join", 0.4, 2), Fault("slow", 0.1, 1))
    setting = ClusterSpec(replicas=3, routers=2, faults=faults, timeout_s=1.5)
    world = Simulation(open_workload("rough", asked, BLOCK), setting, ROWS[name].make)
    result = world.run()
    assert len(result.sent) == len(asked)
    assert any(sent.tried for sent in result.sent)
    assert "timeout" in {sent.failure for sent in result.sent}
    for placer in world.placers:
        if isinstance(placer.policy, ScoringPolicy):
            assert set(placer.policy.pending.values()) <= {0}
            assert not placer.policy._open
