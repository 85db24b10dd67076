"""An upper bound: one cache for all replicas, with every block that any of them began to compute; requests go to the
replica with the shortest wait.

With one cache for all, only load matters for placement. The wait is the true one, read from the engines themselves
(truth.py). Costs that no placement can save are left: first-time work, and decodes. KV space is unlimited, so that no
row can pass the bound because it needs less of it. The work of a replica in one step is limited as in every row.

It bounds the worth of caches, and not the worth of order. It places first come, first served. If no prefix is shared
and sizes differ by orders of magnitude, a row that happens to keep short prompts away from long ones can pass it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.simulate.rules.bounds.truth import Truth, Work, work
from loadtest.simulate.rules.shown import Shown
from loadtest.simulate.world.placer import Sight
from loadtest.simulate.world.replicas import VirtualReplica
from loadtest.simulate.world.shared_cache import known_depth
from loadtest.simulate.world.turns import Turn, Workload
from router.core.facts.placements import Candidate, Choice, Market
from router.core.placement.policies import Policy


class SharedCache(Shown):
    """Policy with the shared cache. All routers of one world share one cache and one truth."""

    name = "shared_cache"

    def __init__(self) -> None:
        self._truth = Truth({})
        self._shared: set[int] = set()
        self._asked: set[int] = set()
        self._own: Work = (0, 0.0)

    def told(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """Give all replicas one cache."""
        if isinstance(first, SharedCache) and first is not self:
            self._truth, self._shared, self._asked = first._truth, first._shared, first._asked  # noqa: SLF001
            return
        self._truth = Truth(replicas)
        for replica in replicas.values():
            replica.share(self._shared)

    def see(self, sight: Sight) -> None:
        """Keep the router's input, and the request's work after the shared cache."""
        super().see(sight)
        turn = sight.turn
        size = next(iter(self._truth.replicas.values())).block_tokens
        cached = known_depth(turn.engine_keys[: (turn.prompt_tokens - 1) // size], self._asked) * size
        self._own = work(turn.prompt_tokens - cached, cached)

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Return the candidate with the earliest first token; of several, the fewest requests in flight."""
        first = min(
            candidates, key=lambda c: (self._truth.first_token_s(c.id, self._own, self.sight.now_s), c.in_flight, c.id)
        )
        return Choice(first.id)

    def placed(self, turn: Turn, replica: str, now_s: float) -> None:
        """Count the request as waiting on the replica; no other replica computes its blocks."""
        self._asked.update(turn.engine_keys)
        self._truth.placed(turn, replica, self._own)

    def first_token(self, turn: Turn, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self._truth.left(turn, replica)

    def ended(self, turn: Turn, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self._truth.left(turn, replica)
