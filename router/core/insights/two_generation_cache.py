"""Memory with a strict bound, at the cost of a dict: a young generation and an old one.

A used entry is in the young generation, or is put there. When that is full it becomes the old one, and the old one is
dropped. So recently used entries are kept, without any order. Freeing a dict of a quarter of a million entries takes
ten milliseconds, so it is freed a few entries at a time, twice as fast as new ones come. All three dicts together never
have more entries than two full ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

V = TypeVar("V")

CHAIN_MAX = 4_096  # keys of one chain, 2 MB of text: storing more takes over a millisecond


class Generations(Generic[V]):
    """Block keys, or keys of whole prompts, with a value for each. If they are chains, every generation has each key's
    whole prefix, so the known length of a chain is found by bisection."""

    def __init__(self, entries_max: int) -> None:
        self._half = max(1, entries_max // 2)
        self._chain_max = max(1, min(CHAIN_MAX, self._half // 2))
        self.young: dict[int, V] = {}
        self.old: dict[int, V] = {}
        self._dying: dict[int, V] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old) + len(self._dying)

    def get(self, key: int) -> V | None:
        """Return the value of a key, None if it is unknown."""
        value = self.young.get(key)
        return self.old.get(key) if value is None else value

    def put(self, key: int, value: V) -> V | None:
        """Store a key that is in no chain. Returns its earlier value."""
        young = self.young
        before = young.get(key)
        if before is None:
            before = self.old.get(key)
            if len(young) >= self._half:
                self._age()
                young = self.young
        young[key] = value
        if self._dying:
            self._sweep(2)
        return before

    def drop(self, key: int, value: V) -> None:
        """Drop a key if it has this value. For a key in a chain, the caller must drop all later keys of the chain,
        too."""
        if self.get(key) == value:
            self.young.pop(key, None)
            self.old.pop(key, None)

    def depths(self, keys: Sequence[int], guess: int = 0) -> tuple[int, int]:
        """Count the known leading keys: of the young generation, and of either. A correct `guess` saves the search."""
        young, count = self.young, len(keys)
        if not (0 < guess <= count and keys[guess - 1] in young and (guess == count or keys[guess] not in young)):
            guess = depth(young, keys)
        if guess == count or keys[guess] not in self.old:  # the match does not extend into the old generation
            return guess, guess
        return guess, depth(self.old, keys)

    def put_chain(self, keys: Sequence[int], young: int, kept: int, value: V) -> None:
        """Store a chain of which the young generation has `young` leading keys. Keys after the first `kept` get the new
        value. Of a chain that is too long only the beginning is stored."""
        if len(keys) > self._chain_max:
            keys = keys[: self._chain_max]
        count = len(keys)
        if count <= young and count <= kept:
            return
        ages = len(self.young) + count - young > self._half
        if young >= kept and not ages:  # nearly always
            remembered = self.young
            for key in keys[kept:]:  # takes two thirds of the time of `update(dict.fromkeys(...))`
                remembered[key] = value
            if self._dying:
                self._sweep(2 * (count - kept))
            return
        begin = 0 if ages else young
        if begin < kept:
            between, known = keys[begin:kept], self.get
            values = [value if (old := known(key)) is None else old for key in between]
        if ages:
            self._age()
        if begin < kept:
            self.young.update(zip(between, values, strict=True))
        self.young.update(dict.fromkeys(keys[kept:], value))
        if self._dying:
            self._sweep(2 * (count - min(begin, kept)))

    def _age(self) -> None:
        self._dying, self.old, self.young = self.old, self.young, {}

    def _sweep(self, count: int) -> None:
        drop = self._dying.popitem
        for _ in range(min(count, len(self._dying))):
            drop()


def depth(known: dict[int, V], keys: Sequence[int]) -> int:
    """Count the known leading keys. The search starts at the end: most keys of a conversation's next turn are known."""
    at = len(keys) - 1
    if at < 0 or keys[0] not in known:
        return 0
    if keys[at] in known:
        return at + 1
    high, step = at, 1
    at -= 1
    while at > 0 and keys[at] not in known:
        high, step = at, step + step
        at -= step
    low = max(at, 0)
    while high - low > 1:
        middle = (low + high) >> 1
        if keys[middle] in known:
            low = middle
        else:
            high = middle
    return high
