"""The consistent-hash ring: which replica a key prefers, the same on every router, whatever else they know.

Theory: every id has VNODES points on a circle of 64-bit numbers, which depend on its name alone (uhashring says which
ones, for one id as for many), and a key prefers the ids in the order in which their points follow its own hash. So an
id that joins takes keys for itself and moves none between others, and routers agree whatever the order in which they
heard of the ids. The circle is one sorted array: an id that joins is merged into it, and one that leaves is cut out, in
slices between its own points; nothing else is hashed or sorted again. It is an array and not a list because 160,000
numbers are copied for each change, which is a millisecond where each is an object with a count of references, and a
tenth of that where it is none. The order that follows a point is remembered until the circle changes.

Bounded load (Mirrokni, Thorup & Zadimoghaddam 2018) is on top: from the key's place on, candidates at or over the
bound, BOUND x the mean, are passed by.
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
ORDERS_MAX = 4_096  # places on the ring whose order of ids is remembered
JOINED_MAX = 16  # ids that may join, and an eighth of those known, before it is asked which of the others have left


def load_bound(total: float, count: int) -> int:
    """BOUND x the mean load of so many, of which `total` includes what is about to be added."""
    return ceil(BOUND * total / count)


def under_bound(loads: Mapping[str, float], more: float) -> set[str]:
    """Ids whose load is under BOUND x the mean load, what is about to be added (`more`) included."""
    bound = load_bound(sum(loads.values()) + more, max(1, len(loads)))
    return {id_ for id_, load in loads.items() if load < bound}


class Ring:
    """A ring over every id seen lately; ids that are not candidates are walked past.

    Nobody says which ids have left for good, and a walk may ask for a few of those that are there. So what is known is
    looked through once enough ids have joined since the last time: whoever was in no walk meanwhile is let go, a few
    with each walk. One that was only not asked for joins again, at the same points.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # id -> its number, which is its place in `_names`
        self._names: list[str] = []
        self._free: list[int] = []  # numbers that nobody has
        self._points = array("Q")  # points of all known ids, ascending
        self._owners = array("L")  # number of the id that each point belongs to
        self._changes = 0  # counts changes of the circle
        self._orders: dict[int, tuple[int, list[str]]] = {}  # point -> (number of the circle's change, ids in order)
        self._joined = 0  # ids that joined since all known ids were checked
        self._wanted: set[str] = set()  # ids that walks asked for since that check
        self._leaving: set[str] = set()

    def walk(self, key: str, ids: Collection[str]) -> list[str]:
        """All of `ids`, in the order in which they follow `key` on the ring. Not to be changed."""
        # A list would be searched once for every id that is known.
        asked: AbstractSet[str] = ids if isinstance(ids, set) else ids.keys() if isinstance(ids, dict) else set(ids)
        if not self._known.keys() >= asked:
            self._learn(asked)
        elif self._leaving:
            self._let_go(1, asked)
        if not self._points:
            return []
        order = self._order(bisect(self._points, _hash(key)) % len(self._points))
        if len(asked) == len(order):
            self._joined = 0  # all known ids are still there
            self._wanted.clear()
            return order
        if self._joined:
            self._wanted.update(asked)
        return [id_ for id_ in order if id_ in asked]

    def pick(self, key: str, ids: Collection[str], under: Collection[str]) -> str:
        """First of `ids` behind `key` that is `under` the bound; when none is, the first. Raises ValueError when there
        are no ids."""
        order = self.walk(key, ids)
        if not order:
            raise ValueError("no candidates")
        return next((id_ for id_ in order if id_ in under), order[0])

    def _learn(self, ids: AbstractSet[str]) -> None:
        """Merge the points of those that are new into the circle."""
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
                end += 1  # two ids at one point stand in the same order everywhere
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
        """Cut so many of those that are leaving out of the circle; whoever is asked for again now stays."""
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
        """All ids as they follow a point, behind the last the first; as uhashring's `iterate_nodes`, which takes a
        hundred times as long."""
        known = self._orders.get(point)
        if known is not None and known[0] == self._changes:
            return known[1]
        # A stretch in which most of them are found, and again: in C, since thousands of points may be passed.
        order, begin, stretch = dict[int, None](), point, 4 * len(self._known)
        while len(order) < len(self._known):
            order.update(dict.fromkeys(self._owners[begin : begin + stretch]))
            begin = begin + stretch if begin + stretch < len(self._owners) else 0
        if known is None and len(self._orders) >= ORDERS_MAX:
            del self._orders[next(iter(self._orders))]  # only one: to free all would take milliseconds
        self._orders[point] = self._changes, [self._names[number] for number in order]
        return self._orders[point][1]


def _put_in(known: array[int], cuts: list[int], fresh: array[int]) -> None:
    """One of `fresh` at each cut but the first and the last, which are the ends. In place, from the end on: each number
    is moved once, and no megabytes are asked for whose pages have to be mapped first."""
    known.extend(fresh)
    with memoryview(known) as view:
        for n in range(len(fresh) - 1, -1, -1):
            begin, end = cuts[n + 1], cuts[n + 2]
            view[begin + n + 1 : end + n + 1] = view[begin:end]
            view[begin + n] = fresh[n]


def _cut_out(known: array[int], cuts: list[int]) -> None:
    """What stands at each cut goes; the first and the last one are the ends."""
    with memoryview(known) as view:
        for n, (begin, end) in enumerate(pairwise(cuts[1:])):
            view[begin - n : end - n - 1] = view[begin + 1 : end]
    del known[len(known) - (len(cuts) - 2) :]


def _points_of(id_: str) -> list[int]:
    return [point for point, _ in HashRing(nodes=[id_], vnodes=VNODES, hash_fn=_hash).get_points()]


def _hash(key: str) -> int:
    return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
