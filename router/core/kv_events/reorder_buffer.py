"""Batches known to a KvStream (stream.py): live ones that wait, and applied ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import xxhash


def digest_of(payload: bytes) -> int:
    """Return a hash that identifies a batch. A forged hash is no risk: only the publisher could send one."""
    return xxhash.xxh3_128_intdigest(payload)


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """A live batch. `no` counts arrivals from 1; 0 is a batch with only a number and a digest."""

    no: int
    seq: int
    payload: bytes
    digest: int


@dataclass(slots=True)
class ReorderBuffer:
    """Live batches that wait, in order. A replay requested at the mark must contain every batch that arrived before
    it."""

    batches_max: int
    bytes_max: int
    contradicted: bool = False  # a batch arrived, or was dropped, that the replay should contain
    overflowed: bool = False  # a batch was dropped at the limit since the queue was last empty
    missing: BufferedBatch | None = None  # the highest-numbered live batch that the replay lacks
    _queue: deque[BufferedBatch] = field(default_factory=deque)
    _bytes: int = 0
    _count: int = 0
    _mark: int = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def older(self) -> bool:
        """True if the next batch is older than the mark."""
        return bool(self._queue) and self._queue[0].no <= self._mark

    def add(self, seq: int, payload: bytes) -> bool:
        """Queue a batch. Returns False if the queue is full; the next replay must then contain the batch."""
        if len(self._queue) >= self.batches_max or self._bytes + len(payload) > self.bytes_max:
            self.contradicted = self.overflowed = True
            return False
        self._count += 1
        self._bytes += len(payload)
        self._queue.append(BufferedBatch(self._count, seq, payload, digest_of(payload)))
        return True

    def expect(self, seq: int, digest: int) -> None:
        """Require this batch in the next replay too."""
        if seq >= 0:
            self._queue.appendleft(BufferedBatch(0, seq, b"", digest))

    def pop(self) -> BufferedBatch:
        """Return and remove the next batch; there must be one."""
        arrival = self._queue.popleft()
        self._bytes -= len(arrival.payload)
        return arrival

    def put_back(self, arrival: BufferedBatch) -> None:
        """Return a popped batch to the head of the queue."""
        self._queue.appendleft(arrival)
        self._bytes += len(arrival.payload)

    def miss(self, arrival: BufferedBatch) -> None:
        """Record a batch that the replay should contain and does not."""
        self.contradicted = True
        if self.missing is None or arrival.seq > self.missing.seq:
            self.missing = arrival

    def meets(self, seq: int) -> bool:
        """True if the first batch after the mark directly follows batch `seq`, or has a number not above it."""
        behind = next((arrival for arrival in self._queue if arrival.no > self._mark), None)
        return behind is not None and behind.seq <= seq + 1

    def mark(self) -> None:
        """Record that a replay is requested, which must contain every earlier batch."""
        self._mark, self.contradicted = self._count, False

    def unmark(self) -> None:
        """Record that no replay is running: waiting batches are applied without a check against one."""
        self._mark = 0
        if self._queue and not self._queue[0].no:
            self._queue.popleft()

    def clear(self) -> None:
        """Drop all waiting batches."""
        self._queue.clear()
        self._bytes, self.contradicted, self.missing, self.overflowed = 0, False, None, False


@dataclass(slots=True)
class AppliedBatches:
    """Applied batches: the last one, and the digests of the last `batches_max`."""

    batches_max: int
    seq: int = -1  # number of the last applied batch; -1: no batch yet
    digest: int = 0
    _digests: dict[int, int] = field(default_factory=dict)

    def add(self, seq: int, digest: int) -> None:
        """Record an applied batch."""
        self.seq, self.digest = seq, digest
        self._digests[seq] = digest
        if len(self._digests) > self.batches_max:
            del self._digests[next(iter(self._digests))]

    def same(self, seq: int, digest: int) -> bool | None:
        """Return True if the batch with this number had this digest; None if its digest is unknown."""
        known = self._digests.get(seq)
        return None if known is None else known == digest

    def forget(self) -> None:
        """Forget all applied batches."""
        self.seq = -1
        self._digests.clear()
