"""random: any replica, whatever it holds and does. The yardstick of many published results."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.rules.shown import Shown, drawn
from router.core.facts.placements import Candidate, Choice, Market


class AtRandom(Shown):
    """Uniform over the candidates."""

    name = "random"
    cache_aware = False

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Any candidate."""
        return Choice(candidates[drawn(self.sight.turn, len(candidates))].id, tied=False)
