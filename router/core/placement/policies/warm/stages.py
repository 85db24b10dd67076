"""Prices of disaggregated prefill: two replicas against one.

The price of a pair has the prefill's terms of one replica, the answer's terms of the other, and the transfer time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from router.core.placement.policies.policy import TransferTimes
from router.core.placement.policies.warm.constants import DISAGG_CANDIDATES, PREFILL_QUEUE_SLOPE
from router.core.placement.policies.warm.cost import Weights, weigh
from router.core.placement.ring import Ring
from router.core.types.placements import Candidate, Cost, DisaggPlan, PlacementContext


def weigh_stages(market: PlacementContext, waits_ms: Sequence[float]) -> Weights:
    """Return the weights for disaggregated prefill by replicas with these waits.

    Their queues count like those of the fleet. Streams that a prefill would stall count in full if no prefill waits:
    later arrivals even out an imbalance of streams, but not a stall.
    """
    weights = weigh(market)
    weights.decoding = 1.0
    if waits_ms and max(waits_ms):
        backlog = sum(waits_ms) / len(waits_ms) / market.unit_ms
        weights.load_max = max(weights.load_max, backlog)
        units = sorted(waits_ms)[(len(waits_ms) - 1) // 2] / market.unit_ms
        weights.decoding = 1 / (1 + PREFILL_QUEUE_SLOPE * units)
    return weights


def prefill_stage_ms(cost: Cost) -> float:
    """Return the part of a price that belongs to a prefill stage: its wait, and its cost to other requests there."""
    return cost.wait_ms + cost.uncached_ms + cost.load_ms + cost.evicted_ms + cost.evicted_again_ms + cost.stalled_ms


def decode_stage_ms(cost: Cost) -> float:
    """Return the part of a price that belongs to a decode stage, without its wait, which the prefill may cover."""
    return cost.room_ms + cost.evicted_ms + cost.evicted_again_ms + cost.decode_ms + cost.slowed_ms


def may_save(market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
    """True if a pair can save more than the tie band. This alone decides for a request that is mostly cached. A queue
    before the prefill reduces the weight of decoding, at most to 0, and may make a wait count in full."""
    most = weigh(market)
    most.load_max = inf
    least = Weights(most.per_wait_ms, most.unit_ms, most.load_max, most.again, 0.0)
    for weights in (most, least):
        answer_ms = min([decode_stage_ms(weights.cost(each)) for each in decode], default=inf)
        if weights.cost(chosen).total() - answer_ms > market.tie_ms:
            return True
    return False


def cheapest_pair(
    market: PlacementContext,
    chosen: Candidate,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    pairs: TransferTimes,
    ring: Ring,
    waits_ms: Sequence[float],
    *,
    must: bool,
) -> DisaggPlan | None:
    """Return the cheapest of a few pairs if it is cheaper than one replica by more than the tie band. With `must`
    return it in any case. `ring` is that of the replicas that prefill for others."""
    weights, tie_ms = weigh_stages(market, waits_ms), market.tie_ms
    whole_ms = weights.cost(chosen).total()
    answers = [(decode_stage_ms(weights.cost(c)), n) for n, c in enumerate(decode)]
    if not answers or not prefill or (whole_ms - min(answers)[0] <= tie_ms and not must):
        return None
    prefills = [(prefill_stage_ms(weights.cost(c)), n) for n, c in enumerate(prefill)]
    firsts, seconds = _first_stages(market, prefill, prefills, ring), nsmallest(DISAGG_CANDIDATES, answers)
    best = _best(firsts, seconds, decode, pairs, tie_ms)
    if best is None and must:  # none of these few are a pair
        best = _best([(ms, prefill[n]) for ms, n in sorted(prefills)], sorted(answers), decode, pairs, tie_ms)
    return best if best is not None and (must or best.price_ms < whole_ms - tie_ms) else None


def _first_stages(
    market: PlacementContext, prefill: Sequence[Candidate], prefills: list[tuple[float, int]], ring: Ring
) -> list[tuple[float, Candidate]]:
    """Return the few replicas with the cheapest prefill and their prices, in that order. Replicas within the tie band
    of the cheapest are in the order of the ring."""
    few = nsmallest(DISAGG_CANDIDATES, prefills)
    band = {prefill[n].id: (price_ms, prefill[n]) for price_ms, n in few if price_ms - few[0][0] <= market.tie_ms}
    ordered = [band[id_] for id_ in ring.walk(market.ring_key, band)]
    return ordered + [(price_ms, prefill[n]) for price_ms, n in few if prefill[n].id not in band]


def _best(
    firsts: Sequence[tuple[float, Candidate]],
    seconds: Sequence[tuple[float, int]],
    decode: Sequence[Candidate],
    pairs: TransferTimes,
    tie_ms: float,
) -> DisaggPlan | None:
    """Return the cheapest pair of these prefill stages and decode stages (positions in `decode`), given their prices.
    Among pairs that cannot be distinguished the first one wins. Return None if there is no pair."""
    best: DisaggPlan | None = None
    for first_ms, first in firsts:
        for second_ms, n in seconds:
            transfer_ms = pairs.transfer_ms(first, decode[n])
            if transfer_ms is None:
                continue
            there_ms = first.wait_ms + first.uncached_ms + transfer_ms
            late_ms = decode[n].wait_ms - there_ms  # wait of the decode stage beyond its prefill stage
            price_ms = first_ms + second_ms + transfer_ms + (late_ms if late_ms > 0 else 0.0)
            if best is None or price_ms < best.price_ms - tie_ms:
                best = DisaggPlan(first, decode[n], transfer_ms, price_ms)
    return best
