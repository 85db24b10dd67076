"""two_choices: the less loaded of two random candidates (Mitzenmacher 2001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


@dataclass(slots=True)
class TwoChoices:
    """The random numbers are injected, so a run can be repeated."""

    rng: Random = field(default_factory=lambda: Random(0))  # noqa: S311 - load, not secrets
    name: str = "two_choices"
    cache_aware: bool = False

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the candidate with fewer open leases of two; of one candidate, that one."""
        drawn = self.rng.sample(candidates, min(2, len(candidates)))
        return PolicyDecision(min(drawn, key=lambda c: c.in_flight).id)
