"""The consistent-hash ring: which replica a key prefers, the same on every router, whatever else they know.

uhashring does the hashing; this adds bounded load (Mirrokni, Thorup & Zadimoghaddam 2018): from the key's place on,
candidates at or over the bound, BOUND x the mean, are passed by.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Mapping
from itertools import islice
from math import ceil

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VNODES = 160
BOUND = 1.25
ORDERS_MAX = 4_096  # places on the ring whose order of ids is remembered


def load_bound(total: float, count: int) -> int:
    """BOUND x the mean load of so many, of which `total` includes what is about to be added."""
    return ceil(BOUND * total / count)


def under_bound(loads: Mapping[str, float], more: float) -> set[str]:
    """Ids whose load is under BOUND x the mean load, what is about to be added (`more`) included."""
    bound = load_bound(sum(loads.values()) + more, max(1, len(loads)))
    return {id_ for id_, load in loads.items() if load < bound}


class Ring:
    """A ring over every id seen lately; ids that are not candidates are walked past."""

    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()
        self._points: list[int] = []  # ascending
        self._ids: list[str] = []  # of each point, twice over
        self._orders: dict[int, list[str]] = {}  # point -> all ids as they follow it

    def walk(self, key: str, ids: Collection[str]) -> list[str]:
        """All of `ids`, in the order in which they follow `key` on the ring."""
        if not self._known.issuperset(ids):
            self._learn(ids)
        point = bisect(self._points, _hash(key))
        order = self._orders.get(point) or self._order(point)
        return order if len(ids) == len(order) else [id_ for id_ in order if id_ in ids]

    def pick(self, key: str, ids: Collection[str], under: Collection[str]) -> str:
        """First of `ids` behind `key` that is `under` the bound; when none is, the first. Raises ValueError when there
        are no ids."""
        order = self.walk(key, ids)
        if not order:
            raise ValueError("no candidates")
        return next((id_ for id_ in order if id_ in under), order[0])

    def _learn(self, ids: Collection[str]) -> None:
        wanted = frozenset(ids)
        # Pods come and go under new names: when most of what is known has left, start afresh.
        self._known = wanted if len(self._known - wanted) > len(wanted) + 16 else self._known | wanted
        points = HashRing(nodes=sorted(self._known), vnodes=VNODES, hash_fn=_hash).get_points()
        self._points, self._ids = [point for point, _ in points], [id_ for _, id_ in points] * 2
        self._orders = {}

    def _order(self, point: int) -> list[str]:
        """All ids as they follow a point, behind the last the first; as uhashring's `iterate_nodes`, which takes ten
        times as long."""
        if len(self._orders) >= ORDERS_MAX:
            self._orders.clear()
        order: dict[str, None] = {}
        for id_ in islice(self._ids, point, point + len(self._points)):
            order[id_] = None
            if len(order) == len(self._known):
                break
        self._orders[point] = list(order)
        return self._orders[point]


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
