"""Two legs where something is slow, fails again and again, or is due."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from router.core.disagg.disagg_policy import DisaggPolicy
from router.core.disagg.pairs import PAIR_REST_MAX_S, PAIR_REST_S, TIMES_S
from router.core.placement.policies.warm.stages import weigh_stages
from router.core.types.disagg_types import Role
from router.core.types.placements import Candidate, DisaggPlan, EndReason, PlacementContext, Shed
from router.core.types.requests import Priority
from tests.core.placement.paired import TOKENS, PairedFleet

ONE_EACH = {"p": Role.PREFILL, "d": Role.DECODE}


def busy() -> PairedFleet:
    """Replicas that decode have streams, so that long prompts are better prefilled elsewhere."""
    fleet = PairedFleet()
    fleet.streams("d", "e", count=8)
    return fleet


def test_slow_transfers_are_forgotten() -> None:
    """While they are remembered no request goes in two legs, so nothing shows that they are fast again: some minutes
    later one does."""
    fleet = busy()
    for seed in range(1, 40):
        fleet.serve(seed, transfer_s=20.0)
    assert fleet.place(50).receipt.leg is None
    fleet.now_s += TIMES_S + 1.0
    fleet.router.disaggregator.pairs_to_warm(fleet.now_s)
    assert fleet.place(51).receipt.leg is not None


@pytest.mark.parametrize("replica", ["p", "d"])
def test_times_end_with_the_process(replica: str) -> None:
    """A replica that restarts is priced without the slow transfers of the process before, as soon as its pair is warm;
    another pair's times stay."""
    fleet = PairedFleet(ONE_EACH)
    fleet.streams("d", count=8)
    for seed in range(1, 40):
        fleet.serve(seed, transfer_s=20.0)
    assert fleet.place(50).receipt.leg is None
    legs, members = fleet.router.disaggregator.pairs, fleet.router.fleet.members
    legs.on_engine_restarted("somebody else")
    assert legs.model("p", "d", members["d"].speeds.loads).ms(TOKENS) > 1_000.0
    legs.on_engine_restarted(replica)
    for pair in fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
        fleet.router.disaggregator.pair_warmed(*pair, ok=True, now_s=fleet.now_s)
    assert legs.model("p", "d", members["d"].speeds.loads).ms(TOKENS) < 500.0
    assert fleet.place(51).receipt.leg is not None


def test_one_pause_is_no_slow_link() -> None:
    """A single transfer of half a minute counts as one that took four times as long as was expected."""
    fleet = busy()
    legs, loads = fleet.router.disaggregator.pairs, fleet.router.fleet.members["d"].speeds.loads
    before_ms = legs.model("p", "d", loads).ms(TOKENS)
    legs.learn("p", "d", loads, TOKENS, 30_000.0, fleet.now_s)
    assert legs.model("p", "d", loads).ms(TOKENS) <= 4 * before_ms


def test_a_pair_that_only_warms_well_rests_longer_each_time() -> None:
    """Its small warming comes over and requests do not: ever fewer are lost to it, until one comes over."""
    fleet = PairedFleet(ONE_EACH)
    fleet.streams("d", count=8)
    legs, lost_s = fleet.router.disaggregator.pairs, list[float]()
    for seed in range(400):
        fleet.now_s += 1.0
        for pair in fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
            fleet.router.disaggregator.pair_warmed(*pair, ok=True, now_s=fleet.now_s)
        lease = fleet.place(seed)
        if lease.receipt.leg is not None:
            lost_s.append(fleet.now_s)
            fleet.now_s += lease.receipt.leg.uncached_ms / 1e3
            fleet.prefilled(lease)
            fleet.router.disaggregator.pair_broke("p", "d", now_s=fleet.now_s)
        fleet.finish(lease, EndReason.REFUSED_BY_ENGINE)
    gaps_s = [second - first for first, second in pairwise(lost_s)]
    assert all(second >= min(PAIR_REST_MAX_S, 1.5 * first) for first, second in pairwise(gaps_s))
    fleet.now_s += PAIR_REST_MAX_S
    for pair in fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
        fleet.router.disaggregator.pair_warmed(*pair, ok=True, now_s=fleet.now_s)
    lease, leg = fleet.split(1_000)
    fleet.now_s += leg.uncached_ms / 1e3
    fleet.prefilled(lease)
    fleet.router.first_token(lease, fleet.now_s + 0.25)
    fleet.router.disaggregator.pair_broke("p", "d", now_s=fleet.now_s)
    assert not legs.to_warm(fleet.router.fleet.members, fleet.now_s + PAIR_REST_S - 0.1)
    assert legs.to_warm(fleet.router.fleet.members, fleet.now_s + PAIR_REST_S)


def late() -> PairedFleet:
    """Where one leg comes after 3 s and two after 1.8 s, and both predictions are as good."""
    fleet = busy()
    for name in "de":
        fleet.place(900, 30_000, may_split=False, only=name)
    return fleet


@pytest.mark.parametrize("priority", [Priority.LOW, Priority.NORMAL])
def test_what_two_legs_bring_in_time_is_not_turned_away(priority: Priority) -> None:
    """Though no replica does it alone."""
    fleet = late()
    wanted = fleet.wanted(2)
    wanted.due_s, wanted.priority = fleet.now_s + 2.5, priority
    assert fleet.router.predict_ttft(wanted, fleet.now_s)[0] < 2_500
    lease = fleet.router.route(wanted, fleet.now_s)
    assert lease.receipt.leg is not None
    assert lease.receipt.ttft_ms < 2_500


def test_what_neither_brings_in_time_is_turned_away() -> None:
    """Of low priority; all else goes where it comes first."""
    fleet = late()
    wanted = fleet.wanted(2)
    wanted.due_s, wanted.priority = fleet.now_s + 0.5, Priority.LOW
    with pytest.raises(Shed) as caught:
        fleet.router.route(wanted, fleet.now_s)
    assert caught.value.code == "slo_unreachable"
    wanted.priority = Priority.NORMAL
    assert fleet.router.route(wanted, fleet.now_s).receipt.leg is not None


def test_one_leg_in_time_is_better_than_two_that_are_late() -> None:
    """By what is predicted of either, as their own first tokens have shown it."""
    fleet = busy()
    assert fleet.split(1)[1]
    speeds = fleet.router.fleet.members["d"].speeds
    for _ in range(200):
        speeds.first_tokens_split.observe(1_000.0, 6_000.0)
    wanted = fleet.wanted(2)
    wanted.due_s = fleet.now_s + 4.0
    assert fleet.router.route(wanted, fleet.now_s).receipt.leg is None


def test_a_request_that_is_nearly_cached_prices_no_prefill_replica() -> None:
    """What two legs could save at most is known before."""
    fleet = PairedFleet({f"p{n}": Role.PREFILL for n in range(40)} | {"d": Role.DECODE})
    fleet.streams("d")
    fleet.serve(1, 2_000, may_split=False)
    splitter = fleet.router.disaggregator.planner
    assert splitter is not None
    fleet.place(1, 2_020)
    assert splitter.prefill == []
    fleet.place(2)
    assert splitter.prefill


class _Asked:
    """The policy, and the waits that it was told of."""

    def __init__(self, policy: DisaggPolicy) -> None:
        self.policy, self.waits_ms = policy, list[float]()

    def may_split(self, market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        return self.policy.may_split(market, chosen, decode)

    def split(self, *given: Any, waits_ms: Sequence[float], **more: Any) -> DisaggPlan | None:
        self.waits_ms = list(waits_ms)
        return self.policy.split(*given, waits_ms=waits_ms, **more)


@pytest.mark.inside
def test_a_queue_before_the_prefill_is_that_of_all_who_may_take_it() -> None:
    """Not that of the few that wait least: where most wait, decoding counts for less."""
    names = [f"p{n}" for n in range(60)]
    fleet = PairedFleet(dict.fromkeys(names, Role.PREFILL) | {"d": Role.DECODE})
    fleet.streams("d")
    for n, name in enumerate(names[:45]):
        for seed in range(12):
            fleet.place(5_000 + 20 * n + seed, may_split=False, only=name)
    members, splitter = fleet.router.fleet.members, fleet.router.disaggregator.planner
    assert splitter is not None
    splitter._policy = asked = _Asked(splitter._policy)
    waits_ms = [members[name].queue.pending_ms(fleet.now_s) for name in names]
    fleet.place(9)
    assert sorted(asked.waits_ms) == pytest.approx(sorted(waits_ms))
    market = PlacementContext("", 100.0, 1_000.0, 0.0)
    assert weigh_stages(market, asked.waits_ms).decoding < 0.5 < weigh_stages(market, [0.0] * 16).decoding


def test_a_prefill_replica_that_comes_back_starts_slowly() -> None:
    """It takes a share of the legs at first, as any replica does."""
    fleet = PairedFleet({"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE}, slow_start_s=30.0)
    fleet.streams("d", count=8)
    fleet.router.fleet.observe_health("q", ok=False)
    for _ in range(5):
        fleet.now_s += 1.0
        fleet.router.fleet.observe_health("q", ok=False)
    lease, leg = fleet.split(1)
    assert leg.replica == "p"
    fleet.now_s += leg.uncached_ms / 1e3
    fleet.prefilled(lease)
    fleet.router.fleet.observe_health("q", ok=True)
    legs = list[str]()
    for seed in range(5, 25):
        lease = fleet.place(seed)
        if lease.receipt.leg is not None:
            legs.append(lease.receipt.leg.replica)
    assert 0 < legs.count("q") <= 2 < legs.count("p")
