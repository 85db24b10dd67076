"""random: any replica, without regard to its cache and load. The yardstick of many published results."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.base import SimPolicy, draw_number
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class AtRandom(SimPolicy):
    """Policy that chooses uniformly among the candidates."""

    name = "random"
    cache_aware = False

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return any candidate."""
        return PolicyDecision(candidates[draw_number(self.sight.turn, len(candidates))].id, tied=False)
