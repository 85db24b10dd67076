"""A policy that has requests held back until the test lets them go."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.facts import Candidate, Choice, Question


class Patient:
    """The first candidate, but not before `hold_ms`."""

    name = "patient"
    cache_aware = True

    def __init__(self) -> None:
        self.hold_ms = 1e9

    def choose(self, _: Question, candidates: Sequence[Candidate]) -> Choice:
        """See Policy."""
        return Choice(candidates[0].id, hold_ms=self.hold_ms)
