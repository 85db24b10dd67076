"""Sticky sessions with an override: a session keeps its replica, unless that replica has twice the usual load.

    ongoing(r) = prompt tokens of the requests open there
    pinned(session) if ongoing(pinned) <= 2 x mean of ongoing; else, and at first, argmin ongoing(r): pinned there

Ties are resolved by turns. Source: gahow/agentic-kvc at 012d73f596 (2026-05-22), which found it the best of its own
rules. The session is the workload's own, as if every client sent a header. Prompts that are sessions of their own go to
the least load. Left out: the time after which it forgets a session (here never within a run).
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate

OVERLOAD = 2.0


class StickyOverride(ScoringPolicy):
    """Sessions stick to a replica until it is overloaded; it has no settings."""

    name = "sticky_override"
    cache_aware = False

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[str, str] = {}

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Keep the books: a request counts until it has ended."""

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Take the request off the books."""
        self.pending[replica] -= self._open.pop(turn, 0)

    def _work(self, candidate: Candidate) -> int:
        return candidate.cached_tokens + candidate.uncached_tokens

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        session = self.sight.turn.session
        mean = sum(map(self._get_pending, candidates)) / len(candidates)
        for c in candidates:
            if c.id == self.pinned.get(session) and self._get_pending(c) <= OVERLOAD * mean:
                return c
        chosen = self._turns.one_of(least(candidates, self._get_pending))
        self.pinned[session] = chosen.id
        return chosen
