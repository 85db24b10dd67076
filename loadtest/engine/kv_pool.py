"""The KV cache of one engine: fixed blocks, shared by content, evicted least recently used.

As in vLLM V1: a block has a reference count, and a key once it is full. Blocks without references wait in a
free queue, cached ones too; taking a block from the front of that queue is what evicts its content, and
finding its key again before that takes it out of the middle. A sequence gives its blocks back last first, so
a prefix outlives its continuations. Two sequences that compute the same block at the same time hold two
copies of one key.

Blocks come and go by the thousand, so the free queue is one of batches, each what was given back at one time. A block
that is found again stays in its batch's list, where it is passed over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence that are full now; `first_block` is the index of the first of
    them."""

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
    """Blocks given back together; the last of the list is evicted first."""

    __slots__ = ("blocks", "free_n")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.free_n = len(blocks)  # the others were found again


class KvPool:
    """Blocks are numbers below `blocks_n`; keys are any ints that name a whole prefix."""

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
        """Blocks no live request uses, cached or not."""
        return len(self._free)

    @property
    def held_n(self) -> int:
        """Blocks that live requests use; those that several share count once."""
        return self.blocks_n - self.free_n

    @property
    def cached(self) -> Container[int]:
        """Keys that would be found. Not to be changed."""
        return self._cached

    def to_evict(self) -> Iterator[int]:
        """Keys of blocks no live request uses, in the order in which they would be evicted; -1 for an empty one."""
        free, keys = self._free, self._keys
        for batch in self._queue:
            for block in reversed(batch.blocks):
                if free.get(block) is batch:
                    yield keys.get(block, -1)

    def match(self, keys: Sequence[int], blocks_max: int) -> list[int]:
        """Blocks of the longest cached prefix, at most `blocks_max`; they are not taken yet."""
        look_up = map(self._cached.get, islice(keys, blocks_max))
        return list(iter(look_up.__next__, None))  # blocks up to the first that is not cached

    def reach(self, keys: Sequence[int], blocks_max: int, matched: int) -> int:
        """The number of leading blocks that need not be computed; `matched` of them are here."""
        return matched

    def fits(self, matched: Sequence[int], blocks_n: int) -> bool:
        """Whether `blocks_n` can be taken on top of the matched ones (which may be in the free queue
        themselves)."""
        free = self._free
        if blocks_n + len(matched) <= len(free):
            return True
        return blocks_n + sum(map(free.__contains__, matched)) <= len(free)

    def share(self, matched: Sequence[int]) -> None:
        """Take one more reference on each."""
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
        """The least recently used free blocks, their content evicted; the caller has checked that they
        exist."""
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
        """Give up one reference on each, the last block first."""
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
        """Blocks `start` to `end` of a sequence are full: from now on others find them by their keys."""
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
        """Forget every cached block; refused (False) while any is in use, as vLLM does."""
        if len(self._free) < self.blocks_n:
            return False
        self._cached.clear()
        self._copies.clear()
        self._keys.clear()
        if self._record:
            self._events.append(AllBlocksCleared())
        return True

    def tell(self, event: KvEvent) -> None:
        """Something happened to blocks behind the GPU."""
        if self._record:
            self._events.append(event)

    def drain_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _found_again(self, batch: _Batch, blocks_n: int) -> None:
        """Note that so many blocks of a batch are no longer free. Its list is never longer than twice its free
        blocks."""
        batch.free_n -= blocks_n
        if 2 * batch.free_n < len(batch.blocks):
            self._compact(batch)

    def _compact(self, batch: _Batch) -> None:
        of = self._free.get
        batch.blocks = [block for block in batch.blocks if of(block) is batch]

    def _evict(self, taken: Sequence[int], keys: list[int | None]) -> None:
        """What was in these blocks is found no more, unless another copy is."""
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
