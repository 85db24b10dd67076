"""One cache for all replicas, without a limit and without a way to it: whatever any of them computed, each finds.

No such thing exists; it bounds what placement and caches together can save. A prefix that is found costs no compute,
no time to fetch and no room, and what runs takes no room either: with room, a replica would have to hold every prefix
that is live anywhere, and rows that keep each prefix in one place would pass the bound. So only compute is left.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from loadtest.engine.kv_pool import KvPool


def known_depth(keys: Sequence[int], known: Container[int]) -> int:
    """Leading blocks of `keys` that are known; by bisection, as nothing is known without all that is before it."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


class SharedPool(KvPool):
    """The KV cache of one replica, as large as it has to be: `shared` are the keys of all blocks that were ever
    computed. Blocks have no numbers, since none is ever taken from another, and there are no events of them."""

    def __init__(self, blocks_n: int, shared: set[int]) -> None:
        super().__init__(blocks_n)
        self._all = shared

    @property
    def free_n(self) -> int:
        """All blocks are free, always."""
        return self.blocks_n

    @property
    def held_n(self) -> int:
        """A whole cache: what requests share is not known here, and they read no more from memory than one holds."""
        return self.blocks_n

    def match(self, keys: Sequence[int], blocks_max: int) -> list[int]:
        """No blocks: what is cached is reached (`reach`), not held."""
        return []

    def reach(self, keys: Sequence[int], blocks_max: int, matched: int) -> int:
        """The number of leading blocks that any replica has; from now on the rest counts as there too."""
        depth = known_depth(keys[:blocks_max], self._all)
        self._all.update(keys[depth:blocks_max])
        return depth

    def fits(self, matched: Sequence[int], blocks_n: int) -> bool:
        """Every request fits."""
        return True

    def take(self, blocks_n: int) -> list[int]:
        """Take blocks, which are all alike."""
        return [0] * blocks_n

    def release(self, blocks: Sequence[int]) -> None:
        """Nothing: no request waits for blocks."""

    def store(self, tag: object, keys: Sequence[int], blocks: Sequence[int], start: int, end: int) -> None:
        """Store blocks, which all replicas find."""
        self._all.update(keys[start:end])
