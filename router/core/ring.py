"""The consistent-hash ring: which replica a key prefers, the same on every router, whatever else they know.

uhashring does the hashing; this adds bounded load (Mirrokni, Thorup & Zadimoghaddam 2018): from the key's place on,
candidates at or over the bound, BOUND x the mean, are passed by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VNODES = 160
BOUND = 1.25


def under_bound(loads: Mapping[str, float], more: float) -> set[str]:
    """Ids whose load is under BOUND x the mean load, what is about to be added (`more`) included."""
    bound = ceil(BOUND * (sum(loads.values()) + more) / max(1, len(loads)))
    return {id_ for id_, load in loads.items() if load < bound}


class Ring:
    """A ring over every id seen lately; ids that are not candidates are walked past."""

    def __init__(self) -> None:
        self._ring = _new_ring([])
        self._known: frozenset[str] = frozenset()

    def walk(self, key: str, ids: Collection[str]) -> list[str]:
        """All of `ids`, in the order in which they follow `key` on the ring."""
        self._learn(ids)
        return [id_ for id_ in self._ring.iterate_nodes(key) if id_ in ids]

    def pick(self, key: str, ids: Collection[str], under: Collection[str]) -> str:
        """First of `ids` behind `key` that is `under` the bound; when none is, the first. Raises ValueError when there
        are no ids."""
        order = self.walk(key, ids)
        if not order:
            raise ValueError("no candidates")
        return next((id_ for id_ in order if id_ in under), order[0])

    def _learn(self, ids: Collection[str]) -> None:
        if self._known.issuperset(ids):
            return
        wanted = frozenset(ids)
        # Pods come and go under new names: when most of what is known has left, start afresh.
        self._known = wanted if len(self._known - wanted) > len(wanted) + 16 else self._known | wanted
        self._ring = _new_ring(sorted(self._known))


def _new_ring(ids: list[str]) -> HashRing:
    return HashRing(nodes=ids, vnodes=VNODES, hash_fn=_hash)


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode(errors="surrogatepass"))
