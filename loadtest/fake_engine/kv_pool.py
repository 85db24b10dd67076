"""KV cache of one engine: fixed blocks, shared by content, evicted least recently used first.

As in vLLM V1, a block has a reference count, and has a key once it is full. Blocks without references wait in a free
queue, including cached ones. Taking a block from the front of that queue evicts its content. A prefix hit before that
removes the block from the middle of the queue. A sequence releases its last block first, so a prefix outlives its
continuations. Two sequences that compute the same block at the same time hold two copies of one key.

Blocks are allocated and released in thousands, so the free queue consists of batches. A batch contains the blocks that
were released together. A block that is hit again stays in the list of its batch and is skipped there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence that became full; `first_block` is the index of the first one."""

    tag: object
    """The tag of the request that the blocks were computed for."""
    first_block: int
    keys: Sequence[int]
    parent: int | None
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each of these blocks was evicted, in this order."""

    keys: Sequence[int]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was emptied."""


KvEvent = BlockStored | BlocksRemoved | AllBlocksCleared


class _Batch:
    """Blocks released together; the last one of the list is evicted first."""

    __slots__ = ("blocks", "free_n")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.free_n = len(blocks)  # the other blocks were hit again


class KvPool:
    """Pool of blocks. Blocks are numbers below `blocks_n`; a key is any int that identifies a whole prefix."""

    def __init__(self, blocks_n: int, *, record_events: bool = False) -> None:
        if blocks_n < 1:
            raise ValueError("the KV cache holds not even one block")
        self.blocks_n = blocks_n
        self.evicted_blocks = 0
        self._record = record_events
        self._events: list[KvEvent] = []
        self._shared: dict[int, int] = {}  # block -> references beyond the first
        self._keys: dict[int, int] = {}  # block number -> key, for blocks that were full
        never_used = _Batch(list(reversed(range(blocks_n))))
        self._free: dict[int, _Batch] = dict.fromkeys(never_used.blocks, never_used)
        self._queue = deque([never_used])
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}

    @property
    def free_n(self) -> int:
        """Blocks that no live request uses, cached or not."""
        return len(self._free)

    @property
    def held_n(self) -> int:
        """Blocks that live requests use; a shared block counts once."""
        return self.blocks_n - self.free_n

    @property
    def cached(self) -> Container[int]:
        """Keys that a lookup would find. Read-only."""
        return self._cached

    def to_evict(self) -> Iterator[int]:
        """Yield the keys of blocks that no live request uses, in order of eviction; -1 for an empty block."""
        free, keys = self._free, self._keys
        for batch in self._queue:
            for block in reversed(batch.blocks):
                if free.get(block) is batch:
                    yield keys.get(block, -1)

    def match(self, keys: Sequence[int], blocks_max: int) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `blocks_max`, without taking them."""
        look_up = map(self._cached.get, islice(keys, blocks_max))
        return list(iter(look_up.__next__, None))  # blocks up to the first that is not cached

    def reach(self, keys: Sequence[int], blocks_max: int, matched: int) -> int:
        """Return the number of leading blocks that need no computation; `matched` of them are here."""
        return matched

    def fits(self, matched: Sequence[int], blocks_n: int) -> bool:
        """True if `blocks_n` blocks can be taken in addition to the matched ones, which may be in the free queue."""
        free = self._free
        if blocks_n + len(matched) <= len(free):
            return True
        return blocks_n + sum(map(free.__contains__, matched)) <= len(free)

    def share(self, matched: Sequence[int]) -> None:
        """Add a reference to each block."""
        batches = list(map(self._free.pop, matched, repeat(None)))
        shared = self._shared
        for batch, count in Counter(batches).items():
            if batch is not None:
                self._found_again(batch, count)
                continue
            for block, of in zip(matched, batches, strict=True):
                if of is None:
                    shared[block] = shared.get(block, 0) + 1

    def take(self, blocks_n: int) -> list[int]:
        """Take the least recently used free blocks and evict their content. The caller must check that enough exist."""
        queue, free, taken = self._queue, self._free, list[int]()
        while (missing := blocks_n - len(taken)) > 0:
            batch = queue[0]
            if batch.free_n < len(batch.blocks):
                self._compact(batch)  # the batch may be empty after this
            blocks = batch.blocks
            taken += blocks[: -missing - 1 : -1]
            if missing < len(blocks):
                del blocks[-missing:]
                batch.free_n = len(blocks)
            else:
                queue.popleft()
        for block in taken:
            del free[block]
        self._evict(taken, list(map(self._keys.pop, taken, repeat(None))))
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block, the last block first."""
        shared = self._shared
        if shared and (kept := shared.keys() & blocks):
            blocks = [block for block in blocks if block not in kept]
            for block in kept:
                more = shared.pop(block)
                if more > 1:
                    shared[block] = more - 1
        if blocks:
            batch = _Batch(list(blocks))
            self._free.update(zip(blocks, repeat(batch)))
            self._queue.append(batch)

    def store(self, tag: object, keys: Sequence[int], blocks: Sequence[int], start: int, end: int) -> None:
        """Mark blocks `start` to `end` of a sequence as full; other requests can now match them by their keys."""
        cached, of_block, keys_stored = self._cached, self._keys, keys[start:end]
        known = cached.setdefault
        for key, block in zip(keys_stored, blocks[start:end], strict=True):
            of_block[block] = key
            if known(key, block) != block:
                self._copies.setdefault(key, []).append(block)
        if self._record and keys_stored:
            parent = keys[start - 1] if start else None
            self._events.append(BlockStored(tag, start, keys_stored, parent))

    def clear(self) -> bool:
        """Drop every cached block. Returns False, and drops none, if any is in use, as vLLM does."""
        if len(self._free) < self.blocks_n:
            return False
        self._cached.clear()
        self._copies.clear()
        self._keys.clear()
        if self._record:
            self._events.append(AllBlocksCleared())
        return True

    def tell(self, event: KvEvent) -> None:
        """Record an event of blocks in a lower tier."""
        if self._record:
            self._events.append(event)

    def drain_events(self) -> list[KvEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _found_again(self, batch: _Batch, blocks_n: int) -> None:
        """Subtract `blocks_n` from the free blocks of a batch. Its list is never longer than twice its free blocks."""
        batch.free_n -= blocks_n
        if 2 * batch.free_n < len(batch.blocks):
            self._compact(batch)

    def _compact(self, batch: _Batch) -> None:
        of = self._free.get
        batch.blocks = [block for block in batch.blocks if of(block) is batch]

    def _evict(self, taken: Sequence[int], keys: list[int | None]) -> None:
        """Remove the contents of these blocks from the cache, unless another copy exists."""
        cached, copies = self._cached, self._copies
        for block, key in zip(taken, keys, strict=True):
            if key is None:
                continue
            others = copies.get(key) if copies else None
            if others is None:
                del cached[key]
                continue
            if cached[key] == block:
                cached[key] = others.pop(0)
            else:
                others.remove(block)
            if not others:
                del copies[key]
        gone = [key for key in keys if key is not None]
        self.evicted_blocks += len(gone)
        if self._record and gone:
            self._events.append(BlocksRemoved(gone))
