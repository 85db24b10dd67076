"""random: any replica, without regard to its cache and load. The yardstick of many published results."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.rules.shown import Shown, drawn
from router.core.facts.placements import Candidate, Choice, Market


class AtRandom(Shown):
    """Policy that chooses uniformly among the candidates."""

    name = "random"
    cache_aware = False

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Return any candidate."""
        return Choice(candidates[drawn(self.sight.turn, len(candidates))].id, tied=False)
