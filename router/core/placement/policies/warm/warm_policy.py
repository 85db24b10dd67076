"""warm: the cheapest replica, where the price is the cost of the placement to all requests until every answer ends.

The formula is in cost.py. A model this simple cannot distinguish prices within the tie band; there the rules of
tie_break.py decide. Two replicas are priced against one in stages.py.

The fleet is busy if BUSY_UNITS of prefill wait on the mean replica and one unit on the median replica. In a busy fleet
a prompt is deferred if even the cheapest placement would make other requests repeat more than DEFER_RATIO times the
prompt's own work (core/admission/hold_back.py).

If replicas do more work than this router sends, another router also uses them. A prompt that no replica is known to
hold may then be cached at its place on the ring, because the other router would have sent it there. The price there is
lowered by the learned probability of this. It is multiplied by the work that is saved, and the same again for the next
router that looks there.

If the chosen replica can fetch missing blocks from another replica's memory, it does so if that costs less than
computing them (`pulls`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from router.core.placement.policies.policy import TransferTimes
from router.core.placement.policies.warm.constants import BUSY_UNITS, DEFER_RATIO, ELSEWHERE_MIN
from router.core.placement.policies.warm.cost import Weights, weigh
from router.core.placement.policies.warm.stages import cheapest_pair, may_save
from router.core.placement.policies.warm.tie_break import TIE_BREAKERS, TieBand, by_ring
from router.core.placement.ring import Ring
from router.core.types.placements import (
    Candidate,
    Confidence,
    DisaggPlan,
    PlacementContext,
    PolicyDecision,
    Pull,
)

PRICE, RING_GUESS = "price", "ring_guess"
"""Rules of a decision beside those of TIE_BREAKERS: one price is the lowest, or another router's place on the ring."""


@dataclass(slots=True)
class Warm:
    """No settings: every constant is learned, follows from learned times, or has its reason in constants.py."""

    name: str = "warm"
    cache_aware: bool = True
    _ring: Ring = field(default_factory=Ring)
    _prefill_ring: Ring = field(default_factory=Ring)  # ring of replicas that prefill for others

    def order_by_ring(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """Return all `ids`, the nearest to the key on the ring first."""
        return self._ring.walk(ring_key, ids)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the cheapest candidate, or inside the tie band that of the first tie breaker that answers. Also decide
        if the request is deferred."""
        weights = weigh(market)
        choice = self._cheapest(market, candidates, weights)
        choice.pricing = weights
        if market.backlog >= BUSY_UNITS and market.median_backlog >= 1:
            choice.hold_back = any(would_thrash(c, market) for c in candidates if c.id == choice.id)
        return choice

    def pulls(self, market: PlacementContext, chosen: Candidate, pull: Pull) -> bool:
        """True if the transfer costs less than it saves: this request's prefill, and the delays that the prefill
        causes."""
        weights = weigh(market)
        return weights.cost_with(chosen, pull).total() < weights.cost(chosen).total()

    def may_split(self, market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """True if a pair can save more than the tie band."""
        return may_save(market, chosen, decode)

    def split(
        self,
        market: PlacementContext,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: TransferTimes,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> DisaggPlan | None:
        """Return the cheapest pair if it is cheaper than one replica by more than the tie band. With `must` return it
        in any case."""
        return cheapest_pair(market, chosen, prefill, decode, pairs, self._prefill_ring, waits_ms, must=must)

    def _cheapest(self, market: PlacementContext, candidates: Sequence[Candidate], weights: Weights) -> PolicyDecision:
        # One loop over the candidates: a comprehension for each of its results would take twice as long.
        longest, cheapest, tie_ms = 0, inf, market.tie_ms
        for c in candidates:
            c.price_ms = price_ms = weights.cost(c).total()
            if price_ms < cheapest:
                cheapest = price_ms
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if market.other_router_probability > ELSEWHERE_MIN:
            guess = self._guess(candidates, market, weights, longest)
            if guess is not None and guess[1] - cheapest <= tie_ms:
                tied = guess[0].cached_tokens == longest
                return PolicyDecision(guess[0].id, tied, guessed=True, rule=RING_GUESS)
        band = {c.id: c for c in candidates if c.price_ms - cheapest <= tie_ms}
        if len(band) == 1:
            return PolicyDecision(next(iter(band)), rule=PRICE)
        return self._in_band(TieBand(market, band, self._ring), longest)

    def _in_band(self, band: TieBand, longest: int) -> PolicyDecision:
        """Choose among prices that cannot be distinguished; `longest` is the largest number of cached tokens of any
        candidate."""
        tied = band.most_tokens == longest  # otherwise the longest holder was too expensive: a spill
        for name, rule in TIE_BREAKERS:
            winner = rule(band)
            if winner is not None:
                return PolicyDecision(winner.id, tied, rule=name)
        raise AssertionError("the last tie breaker always answers")

    def _guess(
        self, candidates: Sequence[Candidate], market: PlacementContext, weights: Weights, longest: int
    ) -> tuple[Candidate, float] | None:
        """Return the ring place of a prompt that is mostly not known to be cached, and its price less the work probably
        saved there. Return None if most of the prompt is cached, or if the place's events are exact."""
        prompt_tokens = candidates[0].cached_tokens + candidates[0].uncached_tokens
        if 2 * longest > prompt_tokens:
            return None
        guess = by_ring(market, {c.id: c for c in candidates}, self._ring)[0]
        if guess.grade is Confidence.EXACT:
            return None
        cost = weights.cost(guess)
        kept_ms = cost.wait_ms + cost.decode_ms + cost.slowed_ms  # the same if the prompt is held
        saved_ms = guess.price_ms - kept_ms + guess.uncached_ms
        return guess, guess.price_ms - market.other_router_probability * saved_ms


def would_thrash(candidate: Candidate, market: PlacementContext) -> bool:
    """True if a request that began here now would make other requests repeat much more work than its own. A request
    that is mostly cached is a turn of an ongoing conversation, and never thrashes."""
    if candidate.uncached_tokens <= candidate.cached_tokens or candidate.uncached_ms <= market.tie_ms:
        return False
    return candidate.evicted_ms + candidate.evicted_again_ms > DEFER_RATIO * candidate.uncached_ms
