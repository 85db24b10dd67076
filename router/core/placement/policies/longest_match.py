"""longest_match: the replica that holds most of the prompt, whatever its queue; shows that load must count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.facts.placements import Candidate, Choice, Market


@dataclass(slots=True)
class LongestMatch:
    """Ties go to the fewest open leases."""

    name: str = "longest_match"
    cache_aware: bool = True

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Return the candidate with the longest cached prefix."""
        return Choice(max(candidates, key=lambda c: (c.cached_tokens, -c.in_flight)).id)
