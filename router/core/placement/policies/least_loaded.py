"""least_loaded: the fewest open requests, counted by our own leases; ties go to the least pending prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.facts.placements import Candidate, Choice, Market


@dataclass(slots=True)
class LeastLoaded:
    """The policy that Envoy calls LEAST_REQUEST, with a full scan."""

    name: str = "least_loaded"
    cache_aware: bool = False

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Return the candidate with the fewest open leases."""
        return Choice(min(candidates, key=lambda c: (c.in_flight, c.pending_ms)).id)
