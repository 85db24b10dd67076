"""Choice among prices that cannot be distinguished: an ordered tuple of rules, of which the first that answers wins.

All rules apply only to replicas under the ring's load bound, or with at most LAST_REPLICA_SLACK open requests; if no
replica of the band is, the last two rules apply to all of them. No rule overrides a price outside the band.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.core.placement.policies.warm.constants import LAST_REPLICA_SLACK, RING_CHOICES, SPREAD
from router.core.placement.ring import Ring, load_bound
from router.core.types.placements import Candidate, PlacementContext


class TieBand:
    """Candidates with the same price within the tie band, by id."""

    def __init__(self, market: PlacementContext, candidates: dict[str, Candidate], ring: Ring) -> None:
        self.market, self.candidates, self._ring = market, candidates, ring
        self.most_tokens = max([c.cached_tokens for c in candidates.values()])
        self._bound = load_bound(market.in_flight + 1, market.replicas)
        self._able: list[Candidate] = []

    def has_room(self, candidate: Candidate) -> bool:
        """True if a candidate is under the load bound."""
        return candidate.in_flight < self._bound or candidate.in_flight <= LAST_REPLICA_SLACK

    def able(self) -> list[Candidate]:
        """Return the candidates with room, or all if none has; the nearest to the ring key first."""
        if not self._able:
            order = by_ring(self.market, self.candidates, self._ring)
            self._able = [c for c in order if self.has_room(c)] or order
        return self._able


TieBreaker = Callable[[TieBand], Candidate | None]


def last_replica(band: TieBand) -> Candidate | None:
    """Return the replica that gave the conversation's last answer."""
    home = band.candidates.get(band.market.last_replica)
    return home if home is not None and band.has_room(home) else None


def predicted_replica(band: TieBand) -> Candidate | None:
    """Return the replica that the agent's metadata suggests, if no other replica of the band holds more."""
    expected = band.candidates.get(band.market.expected_replica)
    if expected is None or expected.cached_tokens != band.most_tokens:
        return None
    return expected if band.has_room(expected) else None


def prefix_holder(band: TieBand) -> Candidate | None:
    """Return that one of the deepest holders that can begin first, if they hold half of the prompt."""
    able = band.able()
    deepest = max([c.cached_tokens for c in able])
    if not deepest or deepest < able[0].cached_tokens + able[0].uncached_tokens - deepest:
        return None
    return _soonest([c for c in able if c.cached_tokens == deepest], band.market.preferred_replicas)


def hash_ring(band: TieBand) -> Candidate | None:
    """Return the less loaded of two places of the consistent-hash ring, so that several routers agree."""
    return _least(band.able()[:RING_CHOICES])


TIE_BREAKERS: tuple[tuple[str, TieBreaker], ...] = (
    ("last_replica", last_replica),
    ("predicted_replica", predicted_replica),
    ("prefix_holder", prefix_holder),
    ("hash_ring", hash_ring),
)
"""Name, as decisions report it, and rule; in their order."""


def by_ring(market: PlacementContext, some: dict[str, Candidate], ring: Ring) -> list[Candidate]:
    """Return the candidates in `some`, the nearest to the ring key first."""
    return [some[id_] for id_ in market.ring_order or ring.walk(market.ring_key, some) if id_ in some]


def _least(candidates: list[Candidate]) -> Candidate:
    """Return the least loaded candidate; of several the cheapest, and of several such the first."""
    least, *others = candidates
    for c in others:
        if c.in_flight < least.in_flight or (c.in_flight == least.in_flight and c.price_ms < least.price_ms):
            least = c
    return least


def _soonest(holders: list[Candidate], own: Collection[str]) -> Candidate:
    """Return the candidate with the shortest wait, including loads, among several that hold the same; of equals the
    least loaded.

    No cached block is at stake between them, so every wait counts, however short: most of the open leases decode and do
    not delay a prefill. With several routers, the router's `own` replicas precede others that have up to SPREAD streams
    less.
    """
    soonest, *others = holders
    least = [soonest]
    least_ms = soonest.wait_ms + soonest.loading_ms
    for c in others:
        waits_ms = c.wait_ms + c.loading_ms
        if waits_ms < least_ms:
            least, least_ms = [c], waits_ms
        elif waits_ms == least_ms:
            least.append(c)
    if own and len(least) > 1:
        most = min([c.in_flight for c in least]) + SPREAD
        least = [c for c in least if c.in_flight <= most and c.id in own] or least
    return _least(least)
