"""A policy that has requests held back until the test lets them go."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.facts.placements import Candidate, Choice, Question


class Patient:
    """The first candidate; held back while `hold` is set."""

    name = "patient"
    cache_aware = True

    def __init__(self) -> None:
        self.hold = True

    def choose(self, _: Question, candidates: Sequence[Candidate]) -> Choice:
        """See Policy."""
        return Choice(candidates[0].id, hold=self.hold)
