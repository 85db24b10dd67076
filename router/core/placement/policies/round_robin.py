"""round_robin: one candidate after the other, as most load balancers do; the baseline of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


@dataclass(slots=True)
class RoundRobin:
    """Counts choices. Candidates that join or leave shift the order, but not the shares."""

    name: str = "round_robin"
    cache_aware: bool = False
    _turn: int = -1

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the next candidate."""
        self._turn += 1
        return PolicyDecision(candidates[self._turn % len(candidates)].id)
