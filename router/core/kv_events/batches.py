"""What a KvStream (stream.py) remembers of batches: those that wait, and those that were applied."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import xxhash


def digest_of(payload: bytes) -> int:
    """Tells batches apart; nobody gains by forging one who could not publish it."""
    return xxhash.xxh3_128_intdigest(payload)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A live batch. `no` counts arrivals from 1; 0 is a batch of which only number and digest are known."""

    no: int
    seq: int
    payload: bytes
    digest: int


@dataclass(slots=True)
class Arrivals:
    """Live batches that wait, in order. The replay asked for at the mark must have every batch that came before it."""

    batches_max: int
    bytes_max: int
    contradicted: bool = False  # a batch came, or was dropped, that the replay should have had
    overflowed: bool = False  # a batch was dropped for want of room since the queue was last empty
    missing: Arrival | None = None  # the highest-numbered live batch that the replay lacks
    _queue: deque[Arrival] = field(default_factory=deque)
    _bytes: int = 0
    _count: int = 0
    _mark: int = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def older(self) -> bool:
        """Whether the next one is older than the mark."""
        return bool(self._queue) and self._queue[0].no <= self._mark

    def add(self, seq: int, payload: bytes) -> bool:
        """Queue a batch; False if there is no room, so that the next replay has to bring it."""
        if len(self._queue) >= self.batches_max or self._bytes + len(payload) > self.bytes_max:
            self.contradicted = self.overflowed = True
            return False
        self._count += 1
        self._bytes += len(payload)
        self._queue.append(Arrival(self._count, seq, payload, digest_of(payload)))
        return True

    def expect(self, seq: int, digest: int) -> None:
        """The next replay must have this batch as well."""
        if seq >= 0:
            self._queue.appendleft(Arrival(0, seq, b"", digest))

    def pop(self) -> Arrival:
        """The next one; there must be one."""
        arrival = self._queue.popleft()
        self._bytes -= len(arrival.payload)
        return arrival

    def put_back(self, arrival: Arrival) -> None:
        """Put a popped batch back at the head of the queue."""
        self._queue.appendleft(arrival)
        self._bytes += len(arrival.payload)

    def miss(self, arrival: Arrival) -> None:
        """Note a batch that the replay should have had."""
        self.contradicted = True
        if self.missing is None or arrival.seq > self.missing.seq:
            self.missing = arrival

    def meets(self, seq: int) -> bool:
        """Whether the first batch that came after the mark follows directly on batch `seq`, or is not above it."""
        behind = next((arrival for arrival in self._queue if arrival.no > self._mark), None)
        return behind is not None and behind.seq <= seq + 1

    def mark(self) -> None:
        """Note that a replay is asked for, which will have every batch that came before."""
        self._mark, self.contradicted = self._count, False

    def unmark(self) -> None:
        """Note that there is no replay: waiting batches are applied without one to check them against."""
        self._mark = 0
        if self._queue and not self._queue[0].no:
            self._queue.popleft()

    def clear(self) -> None:
        """Drop all waiting batches."""
        self._queue.clear()
        self._bytes, self.contradicted, self.missing, self.overflowed = 0, False, None, False


@dataclass(slots=True)
class History:
    """Applied batches: the last, and the digests of the last `batches_max`."""

    batches_max: int
    seq: int = -1  # number of the last applied batch; -1: none
    digest: int = 0
    _digests: dict[int, int] = field(default_factory=dict)

    def add(self, seq: int, digest: int) -> None:
        """Note that a batch was applied."""
        self.seq, self.digest = seq, digest
        self._digests[seq] = digest
        if len(self._digests) > self.batches_max:
            del self._digests[next(iter(self._digests))]

    def same(self, seq: int, digest: int) -> bool | None:
        """Whether the batch with this number was this one; None: not remembered."""
        known = self._digests.get(seq)
        return None if known is None else known == digest

    def forget(self) -> None:
        """Forget all applied batches."""
        self.seq = -1
        self._digests.clear()
