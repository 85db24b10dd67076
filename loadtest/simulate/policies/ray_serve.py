"""ray_prefix: Ray Serve LLM's PrefixCacheAffinityRouter, the longest match while queues are even.

    if the longest and the shortest queue differ by less than `imbalanced_threshold` (by default it is infinite):
        share of the prompt's characters in the tree >= 0.1: those that hold that much of it
        else: those with the smallest tree
    else: two drawn at random
    of these, the one with the shortest queue

Its tree is the approximate one of prompt_tree.py, over characters, and by default it never shrinks. Left out: the time
to request the queue lengths from the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.simulate.policies.base import SimPolicy, one_of_least_loaded
from loadtest.simulate.policies.prompt_tree import PromptTree
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

MATCH_SHARE_MIN = 0.1


class PrefixAffinity(SimPolicy):
    """Ray Serve's prefix affinity with its default threshold, at which queues are never too uneven."""

    name = "ray_prefix"

    def __init__(self) -> None:
        self._tree = PromptTree()

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the shortest queue among the replicas that the tree names."""
        turn, tree = self.sight.turn, self._tree
        matched, node = tree.match(turn.chain)
        if matched / (turn.prompt_tokens * BYTES_PER_TOKEN) >= MATCH_SHARE_MIN:
            named = [c for c in candidates if c.id in node.holders]
        else:
            smallest = min(tree.chars.get(c.id, 0) for c in candidates)
            named = [c for c in candidates if tree.chars.get(c.id, 0) == smallest]
        chosen = one_of_least_loaded(named or candidates, turn)
        tree.insert(turn.chain, chosen.id)
        return PolicyDecision(chosen.id, tied=False)
