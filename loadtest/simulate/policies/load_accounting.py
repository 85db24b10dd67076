"""Common part of rules that score: their own books of prefill work under way.

Most published rules count, for each replica, the work of the requests they sent to it that have no first token yet. The
work of a request is fixed when it is placed: the tokens that its candidate had not cached. The cache estimate behind it
is the same, at the same grade, that our own policies get. Books are kept in whole numbers, so that equal costs are
equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.base import SimPolicy, draw_number
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision
from router.core.types.replicas import Load


class ScoringPolicy(SimPolicy, ABC):
    """A SimPolicy with the work that waits at each replica; `_pick` is its formula."""

    name: str

    def __init__(self) -> None:
        self.pending: dict[str, int] = {}
        """Work by replica, in the unit of `_work`."""
        self._open: dict[SimRequest, int] = {}
        self._candidates: Sequence[Candidate] = ()
        self._turns = Turns()

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Pick one of `candidates`."""
        self._candidates = candidates
        return PolicyDecision(self._pick(candidates).id)

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Book the request's work at this replica."""
        chosen = next(c for c in self._candidates if c.id == replica)
        work = self._open[turn] = self._work(chosen)
        self.pending[replica] = self.pending.get(replica, 0) + work

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Take the request's work off the books."""
        self.pending[replica] -= self._open.pop(turn, 0)

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Take the request's work off the books, if it is still there."""
        self.first_token(turn, replica, now_s)

    def _any(self, tied: Sequence[Candidate]) -> Candidate:
        """Return one of several candidates with the same cost, pseudo-randomly."""
        return tied[draw_number(self.sight.turn, len(tied))]

    def _get_pending(self, candidate: Candidate) -> int:
        return self.pending.get(candidate.id, 0)

    def _work(self, candidate: Candidate) -> int:
        """Return the work of the request on this candidate: prompt tokens to compute, unless a rule counts
        otherwise."""
        return candidate.uncached_tokens

    def _load(self, candidate: Candidate) -> Load:
        """Return the load that the last probe of the replica reported."""
        return self.sight.router.fleet.members[candidate.id].load

    @abstractmethod
    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the candidate that the formula picks."""


def least(candidates: Sequence[Candidate], cost: Callable[[Candidate], float]) -> list[Candidate]:
    """Return all candidates of the least cost, in their order."""
    costs = [cost(c) for c in candidates]
    lowest = min(costs)
    return [c for c, each in zip(candidates, costs, strict=True) if each == lowest]


class Turns:
    """Chooses by turns among several candidates of the same cost."""

    def __init__(self) -> None:
        self._turn = -1

    def one_of(self, tied: Sequence[Candidate]) -> Candidate:
        """Return the next candidate in rotation."""
        if len(tied) == 1:
            return tied[0]
        self._turn += 1
        return tied[self._turn % len(tied)]
