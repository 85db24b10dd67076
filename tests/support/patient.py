"""A policy that has requests held back until the test lets them go."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class Patient:
    """The first candidate; held back while `hold` is set."""

    name = "patient"
    cache_aware = True

    def __init__(self) -> None:
        self.hold = True

    def choose(self, _: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """See Policy."""
        return PolicyDecision(candidates[0].id, hold_back=self.hold)
