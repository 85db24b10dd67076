"""Requests whose prompt another engine computes: who waits for which transfer (legs.py).

As with loads from a tier (loading.py), such a request has its room at once, is put aside, and is not in the batch
before its blocks are here; whoever comes behind it passes it by, and others find its blocks from then on. The last
token of its prompt is computed here in any case. Where the other engine has nothing for it, all of it is.

The engine that computes keeps the blocks of such a prompt until they are fetched, or nobody came for them in time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from loadtest.engine.decoding import Running
from loadtest.engine.kv_pool import KvPool
from loadtest.engine.legs import LegError, NotComputed


class Arriving:
    """What model.py asks of Loading, for an engine without a tier."""

    def __init__(self, pool: KvPool, block_tokens: int) -> None:
        self.ready: deque[Running] = deque()  # here, and not in the batch yet
        self.lacked = 0  # since the start: requests for which nothing came
        self.held: dict[int, list[int]] = {}  # request -> blocks of its prompt, for another engine to fetch
        self._pool, self._size = pool, block_tokens
        self._under_way: list[tuple[float, int, Running]] = []  # (when it is here, number, whose), in that order
        self._awaited: dict[int, Running] = {}  # request -> who waits for the end of its prefill
        self._begun = 0

    def __len__(self) -> int:
        return len(self._under_way) + len(self.ready) + len(self._awaited)

    def until_due_s(self, now_s: float, otherwise_s: float = math.inf) -> float:
        """Seconds until the next transfer is over; `otherwise_s` where none is under way."""
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else otherwise_s

    def due(self, now_s: float) -> list[Running]:
        """Take note of transfers that are over by now. Returns nobody: no request waits for another one's transfer."""
        while self._under_way and self._under_way[0][0] <= now_s:
            *_, sequence = self._under_way.pop(0)
            end, keys = sequence.stored + sequence.loading, sequence.request.keys
            self._pool.store(sequence.request.tag, keys, sequence.blocks, sequence.stored, end)
            sequence.stored, sequence.loading = end, 0
            sequence.computed = end * self._size
            self.ready.append(sequence)
        return []

    def put_off(self, sequence: Running, matched: int, blocks_max: int) -> bool:
        """Nobody is."""
        return False

    def begin(self, sequence: Running, blocks_max: int, now_s: float) -> tuple[int, bool]:
        """Ask for the blocks of a sequence that was just given its room. Returns how many they are, and whether the
        sequence is put aside for them."""
        if sequence.request.handover is None or sequence.cached >= 0:  # admitted before: its blocks came, and are lost
            return 0, False
        prompt_blocks = sequence.request.prompt_tokens // self._size
        sequence.loading = max(0, min(blocks_max, prompt_blocks, len(sequence.request.keys)) - sequence.stored)
        blocks = sequence.loading
        if self._fetch(sequence, now_s):
            return blocks, True
        return 0, False

    def _fetch(self, sequence: Running, now_s: float) -> bool:
        """Begin the transfer, or wait for it; whether anything comes."""
        legs, id_ = sequence.request.handover or (None, "")
        try:
            took_s = legs.fetch(id_, now_s, sequence.loading * self._size) if legs is not None else math.inf
        except NotComputed:
            self._awaited[sequence.request.request_id] = sequence
            return True
        except LegError:
            self.lacked += 1
            sequence.loading = 0
            return False
        self._begun += 1
        insort(self._under_way, (now_s + took_s, self._begun, sequence))
        return True

    def computed_elsewhere(self, request_id: int, now_s: float) -> None:
        """The prefill that a request waits for is over, well or not."""
        sequence = self._awaited.pop(request_id, None)
        if sequence is not None and not self._fetch(sequence, now_s):
            sequence.cached = sequence.computed
            self.ready.append(sequence)

    def hold(self, sequence: Running) -> None:
        """A prefill leg is over: its blocks stay."""
        self.held[sequence.request.request_id] = sequence.blocks
        sequence.blocks = []

    def release(self, request_id: int) -> None:
        """Blocks of a prefill leg were fetched, or nobody comes for them."""
        if (blocks := self.held.pop(request_id, None)) is not None:
            self._pool.release(blocks)

    def computed(self, sequence: Running, end: int) -> None:
        """Nothing follows from blocks that are full."""

    def offload(self) -> None:
        """Nothing is copied."""

    def cancel(self, sequence: Running) -> bool:
        """The sequence's client left; whether it was here."""
        if self._awaited.pop(sequence.request.request_id, None) is not None:
            return True
        for number, (*_, arriving) in enumerate(self._under_way):
            if arriving is sequence:
                sequence.loading = 0
                del self._under_way[number]
                return True
        if sequence in self.ready:
            self.ready.remove(sequence)
            return True
        return False
