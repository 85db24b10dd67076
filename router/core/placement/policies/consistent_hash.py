"""consistent_hash: the key's place on the ring with bounded load; gives affinity without any knowledge of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.placement.ring import Ring, under_bound
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


@dataclass(slots=True)
class ConsistentHash:
    """Keyed by session hint or first user message, like the tie break of `warm`."""

    name: str = "consistent_hash"
    cache_aware: bool = False
    _ring: Ring = field(default_factory=Ring)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the first candidate under the load bound."""
        loads = {c.id: c.in_flight for c in candidates}
        return PolicyDecision(self._ring.pick(market.ring_key, loads, under_bound(loads, 1)), tied=True)
