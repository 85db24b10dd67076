"""The KV cache of one engine: fixed blocks, shared by content, evicted least recently used.

As in vLLM V1: a block has a reference count, and a key once it is full. Blocks without references wait in a
free queue, cached ones too; taking a block from the front of that queue is what evicts its content, and
finding its key again before that takes it out of the middle. A sequence gives its blocks back last first, so
a prefix outlives its continuations. Two sequences that compute the same block at the same time hold two
copies of one key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence that are full now; `first_block` is the index of the first of
    them."""

    tag: object
    """The request's."""
    first_block: int
    keys: Sequence[int]
    parent: int | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of this block was evicted."""

    key: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvPool:
    """Blocks are numbers below `blocks_n`; keys are any ints that name a whole prefix."""

    def __init__(self, blocks_n: int, *, record_events: bool = False) -> None:
        if blocks_n < 1:
            raise ValueError("the KV cache holds not even one block")
        self.blocks_n = blocks_n
        self.evicted_blocks = 0
        self._record = record_events
        self._events: list[KvEvent] = []
        self._refs = [0] * blocks_n
        self._keys: list[int | None] = [None] * blocks_n
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks_n))
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}

    @property
    def free_n(self) -> int:
        """Blocks no live request uses, cached or not."""
        return len(self._free)

    def match(self, keys: Sequence[int], blocks_max: int) -> list[int]:
        """Blocks of the longest cached prefix, at most `blocks_max`; they are not taken yet."""
        found: list[int] = []
        cached = self._cached
        for key in keys[:blocks_max]:
            block = cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, matched: Sequence[int], blocks_n: int) -> bool:
        """Whether `blocks_n` can be taken on top of the matched ones (which may be in the free queue
        themselves)."""
        if blocks_n > len(self._free):
            return False
        refs = self._refs
        return blocks_n + sum(1 for block in matched if not refs[block]) <= len(self._free)

    def share(self, matched: Sequence[int]) -> None:
        """Take one more reference on each."""
        refs, free = self._refs, self._free
        for block in matched:
            if not refs[block]:
                del free[block]
            refs[block] += 1

    def take(self, blocks_n: int) -> list[int]:
        """The least recently used free blocks, their content evicted; the caller has checked that they
        exist."""
        refs, free, keys = self._refs, self._free, self._keys
        taken: list[int] = []
        for _ in range(blocks_n):
            block, _none = free.popitem(last=False)
            key = keys[block]
            if key is not None:
                self._forget(block, key)
            refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each, the last block first."""
        refs, free = self._refs, self._free
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None

    def store(self, tag: object, keys: Sequence[int], blocks: Sequence[int], start: int, end: int) -> None:
        """Blocks `start` to `end` of a sequence are full: from now on others find them by their keys."""
        cached, of_block = self._cached, self._keys
        for index in range(start, end):
            key, block = keys[index], blocks[index]
            of_block[block] = key
            if cached.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)
        if self._record and start < end:
            parent = keys[start - 1] if start else None
            self._events.append(BlockStored(tag, start, keys[start:end], parent))

    def clear(self) -> bool:
        """Forget every cached block; refused (False) while any is in use, as vLLM does."""
        if len(self._free) < self.blocks_n:
            return False
        self._cached.clear()
        self._copies.clear()
        self._keys = [None] * self.blocks_n
        if self._record:
            self._events.append(AllBlocksCleared())
        return True

    def drain_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int, key: int) -> None:
        self._keys[block] = None
        self.evicted_blocks += 1
        others = self._copies.get(key)
        if others is None:
            del self._cached[key]
        elif self._cached[key] == block:
            self._cached[key] = others.pop(0)
        else:
            others.remove(block)
        if others is not None and not others:
            del self._copies[key]
        if self._record:
            self._events.append(BlockRemoved(key))
