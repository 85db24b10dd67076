"""Requests with blocks that are loaded from the tier, and copies of computed blocks to the tier.

vLLM 0.32, v1/core/sched/scheduler.py: a request with blocks to load gets its GPU blocks at once and is put aside
(WAITING_FOR_REMOTE_KVS). When its load ends, it goes before all waiting requests. Other requests can match its blocks
after the load. If another request already loads its blocks, a request is put aside too, and is matched again when that
load ends.

Further blocks that the request's source has are first transferred from there to the tier (`peers.py`). After the
transfer, other requests can match them in the tier.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from loadtest.fake_engine.decode_batch import EngineSequence, Pulled
from loadtest.fake_engine.host_tier import HostTier, TierLimits
from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvPool
from loadtest.fake_engine.peers import HANG_S, Peers

MEDIUM = "CPU"


class TierLoader:
    """The sequences of one engine that are neither in its batch nor in its queue, because of its tier."""

    def __init__(
        self, pool: KvPool, limits: TierLimits, block_tokens: int, peers: Peers | None = None, name: str = ""
    ) -> None:
        self.tier = HostTier(limits, block_tokens)
        self.pulled_blocks = 0  # since the start
        self._peers, self._name = peers, name
        if peers is not None:
            peers.join(name, self.tier)
        self.ready: deque[EngineSequence] = deque()  # loaded, and not in the batch yet
        self._pool, self._size = pool, block_tokens
        self._under_way: list[tuple[float, int, EngineSequence]] = []  # (end, number, sequence), sorted
        self._begun = 0
        self._put_off: list[EngineSequence] = []  # waiting for the loads of other sequences
        self._fresh: list[
            tuple[EngineSequence, int, int]
        ] = []  # (sequence, first block, end) computed in the current step

    def __len__(self) -> int:
        return len(self._under_way) + len(self.ready) + len(self._put_off)

    def get_remaining_s(self, now_s: float, otherwise_s: float = math.inf) -> float:
        """Return the seconds until the next load ends, or `otherwise_s` if no load is in progress."""
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else otherwise_s

    def due(self, now_s: float) -> list[EngineSequence]:
        """Process loads that have ended by now. Returns the sequences that were put off for them, in order of
        arrival."""
        done = False
        while self._under_way and self._under_way[0][0] <= now_s:
            done = True
            *_, sequence = self._under_way.pop(0)
            if sequence.pulling is not None:
                self._publish_arrived(sequence, sequence.pulling)
            end = sequence.stored + sequence.loading
            keys = sequence.request.keys
            self._pool.store(sequence.request.tag, keys, sequence.blocks, sequence.stored, end)
            self.tier.release_loaded(keys[sequence.stored : end])
            sequence.stored, sequence.loading = end, 0
            sequence.computed = end * self._size
            self.ready.append(sequence)
        if not done and self._under_way:
            return []
        put_off, self._put_off = self._put_off, []
        return put_off

    def put_off(self, sequence: EngineSequence, matched: int, blocks_max: int) -> bool:
        """True if the sequence, with `matched` blocks on the GPU, must wait for the load of another sequence."""
        keys = sequence.request.keys
        run = self.tier.match(keys, matched, min(blocks_max, len(keys)))
        if not run or not self.tier.busy(keys[matched : matched + run]):
            return False
        self._put_off.append(sequence)
        return True

    def begin(self, sequence: EngineSequence, blocks_max: int, now_s: float) -> tuple[int, bool]:
        """Start to load the blocks, from tier and source, of a sequence that was just given its blocks in the pool.

        Returns the number of blocks, and True if the sequence is put aside for them.
        """
        keys, matched = sequence.request.keys, sequence.stored
        end = min(blocks_max, len(keys))
        run = self.tier.match(keys, matched, end)
        self.tier.touch(keys[: matched + run])
        done_s = self.tier.load(keys[matched : matched + run], now_s) if run else now_s
        sent_s, pulled = self._pull(sequence, matched + run, end, now_s)
        if pulled:  # the load from tier to GPU takes the usual time, but does not occupy the link
            sent_s += self.tier.limits.load_s(pulled * self._size)
        if not run and sent_s == now_s:
            return 0, False
        sequence.loading = run + pulled
        self._begun += 1
        insort(self._under_way, (max(done_s, sent_s), self._begun, sequence))
        return run + pulled, True

    def _pull(self, sequence: EngineSequence, at: int, end: int, now_s: float) -> tuple[float, int]:
        """Request the sequence's blocks from `at` on, before `end`, that its source has.

        Returns their time of arrival and their number.
        """
        peers, source, keys = self._peers, sequence.request.source, sequence.request.keys
        if peers is None or not source or source == self._name or at >= end:
            return now_s, 0
        tier = peers.tier_of(source)
        if tier is None:
            return now_s + HANG_S, 0
        run = tier.match(keys, at, end)
        wanted = keys[at : at + run]
        fresh, gone = self.tier.store(wanted)
        if gone:
            self._pool.tell(BlocksRemoved(gone, MEDIUM))
        if not run or not all(key in self.tier for key in wanted):
            peers.lacked += 1
            return now_s, 0
        self.tier.hold(wanted)
        sequence.pulling = Pulled(source, tier, at, at + run, tuple(fresh))
        self.pulled_blocks += run
        return peers.send(source, self._name, wanted, run * self._size, now_s), run

    def _publish_arrived(self, sequence: EngineSequence, pulled: Pulled) -> None:
        """Publish the blocks that have arrived from another engine. If that engine has ended, they will never
        arrive."""
        keys, sequence.pulling = sequence.request.keys, None
        if self._peers is not None and self._peers.end_transfer(
            pulled.source, pulled.tier, keys[pulled.begin : pulled.end]
        ):
            self._tell_stored(sequence, pulled.begin, pulled.end, set(pulled.fresh))
            return
        self.tier.release_loaded(keys[pulled.begin : pulled.end])
        self.tier.drop(pulled.fresh)
        self.pulled_blocks -= pulled.end - pulled.begin
        sequence.loading -= pulled.end - pulled.begin
        sequence.cached -= (pulled.end - pulled.begin) * self._size

    def on_blocks_full(self, sequence: EngineSequence, end: int) -> None:
        """Record that the sequence's blocks before `end` are full; they are copied when the step ends."""
        self._fresh.append((sequence, sequence.stored, end))

    def offload(self) -> None:
        """Copy the full blocks of the step that ended to the tier."""
        for sequence, first, end in self._fresh:
            keys = sequence.request.keys
            fresh, gone = self.tier.store(keys[first:end])
            if gone:
                self._pool.tell(BlocksRemoved(gone, MEDIUM))
            self._tell_stored(sequence, first, end, set(fresh))
        self._fresh.clear()

    def _tell_stored(self, sequence: EngineSequence, at: int, end: int, known: set[int]) -> None:
        """Publish the sequence's blocks from `at` to `end` that are new in the tier (`known`)."""
        keys = sequence.request.keys
        while at < end:
            begin = at
            while at < end and keys[at] in known:
                at += 1
            if at > begin:
                parent = keys[begin - 1] if begin else None
                self._pool.tell(BlockStored(sequence.request.tag, begin, keys[begin:at], parent, MEDIUM))
            at += at == begin

    def _give_up(self, sequence: EngineSequence) -> None:
        """Abandon the P2P transfer of a sequence: the blocks are not in the tier."""
        pulled, sequence.pulling = sequence.pulling, None
        if pulled is not None and self._peers is not None:
            self._peers.end_transfer(pulled.source, pulled.tier, sequence.request.keys[pulled.begin : pulled.end])
            self.tier.drop(pulled.fresh)

    def stop(self) -> None:
        """Abandon all P2P transfers of an engine that has ended, so that the sources need not keep the blocks."""
        for *_, sequence in self._under_way:
            self._give_up(sequence)

    def cancel(self, sequence: EngineSequence) -> bool:
        """Remove a sequence after its client has disconnected. Returns True if the sequence was here."""
        for number, (*_, loaded) in enumerate(self._under_way):
            if loaded is sequence:
                self.tier.release_loaded(sequence.request.keys[sequence.stored : sequence.stored + sequence.loading])
                self._give_up(sequence)
                sequence.loading = 0
                del self._under_way[number]
                return True
        for queue in (self.ready, self._put_off):
            if sequence in queue:
                queue.remove(sequence)
                return True
        return False
