"""longest_match: the replica that holds most of the prompt, whatever its queue; shows that load must count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


@dataclass(slots=True)
class LongestMatch:
    """Ties go to the fewest open leases."""

    name: str = "longest_match"
    cache_aware: bool = True

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the candidate with the longest cached prefix."""
        return PolicyDecision(max(candidates, key=lambda c: (c.cached_tokens, -c.in_flight)).id)
