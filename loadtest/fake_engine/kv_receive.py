"""Requests that wait for the transfer of a prompt that another engine computes (`prefill_export.py`).

The rules are those of loads from a tier (`tier_load.py`). Such a request gets its blocks at once and is put aside. It
joins the batch only after the KV of its blocks has arrived. Later requests overtake it. Other requests can match its
blocks as soon as the KV has arrived. The last token of its prompt is always computed here. If the other engine does not
have the blocks, the whole prompt is computed here.

The computing engine keeps the blocks of such a prompt until they are fetched or until the lease expires.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from loadtest.fake_engine.decode_batch import EngineSequence
from loadtest.fake_engine.kv_pool import KvPool
from loadtest.fake_engine.prefill_export import LegError, NotComputed


class KvReceiver:
    """Same interface as `TierLoader` for `model.py`, for an engine without a tier."""

    def __init__(self, pool: KvPool, block_tokens: int) -> None:
        self.ready: deque[EngineSequence] = deque()  # arrived, and not in the batch yet
        self.lacked = 0  # since the start: requests without a transfer, because their blocks were unavailable
        self.held: dict[int, list[int]] = {}  # request -> blocks of its prompt, for another engine to fetch
        self._pool, self._size = pool, block_tokens
        self._under_way: list[tuple[float, int, EngineSequence]] = []  # (arrival time, number, sequence), sorted
        self._awaited: dict[int, EngineSequence] = {}  # request -> sequence that waits for the end of its prefill
        self._begun = 0

    def __len__(self) -> int:
        return len(self._under_way) + len(self.ready) + len(self._awaited)

    def get_remaining_s(self, now_s: float, otherwise_s: float = math.inf) -> float:
        """Return the seconds until the next transfer ends, or `otherwise_s` if no transfer is in progress."""
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else otherwise_s

    def due(self, now_s: float) -> list[EngineSequence]:
        """Process transfers that have ended by now. The result is empty, because no request waits for the transfer of
        another."""
        while self._under_way and self._under_way[0][0] <= now_s:
            *_, sequence = self._under_way.pop(0)
            end, keys = sequence.stored + sequence.loading, sequence.request.keys
            self._pool.store(sequence.request.tag, keys, sequence.blocks, sequence.stored, end)
            sequence.stored, sequence.loading = end, 0
            sequence.computed = end * self._size
            self.ready.append(sequence)
        return []

    def put_off(self, sequence: EngineSequence, matched: int, blocks_max: int) -> bool:
        """Return False: no sequence is put off."""
        return False

    def begin(self, sequence: EngineSequence, blocks_max: int, now_s: float) -> tuple[int, bool]:
        """Start the transfer of the blocks of a sequence that was just given its blocks in the pool.

        Returns the number of blocks, and True if the sequence is put aside for them.
        """
        # admitted before: its blocks had arrived, and are lost
        if sequence.request.handover is None or sequence.cached >= 0:
            return 0, False
        prompt_blocks = sequence.request.prompt_tokens // self._size
        sequence.loading = max(0, min(blocks_max, prompt_blocks, len(sequence.request.keys)) - sequence.stored)
        blocks = sequence.loading
        if self._fetch(sequence, now_s):
            return blocks, True
        return 0, False

    def _fetch(self, sequence: EngineSequence, now_s: float) -> bool:
        """Start the transfer, or wait for the end of the prefill. Returns False if no blocks will arrive."""
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
        """Handle the end of the prefill that a request waits for, successful or not."""
        sequence = self._awaited.pop(request_id, None)
        if sequence is not None and not self._fetch(sequence, now_s):
            sequence.cached = sequence.computed
            self.ready.append(sequence)

    def hold(self, sequence: EngineSequence) -> None:
        """Keep the blocks of a finished prefill stage."""
        self.held[sequence.request.request_id] = sequence.blocks
        sequence.blocks = []

    def release(self, request_id: int) -> None:
        """Free the blocks of a prefill stage after their transfer or the end of their lease."""
        if (blocks := self.held.pop(request_id, None)) is not None:
            self._pool.release(blocks)

    def on_blocks_full(self, sequence: EngineSequence, end: int) -> None:
        """Ignore full blocks: they have no effect here."""

    def offload(self) -> None:
        """Copy no blocks: this engine has no tier."""

    def cancel(self, sequence: EngineSequence) -> bool:
        """Remove a sequence after its client has disconnected. Returns True if the sequence was here."""
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
