"""The policy interface: candidates come filtered and priced, a policy only chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.core.facts import Candidate, Choice, Question


class Policy(Protocol):
    """`cache_aware` says whether the choice looked at what replicas hold; if not, receipts say `policy`."""

    name: str
    cache_aware: bool

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Choice:
        """Pick one of `candidates` (never empty, in a stable order)."""
