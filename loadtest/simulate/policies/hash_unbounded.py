"""consistent_hash_unbounded: the key's place on the ring, at any load of the replica there.

This is session affinity as in most proxies, and vllm-router's `consistent_hash` if clients send a session header. Our
own `consistent_hash` is the same ring with bounded load, so that the two rows differ only in the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.placement.ring import Ring
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class HashUnbounded:
    """Policy keyed by session hint or first user message; replicas that are no candidates are skipped."""

    name = "consistent_hash_unbounded"
    cache_aware = False

    def __init__(self) -> None:
        self._ring = Ring()

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the first candidate after the key."""
        return PolicyDecision(self._ring.walk(market.ring_key, {c.id for c in candidates})[0], tied=False)
