"""least_loaded: the fewest open requests, counted by our own leases; ties go to the least pending prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


@dataclass(slots=True)
class LeastLoaded:
    """The policy that Envoy calls LEAST_REQUEST, with a full scan."""

    name: str = "least_loaded"
    cache_aware: bool = False

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the candidate with the fewest open leases."""
        return PolicyDecision(min(candidates, key=lambda c: (c.in_flight, c.pending_ms)).id)
