"""An upper bound: one cache for all replicas, with every block that any of them began to compute; requests go to the
replica with the shortest wait.

With one cache for all, only load matters for placement. The wait is the true one, read from the engines themselves
(ground_truth.py). Costs that no placement can save are left: first-time work, and decodes. KV space is unlimited, so
that no row can pass the bound because it needs less of it. The work of a replica in one step is limited as in every
row.

It bounds the worth of caches, and not the worth of order. It places first come, first served. If no prefix is shared
and sizes differ by orders of magnitude, a row that happens to keep short prompts away from long ones can pass it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.simulate.engine.placer import SimView
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.shared_cache import known_depth
from loadtest.simulate.engine.workload import SimRequest, Workload
from loadtest.simulate.policies.base import SimPolicy
from loadtest.simulate.policies.bounds.ground_truth import GroundTruth, Work, work
from router.core.placement.policies import Policy
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class SharedCache(SimPolicy):
    """Policy with the shared cache. All routers of one world share one cache and one truth."""

    name = "shared_cache"

    def __init__(self) -> None:
        self._truth = GroundTruth({})
        self._shared: set[int] = set()
        self._asked: set[int] = set()
        self._own: Work = (0, 0.0)

    def prepare_run(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """Give all replicas one cache."""
        if isinstance(first, SharedCache) and first is not self:
            self._truth, self._shared, self._asked = first._truth, first._shared, first._asked  # noqa: SLF001
            return
        self._truth = GroundTruth(replicas)
        for replica in replicas.values():
            replica.share(self._shared)

    def see(self, sight: SimView) -> None:
        """Keep the router's input, and the request's work after the shared cache."""
        super().see(sight)
        turn = sight.turn
        size = next(iter(self._truth.replicas.values())).block_tokens
        cached = known_depth(turn.engine_keys[: (turn.prompt_tokens - 1) // size], self._asked) * size
        self._own = work(turn.prompt_tokens - cached, cached)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the candidate with the earliest first token; of several, the fewest requests in flight."""
        first = min(
            candidates, key=lambda c: (self._truth.first_token_s(c.id, self._own, self.sight.now_s), c.in_flight, c.id)
        )
        return PolicyDecision(first.id)

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Count the request as waiting on the replica; no other replica computes its blocks."""
        self._asked.update(turn.engine_keys)
        self._truth.add_waiting(turn, replica, self._own)

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self._truth.remove_waiting(turn, replica)

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self._truth.remove_waiting(turn, replica)
