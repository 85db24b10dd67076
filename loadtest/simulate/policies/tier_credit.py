"""Warm with a price of loads: the learned time, or the rivals' credit for a hit behind the GPU.

    loading(q, r) = learned time of the load, after the loads under way from the same tier
    loading(q, r) = (1 - credit) x prefill of the tokens that r has to load

Warm itself has no such term: it counts a hit in a tier as one on the GPU. 0.75, 0.4 and 0.8 are constants of rivals: a
CPU hit's part of a GPU hit, for any length and with any loads under way. The rest is Warm's own, evictions included, so
that only this term is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.estimators.model_speeds import BACKLOG_TOKENS
from router.core.placement.policies.warm import Warm
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class TierCredit(Warm):
    """Warm with a price for each token to load: a fixed part of its prefill, or the learned time if `credit` is
    None."""

    def __init__(self, credit: float | None) -> None:
        super().__init__(name="tier_price" if credit is None else f"tier_credit_{credit:g}")
        self._lost = None if credit is None else 1 - credit

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return Warm's choice at these prices. The term is added to one of the same weight, `evicted_ms`."""
        for c in candidates:
            if self._lost is None:
                c.evicted_ms += c.loading_ms
            else:
                c.evicted_ms += self._lost * c.tier_tokens * market.unit_ms / BACKLOG_TOKENS
        return super().choose(market, candidates)
