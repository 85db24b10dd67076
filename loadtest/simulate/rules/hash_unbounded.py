"""consistent_hash_unbounded: the key's place on the ring, however busy the replica there is.

What session affinity comes to in most proxies, and vllm-router's `consistent_hash` where clients send a session
header. Our own `consistent_hash` is the same ring with bounded load, so that the two rows differ in the bound alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.facts.placements import Candidate, Choice, Market
from router.core.placement.ring import Ring


class HashUnbounded:
    """Keyed by session hint or first user message; a replica that is no candidate is walked past."""

    name = "consistent_hash_unbounded"
    cache_aware = False

    def __init__(self) -> None:
        self._ring = Ring()

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """The first behind the key."""
        return Choice(self._ring.walk(market.ring_key, {c.id for c in candidates})[0], tied=False)
