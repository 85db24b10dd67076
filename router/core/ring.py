"""The consistent-hash ring: which replica a key prefers, the same on every router, whatever else they know.

uhashring does the hashing; this adds the walk with bounded load (Mirrokni, Thorup & Zadimoghaddam 2018): from the
key's place on, the first candidate whose open leases are under BOUND x the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VNODES = 160
BOUND = 1.25


def load_bound(in_flight: int, replicas: int) -> int:
    """Open leases that a replica may have before the walk passes it by: BOUND x the mean, this request included."""
    return ceil(BOUND * (in_flight + 1) / max(1, replicas))


class Ring:
    """A ring over every id seen lately; ids that are not candidates are walked past."""

    def __init__(self) -> None:
        self._ring = _new_ring([])
        self._known: frozenset[str] = frozenset()

    def pick(self, key: str, in_flight: Mapping[str, int], bound: int) -> str:
        """First of the ids of `in_flight` (id -> open leases) behind `key` that is under `bound`.

        When all are at it, the first one. Raises ValueError when there are none.
        """
        self._learn(in_flight)
        first: str | None = None
        for id_ in self._ring.iterate_nodes(key):
            load = in_flight.get(id_)
            if load is None:
                continue
            if load < bound:
                return str(id_)
            first = first or str(id_)
        if first is None:
            raise ValueError("no candidates")
        return first

    def _learn(self, ids: Mapping[str, int]) -> None:
        if ids.keys() <= self._known:
            return
        departed = self._known - ids.keys()
        if len(departed) > len(ids) + 16:  # pods come and go under new names: start afresh
            self._known = frozenset(ids)
        else:
            self._known |= ids.keys()
        self._ring = _new_ring(sorted(self._known))


def _new_ring(ids: list[str]) -> HashRing:
    return HashRing(nodes=ids, vnodes=VNODES, hash_fn=_hash)


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode(errors="surrogatepass"))
