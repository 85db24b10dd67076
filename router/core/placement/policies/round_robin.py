"""round_robin: each candidate in turn; what most load balancers do, and the yardstick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.facts.placements import Candidate, Choice, Market


@dataclass(slots=True)
class RoundRobin:
    """Counts choices; candidates that come and go shift the turn, never the share."""

    name: str = "round_robin"
    cache_aware: bool = False
    _turn: int = -1

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """The next one."""
        self._turn += 1
        return Choice(candidates[self._turn % len(candidates)].id)
