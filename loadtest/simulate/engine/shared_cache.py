"""One cache for all replicas, without a limit and without transfer time: each replica finds every computed block.

No such cache exists. It bounds the savings of placement and caches together. A prefix that is found costs no compute,
no time to fetch and no space, and running requests take no space either. With limited space, a replica would have to
hold every prefix that is live on any replica, and rows that keep each prefix on one replica would pass the bound. So
only compute is left.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from loadtest.fake_engine.kv_pool import KvPool


def known_depth(keys: Sequence[int], known: Container[int]) -> int:
    """Return the number of leading blocks of `keys` that are known, by bisection: a block is known only with all before
    it."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


class SharedPool(KvPool):
    """The KV cache of one replica, without a limit. `shared` are the keys of all blocks that were ever computed. Blocks
    have no numbers, because none is ever taken from another request, and they have no events."""

    def __init__(self, blocks_n: int, shared: set[int]) -> None:
        super().__init__(blocks_n)
        self._all = shared

    @property
    def free_n(self) -> int:
        """All blocks are free, always."""
        return self.blocks_n

    @property
    def held_n(self) -> int:
        """A whole cache: the blocks that requests share are unknown here, and requests read at most a whole cache from
        memory."""
        return self.blocks_n

    def match(self, keys: Sequence[int], blocks_max: int) -> list[int]:
        """Return no blocks: cached blocks are reached (`reach`), not held."""
        return []

    def reach(self, keys: Sequence[int], blocks_max: int, matched: int) -> int:
        """Return the number of leading blocks that any replica has; from now on the rest counts as there too."""
        depth = known_depth(keys[:blocks_max], self._all)
        self._all.update(keys[depth:blocks_max])
        return depth

    def fits(self, matched: Sequence[int], blocks_n: int) -> bool:
        """True: every request fits."""
        return True

    def take(self, blocks_n: int) -> list[int]:
        """Take blocks, which are all alike."""
        return [0] * blocks_n

    def release(self, blocks: Sequence[int]) -> None:
        """Do nothing: no request waits for blocks."""

    def store(self, tag: object, keys: Sequence[int], blocks: Sequence[int], start: int, end: int) -> None:
        """Store blocks, which all replicas find."""
        self._all.update(keys[start:end])
