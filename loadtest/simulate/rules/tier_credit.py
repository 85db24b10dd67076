"""Warm with another price of a load: what rivals give for a hit behind the GPU, in place of what it takes.

    loading(q, r) = (1 - credit) x prefill of the tokens that r has to load

A credit of 1 is that of a hit on the GPU, so a load costs nothing; 0.75, 0.4 and 0.8 are constants of rivals (a CPU
hit's part of a GPU hit, whatever its length and whoever loads there already). Everything else is Warm's own, evictions
included, so that nothing but this term is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.facts.placements import Candidate, Choice, Market
from router.core.learned.speeds import BACKLOG_TOKENS
from router.core.placement.policies.warm import Warm


class TierCredit(Warm):
    """Warm, that prices each token to be loaded at a fixed part of its prefill."""

    def __init__(self, credit: float) -> None:
        super().__init__(name=f"tier_credit_{credit:g}")
        self._lost = 1 - credit

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Warm's choice at these prices."""
        for c in candidates:
            c.loading_ms = self._lost * c.tier_tokens * market.unit_ms / BACKLOG_TOKENS
        return super().choose(market, candidates)
