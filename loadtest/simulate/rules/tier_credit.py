"""Warm with a price of loads: what is learned of them, or what rivals give for a hit behind the GPU.

    loading(q, r) = learned time of the load, behind the loads under way from the same tier
    loading(q, r) = (1 - credit) x prefill of the tokens that r has to load

Warm itself has no such term: to it a hit in a tier counts as one on the GPU. 0.75, 0.4 and 0.8 are constants of rivals
(a CPU hit's part of a GPU hit, whatever its length and whoever loads there already). Everything else is Warm's own,
evictions included, so that nothing but this term is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.facts.placements import Candidate, Choice, Market
from router.core.learned.speeds import BACKLOG_TOKENS
from router.core.placement.policies.warm import Warm


class TierCredit(Warm):
    """Warm, that prices each token to be loaded at a fixed part of its prefill; with None at what is learned."""

    def __init__(self, credit: float | None) -> None:
        super().__init__(name="tier_price" if credit is None else f"tier_credit_{credit:g}")
        self._lost = None if credit is None else 1 - credit

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Warm's choice at these prices. The term goes where another one of the same weight is, `evicted_ms`."""
        for c in candidates:
            if self._lost is None:
                c.evicted_ms += c.loading_ms
            else:
                c.evicted_ms += self._lost * c.tier_tokens * market.unit_ms / BACKLOG_TOKENS
        return super().choose(market, candidates)
