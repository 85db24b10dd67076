"""The consistent-hash ring: the replicas that a key prefers, the same on every router.

Theory: every id has VNODES points on a circle of 64-bit numbers. The points depend on its name alone (uhashring
computes them, the same for one id as for many). A key prefers the ids in the order in which their points follow its own
hash. So an id that joins takes keys for itself and moves none between others. Routers agree regardless of the order in
which they learned the ids.

The circle is one sorted array. An id that joins is merged into it, and one that leaves is cut out, in slices between
its own points; no other id is hashed or sorted again. It is an array and not a list because each change copies 160,000
numbers. That takes a millisecond for reference-counted objects, and a tenth of that for plain numbers. The order that
follows a point is cached until the circle changes.

Bounded load (Mirrokni, Thorup & Zadimoghaddam 2018) is on top: starting at the key's place, candidates at or over the
bound are skipped. The bound is BOUND x the mean.
"""

from __future__ import annotations

from array import array
from bisect import bisect, bisect_left
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from math import ceil

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

VNODES = 160
BOUND = 1.25
ORDERS_MAX = 4_096  # places on the ring with a cached order of ids
# Minimum number of new ids, to which an eighth of the known ids is added, before a check for ids that have left.
JOINED_MAX = 16


def load_bound(total: float, count: int) -> int:
    """Return BOUND x the mean load of `count` replicas; `total` includes the load that is about to be added."""
    return ceil(BOUND * total / count)


def under_bound(loads: Mapping[str, float], more: float) -> set[str]:
    """Return the ids with a load under BOUND x the mean load. The mean includes the load that is about to be added
    (`more`)."""
    bound = load_bound(sum(loads.values()) + more, max(1, len(loads)))
    return {id_ for id_, load in loads.items() if load < bound}


class Ring:
    """A ring over every id seen recently; ids that are not candidates are skipped.

    The ring is not notified of ids that left for good, and a walk may request only a few of the existing ids. So known
    ids are checked once enough ids have joined since the last check. Ids that appeared in no walk since then are
    removed, a few with each walk. An id that was removed by mistake joins again, at the same points.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # id -> its number, which is its index in `_names`
        self._names: list[str] = []
        self._free: list[int] = []  # unused numbers
        self._points = array("Q")  # points of all known ids, ascending
        self._owners = array("L")  # number of the id that each point belongs to
        self._changes = 0  # number of changes of the circle
        self._orders: dict[int, tuple[int, list[str]]] = {}  # point -> (number of the circle's change, ids in order)
        self._joined = 0  # ids that joined since all known ids were checked
        self._wanted: set[str] = set()  # ids that walks requested since that check
        self._leaving: set[str] = set()

    def walk(self, key: str, ids: Collection[str]) -> list[str]:
        """Return all of `ids`, in the order in which they follow `key` on the ring. The list must not be modified."""
        # A list would be searched once for every known id.
        asked: AbstractSet[str] = ids if isinstance(ids, set) else ids.keys() if isinstance(ids, dict) else set(ids)
        if not self._known.keys() >= asked:
            self._learn(asked)
        elif self._leaving:
            self._let_go(1, asked)
        if not self._points:
            return []
        order = self._order(bisect(self._points, _hash(key)) % len(self._points))
        if len(asked) == len(order):
            self._joined = 0  # all known ids still exist
            self._wanted.clear()
            return order
        if self._joined:
            self._wanted.update(asked)
        return [id_ for id_ in order if id_ in asked]

    def pick(self, key: str, ids: Collection[str], under: Collection[str]) -> str:
        """Return the first of `ids` after `key` that is `under` the bound, or the first one if there is none. Raises
        ValueError if there are no ids."""
        order = self.walk(key, ids)
        if not order:
            raise ValueError("no candidates")
        return next((id_ for id_ in order if id_ in under), order[0])

    def _learn(self, ids: AbstractSet[str]) -> None:
        """Merge the points of new ids into the circle."""
        news = sorted(ids - self._known.keys())
        for id_ in news:
            if self._free:
                self._known[id_] = self._free.pop()
                self._names[self._known[id_]] = id_
            else:
                self._known[id_] = len(self._names)
                self._names.append(id_)
        fresh = sorted((point, id_) for id_ in news for point in _points_of(id_))
        cuts, end, last = [0], 0, len(self._points)
        for point, id_ in fresh:
            end = bisect_left(self._points, point, end)
            while end < last and self._points[end] == point and self._names[self._owners[end]] < id_:
                end += 1  # two ids at one point have the same order everywhere
            cuts.append(end)
        cuts.append(last)
        _put_in(self._points, cuts, array("Q", [point for point, _ in fresh]))
        _put_in(self._owners, cuts, array("L", [self._known[id_] for _, id_ in fresh]))
        self._changes += 1
        self._wanted.update(ids)
        self._joined += len(news)
        if self._joined > JOINED_MAX + len(self._known) // 8:
            self._leaving = self._known.keys() - self._wanted
            self._joined, self._wanted = 0, set()
        if self._leaving:
            self._let_go(2 * len(news), ids)

    def _let_go(self, count: int, ids: AbstractSet[str]) -> None:
        """Cut at most `count` of the leaving ids out of the circle. A leaving id that is in `ids` stays."""
        gone = {self._leaving.pop() for _ in range(min(count, len(self._leaving)))}.difference(ids)
        if not gone:
            return
        cuts, end = [0], 0
        for point, id_ in sorted((point, each) for each in gone for point in _points_of(each)):
            end = bisect_left(self._points, point, end)
            while self._owners[end] != self._known[id_]:
                end += 1
            cuts.append(end)
        cuts.append(len(self._points))
        _cut_out(self._points, cuts)
        _cut_out(self._owners, cuts)
        self._free += [self._known.pop(id_) for id_ in gone]
        self._changes += 1

    def _order(self, point: int) -> list[str]:
        """Return all ids in the order in which they follow a point, with wrap-around. The order is that of uhashring's
        `iterate_nodes`, which takes a hundred times as long."""
        known = self._orders.get(point)
        if known is not None and known[0] == self._changes:
            return known[1]
        # Take a slice that contains most of them, and repeat: in C, because thousands of points may be skipped.
        order, begin, stretch = dict[int, None](), point, 4 * len(self._known)
        while len(order) < len(self._known):
            order.update(dict.fromkeys(self._owners[begin : begin + stretch]))
            begin = begin + stretch if begin + stretch < len(self._owners) else 0
        if known is None and len(self._orders) >= ORDERS_MAX:
            del self._orders[next(iter(self._orders))]  # only one: clearing all would take milliseconds
        self._orders[point] = self._changes, [self._names[number] for number in order]
        return self._orders[point][1]


def _put_in(known: array[int], cuts: list[int], fresh: array[int]) -> None:
    """Insert one of `fresh` at each cut except the first and the last, which are the ends.

    This works in place from the end, so each number is moved once. No megabytes are allocated with pages that must
    first be mapped.
    """
    known.extend(fresh)
    with memoryview(known) as view:
        for n in range(len(fresh) - 1, -1, -1):
            begin, end = cuts[n + 1], cuts[n + 2]
            view[begin + n + 1 : end + n + 1] = view[begin:end]
            view[begin + n] = fresh[n]


def _cut_out(known: array[int], cuts: list[int]) -> None:
    """Remove the number at each cut; the first and the last cut are the ends."""
    with memoryview(known) as view:
        for n, (begin, end) in enumerate(pairwise(cuts[1:])):
            view[begin - n : end - n - 1] = view[begin + 1 : end]
    del known[len(known) - (len(cuts) - 2) :]


def _points_of(id_: str) -> list[int]:
    return [point for point, _ in HashRing(nodes=[id_], vnodes=VNODES, hash_fn=_hash).get_points()]


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
