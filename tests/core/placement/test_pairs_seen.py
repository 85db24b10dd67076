"""Pairs as pages show them."""

from __future__ import annotations

from collections import Counter

from router.core.disagg.pairs import PAIR_REST_S
from router.core.types.disagg_types import PairState, PairStatus
from router.core.types.placements import EndReason, Outcome
from tests.core.placement.paired import PairedFleet


def seen(fleet: PairedFleet, pairs_max: int = 100) -> dict[tuple[str, str], PairStatus]:
    """By replicas (prefill, decode), in order."""
    pairs, in_all = fleet.router.disaggregator.list_pairs(pairs_max, fleet.now_s)
    assert len(pairs) == min(in_all, pairs_max)
    return {(pair.prefill, pair.decode): pair for pair in pairs}


def busy() -> PairedFleet:
    """Replicas that decode have streams, so that long prompts are better prefilled elsewhere."""
    fleet = PairedFleet()
    fleet.streams("d", "e", count=8)
    return fleet


def test_a_pair_counts_its_requests() -> None:
    """Each request in two legs counts for the two that it went to, whatever becomes of it; and once where its prefill
    failed, or where its blocks did not come. A client that leaves is no failure."""
    fleet = busy()
    done, failed, stalled, left = [fleet.split(seed) for seed in range(4)]
    fleet.prefilled(done[0])
    fleet.finish(done[0])
    fleet.prefilled(failed[0], ending=EndReason.FAILED)
    fleet.prefilled(failed[0], ending=EndReason.FAILED)
    fleet.finish(failed[0], EndReason.CLIENT_LEFT)
    fleet.prefilled(stalled[0])
    fleet.router.disaggregator.pair_broke(stalled[1].replica, stalled[0].replica, now_s=fleet.now_s)
    fleet.finish(stalled[0], EndReason.REFUSED_BY_ENGINE)
    fleet.router.finish(left[0], Outcome(EndReason.CLIENT_LEFT), fleet.now_s)
    pairs = seen(fleet)
    went = Counter((leg.replica, lease.replica) for lease, leg in (done, failed, stalled, left))
    assert {name: pair.sent for name, pair in pairs.items() if pair.sent} == went
    whose = {name: pair.prefills_failed for name, pair in pairs.items() if pair.prefills_failed}
    assert whose == {(failed[1].replica, failed[0].replica): 1}
    assert {name: pair.broken for name, pair in pairs.items() if pair.broken} == {
        (stalled[1].replica, stalled[0].replica): 1
    }
    assert fleet.place(9, 40).receipt.leg is None
    assert sum(pair.sent for pair in seen(fleet).values()) == 4


def test_those_in_trouble_come_first() -> None:
    """Pairs that rest, with how long, then pairs that are to be warmed, then those that most requests went to; of many
    the first ones, and how many there are."""
    fleet = PairedFleet(pair=False)
    fleet.pair()
    fleet.streams("d", "e", count=8)
    used = [fleet.split(seed) for seed in range(5)]
    fleet.router.disaggregator.pair_broke("q", "e", now_s=fleet.now_s)
    pairs = seen(fleet)
    assert next(iter(pairs)) == ("q", "e")
    assert pairs["q", "e"].state is PairState.COOLDOWN
    assert pairs["q", "e"].rests_s == PAIR_REST_S
    sent = [pair.sent for pair in list(pairs.values())[1:]]
    assert sent == sorted(sent, reverse=True)
    assert sum(pair.sent for pair in pairs.values()) == len(used)
    assert list(seen(fleet, 1)) == [("q", "e")]
    fleet.now_s += PAIR_REST_S
    pairs = seen(fleet)
    assert (pairs["q", "e"].state, pairs["q", "e"].rests_s) == (PairState.NEW, 0.0)
    assert next(iter(pairs)) == ("q", "e")
    assert fleet.router.disaggregator.pairs_to_warm(fleet.now_s) == [("q", "e")]
    fleet.router.disaggregator.pair_warmed("q", "e", ok=True, now_s=fleet.now_s)
    assert seen(fleet)["q", "e"].state is PairState.WARM


def test_nothing_pairs_without_handshakes() -> None:
    """And then there is nothing to show."""
    fleet = PairedFleet(pair=False)
    assert fleet.router.disaggregator.pairs_to_warm(fleet.now_s) == []
    assert fleet.router.disaggregator.list_pairs(10, fleet.now_s) == ([], 0)
