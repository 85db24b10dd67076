"""LPWL, least prefill work left: pending prefill tokens and this request's own.

    argmin pending prefill tokens(r) + max(0, input - hit(r));  ties: fewest requests, then by turns

Source: gahow/agentic-kvc (2026-05). It has no parameters, and no term for decodes or for evicted blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate


class Lpwl(ScoringPolicy):
    """The least prefill work left; it has no settings."""

    name = "lpwl"

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        shortest = least(candidates, lambda c: self._get_pending(c) + c.uncached_tokens)
        return self._turns.one_of(least(shortest, lambda c: c.in_flight))
