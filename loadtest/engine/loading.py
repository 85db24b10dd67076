"""Requests whose blocks come from the tier: who waits for which load, and what is copied there when it is computed.

vLLM 0.32, v1/core/sched/scheduler.py: a request whose blocks are to be loaded has its room at once, is put aside
(WAITING_FOR_REMOTE_KVS) and goes before all that wait when its load is over; its blocks are found by others from then
on. One whose blocks another load brings is put aside too, and looks again when that is over.
"""

from __future__ import annotations

import math
from collections import deque

from loadtest.engine.decoding import Running
from loadtest.engine.host_tier import HostTier, TierLimits
from loadtest.engine.kv_pool import BlocksRemoved, BlockStored, KvPool

MEDIUM = "CPU"


class Loading:
    """The sequences of one engine that are neither in its batch nor in its queue, because of its tier."""

    def __init__(self, pool: KvPool, limits: TierLimits, block_tokens: int) -> None:
        self.tier = HostTier(limits, block_tokens)
        self.ready: deque[Running] = deque()  # loaded, and not in the batch yet
        self._pool, self._size = pool, block_tokens
        self._under_way: deque[tuple[float, Running]] = deque()  # (when it is done, whose), in that order
        self._put_off: list[Running] = []  # waiting for others' loads
        self._fresh: list[tuple[Running, int, int]] = []  # (whose, first block, end) computed in the step under way

    def __len__(self) -> int:
        return len(self._under_way) + len(self.ready) + len(self._put_off)

    def until_due_s(self, now_s: float, otherwise_s: float = math.inf) -> float:
        """Seconds until the next load is done; `otherwise_s` where none is under way."""
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else otherwise_s

    def due(self, now_s: float) -> list[Running]:
        """Take note of loads that are done by now. Returns who was put off for their sake, in the order of arrival."""
        done = False
        while self._under_way and self._under_way[0][0] <= now_s:
            done = True
            _, sequence = self._under_way.popleft()
            end = sequence.stored + sequence.loading
            keys = sequence.request.keys
            self._pool.store(sequence.request.tag, keys, sequence.blocks, sequence.stored, end)
            self.tier.loaded(keys[sequence.stored : end])
            sequence.stored, sequence.loading = end, 0
            sequence.computed = end * self._size
            self.ready.append(sequence)
        if not done and self._under_way:
            return []
        put_off, self._put_off = self._put_off, []
        return put_off

    def put_off(self, sequence: Running, matched: int, blocks_max: int) -> bool:
        """Whether the sequence, of which so many blocks are on the GPU, has to wait for another's load."""
        keys = sequence.request.keys
        run = self.tier.match(keys, matched, min(blocks_max, len(keys)))
        if not run or not self.tier.busy(keys[matched : matched + run]):
            return False
        self._put_off.append(sequence)
        return True

    def begin(self, sequence: Running, blocks_max: int, now_s: float) -> int:
        """Begin to load what the tier has of a sequence that was just given its room; returns how many blocks."""
        keys, matched = sequence.request.keys, sequence.stored
        run = self.tier.match(keys, matched, min(blocks_max, len(keys)))
        self.tier.touch(keys[: matched + run])
        if run:
            sequence.loading = run
            self._under_way.append((self.tier.load(keys[matched : matched + run], now_s), sequence))
        return run

    def computed(self, sequence: Running, end: int) -> None:
        """The sequence's blocks before `end` are full now, and are copied when the step is over."""
        self._fresh.append((sequence, sequence.stored, end))

    def offload(self) -> None:
        """The step is over: its full blocks are copied to the tier."""
        for sequence, first, end in self._fresh:
            keys = sequence.request.keys
            fresh, gone = self.tier.store(keys[first:end])
            if gone:
                self._pool.tell(BlocksRemoved(gone, MEDIUM))
            known, at = set(fresh), first
            while at < end:
                begin = at
                while at < end and keys[at] in known:
                    at += 1
                if at > begin:
                    parent = keys[begin - 1] if begin else None
                    self._pool.tell(BlockStored(sequence.request.tag, begin, keys[begin:at], parent, MEDIUM))
                at += at == begin
        self._fresh.clear()

    def cancel(self, sequence: Running) -> bool:
        """The sequence's client left; whether it was here."""
        for number, (_, loaded) in enumerate(self._under_way):
            if loaded is sequence:
                self.tier.loaded(sequence.request.keys[sequence.stored : sequence.stored + sequence.loading])
                sequence.loading = 0
                del self._under_way[number]
                return True
        for queue in (self.ready, self._put_off):
            if sequence in queue:
                queue.remove(sequence)
                return True
        return False
