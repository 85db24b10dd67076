"""The price of a placement: the cost to all requests until every answer ends, in milliseconds of waiting.

    price(q, r) = wait(r) + uncached(q, r) + load(r) x min(uncached(q, r), unit)
                  + room(q, r) + evicted(q, r) + evicted_again(q, r) / (1 + backlog)^2
                  + weight x (stalled(q, r) + (decode(q, r) + slowed(q, r)) / 2)
    weight = max(WEIGHT_LEAST, 1 / (1 + streams))

`Weights` has the formula. Each term is a field of Cost, already weighted. So the terms that receipts, `explain`,
the dashboard and spill causes show add up to the price. The measured terms are fields of Candidate, which
core/placement/scoring.py fills. docs/architecture/price.md has the meaning of each term, and the reason for it.
"""

from __future__ import annotations

from msgspec import Struct

from router.core.placement.policies.warm.constants import DECODING, WEIGHT_LEAST
from router.core.types.placements import Candidate, Cost, PlacementContext, Pull


class Weights(Struct, gc=False):
    """Weights of the terms, the same for all candidates of one placement."""

    per_wait_ms: float  # load per millisecond of waiting
    unit_ms: float  # largest delay of a request in the queue that is counted
    load_max: float
    again: float  # weight of a millisecond of `evicted_again`
    decoding: float  # weight of a millisecond of decoding

    def cost(self, candidate: Candidate) -> Cost:
        """Return the weighted terms of a candidate's price."""
        return self._cost(candidate, candidate.uncached_ms, candidate.stalled_ms, 0.0)

    def cost_with(self, candidate: Candidate, pull: Pull) -> Cost:
        """Return the terms if a part of the prompt comes from another replica by a P2P transfer."""
        return self._cost(candidate, pull.uncached_ms, pull.stalled_ms, pull.fetch_ms)

    def _cost(self, candidate: Candidate, uncached_ms: float, stalled_ms: float, transfer_ms: float) -> Cost:
        """Return the weighted terms by the formula above."""
        waited_ms, kv_wait_ms = candidate.pending_ms, candidate.kv_wait_ms
        if kv_wait_ms > waited_ms:
            waited_ms = kv_wait_ms
        load, delay_ms = waited_ms * self.per_wait_ms, self.unit_ms
        if load > self.load_max:
            load = self.load_max
        extras = candidate.extras
        if extras is not None and extras.delay_ms > waited_ms:  # a delay is no work that others wait for
            waited_ms = extras.delay_ms
        if uncached_ms < delay_ms:
            delay_ms = uncached_ms
        answer = self.decoding * DECODING
        return Cost(
            waited_ms,
            uncached_ms,
            load * delay_ms,
            candidate.room_ms,
            candidate.evicted_ms,
            self.again * candidate.evicted_again_ms,
            self.decoding * stalled_ms,
            answer * candidate.decode_ms,
            answer * candidate.slowed_ms,
            transfer_ms,
        )


def weigh(market: PlacementContext) -> Weights:
    """Return the weights for this placement context."""
    streams = market.in_flight / market.replicas if market.replicas else 0.0
    weight = max(WEIGHT_LEAST, 1 / (1 + streams))
    backlog = market.backlog
    return Weights(1 / market.unit_ms, market.unit_ms, backlog, 1 / (1 + backlog) ** 2, weight)


UNWEIGHTED = Weights(per_wait_ms=0.0, unit_ms=0.0, load_max=0.0, again=1.0, decoding=1.0)
"""Pricing of a policy that compares no prices: each term in full, and no delays of the queue."""
