"""Detection of events that arrive later than their answer: blocks that a finished answer filled, and blocks reported.

An engine computes a block, publishes the event and sends the answer in one step, but over two paths. On a busy machine
the answer, and even the conversation's next request, can arrive before the event. The token counts of an answer give
the number of blocks that it filled: (prompt + completion - 1) // block including the prompt's, since the last token is
never fed back. Until these blocks are reported, the replica's cached blocks are not known exactly, and a short wait for
the events is worthwhile (vLLM 0.32: v1/core/sched/scheduler.py publishes in update_from_output).

A prompt that was answered before can get the same answer, with blocks that are held already. SGLang's radix tree then
stores and reports no block (srt/mem_cache/radix_cache.py, _insert_helper). The wait for such an answer is shorter, and
missing events do not count as missed.

If an engine's counts do not match (its blocks are never reported), no answer counts as late.

Events can be late by seconds. The thread of vLLM 0.32 that publishes them also answers replays, ten thousand batches at
a time (distributed/kv_events.py, _service_replay), so one router that joins delays the events of all others. The delay
is known from the times in batches, so computed blocks count until a newer batch is received. Tails are given up anyway,
because a short wait does not help then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FADE = 0.95  # factor of the share of missed answers with each further answer
MISSED_MAX = 0.3  # share of answers with blocks that were never reported, above which no answer counts as late
LEASES_MAX = 4_096
ANSWERED_MAX = 4_096  # ends of prompts after which blocks of an answer were reported
LATE_S_MAX = 10.0  # an engine can also be idle, and then publishes no newer batch
LEAST_S = 60.0  # the minimum lag in this period and the one before it is taken for clock difference plus latency


class EventLag:
    """Delay of batches, from the times in them, on any clock."""

    def __init__(self) -> None:
        self._least_s = self._before_s = float("inf")
        self._since_s = float("-inf")

    def late_s(self, lag_s: float, now_s: float) -> float:
        """Return the seconds by which a batch lags behind the fastest one.

        `lag_s` is the time of receipt by this machine's clock, minus the time in the batch. The clocks can differ, and
        drift.
        """
        if now_s - self._since_s > LEAST_S:
            self._before_s, self._least_s, self._since_s = self._least_s, lag_s, now_s
        self._least_s = min(self._least_s, lag_s)
        return lag_s - min(self._least_s, self._before_s)


@dataclass(slots=True)
class _Tail:
    key: int  # key of the deepest reported block
    depth: int  # number of that block in the chain; 0 is the root
    blocks: int = 0  # blocks reported after the prompt
    wanted: int = 0
    due_s: float = float("inf")  # time at which the blocks are given up, after the answer ended
    again: bool = False  # True if blocks were stored after this prompt before


class PendingTails:
    """Ends of one engine's answers, as reported by its events so far."""

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}  # key -> leases with this tail
        self._tails: dict[int, _Tail] = {}
        self._ended: set[int] = set()  # leases with an ended answer and unreported blocks
        self._missed = 0.0
        self._answered: dict[int, None] = {}  # keys that an answer extended, oldest first
        # all changes on the engine before this time were received; None: batches carry no time
        self._told_s: float | None = None

    def advance_watermark(self, until_s: float) -> None:
        """Record that all changes on the engine before this time were received."""
        self._told_s = until_s if self._told_s is None else max(self._told_s, until_s)

    def over(self, ended_s: float, now_s: float) -> bool:
        """True if outstanding events of an answer that ended at this time will not arrive: a newer batch was received,
        or LATE_S_MAX is over."""
        return self._told_s is None or self._told_s > ended_s or now_s >= ended_s + LATE_S_MAX

    def begin(self, lease: int, key: int, depth: int) -> None:
        """Start to follow a request with `depth` full blocks in its prompt. `key` is that of the last block, or the
        chain's root."""
        if len(self._tails) < LEASES_MAX:
            self._tails[lease] = _Tail(key, depth, again=key in self._answered)
            self.open.setdefault(key, []).append(lease)

    def grow(self, parent: int, keys: Sequence[int]) -> None:
        """Record blocks stored after the block with key `parent`, which is in `open`."""
        self._answered[parent] = None
        if len(self._answered) > ANSWERED_MAX:
            del self._answered[next(iter(self._answered))]
        for lease in self.open.pop(parent):
            tail = self._tails[lease]
            tail.key, tail.depth, tail.blocks = keys[-1], tail.depth + len(keys), tail.blocks + len(keys)
            if lease in self._ended and tail.blocks >= tail.wanted:
                self._close(lease, missed=False)
            else:
                self.open.setdefault(tail.key, []).append(lease)

    def end(self, lease: int, wanted: int, due_s: float, again_due_s: float = 0.0) -> None:
        """Record that an answer ended with this number of full blocks after its prompt.

        Blocks not reported by `due_s` are given up. The limit is `again_due_s` if the answer can be the same as before.
        """
        tail = self._tails.get(lease)
        if tail is None:
            return
        tail.wanted, tail.due_s = wanted, again_due_s if tail.again else due_s
        self._ended.add(lease)
        if tail.blocks >= wanted:
            self.drop(lease)
            self._missed *= FADE

    def drop(self, lease: int) -> None:
        """Stop following this lease."""
        if lease in self._tails:
            key = self._tails[lease].key
            if key in self.open:
                leases = self.open[key]
                leases.remove(lease)
                if not leases:
                    del self.open[key]
            del self._tails[lease]
            self._ended.discard(lease)

    def waits(self, now_s: float) -> bool:
        """True if an ended answer has blocks that are neither reported nor given up."""
        for lease in [lease for lease in self._ended if self._tails[lease].due_s <= now_s]:
            self._close(lease, missed=True)
        return bool(self._ended)

    def has_pending_blocks(self, now_s: float) -> bool:
        """True if blocks of an ended answer are outstanding, and this engine's counts are reliable."""
        return self.waits(now_s) and self._missed <= MISSED_MAX

    def is_continuation(self, keys: Sequence[int], root: int, now_s: float) -> bool:
        """True if a prompt with these keys continues an answer that has outstanding blocks."""
        if not self._ended or not self.has_pending_blocks(now_s):
            return False
        tails = (self._tails[lease] for lease in self._ended)
        return any(
            tail.depth < len(keys) and tail.key == (keys[tail.depth - 1] if tail.depth else root) for tail in tails
        )

    def clear(self) -> None:
        """Start over, with a new stream."""
        self.open, self._tails, self._ended, self._answered, self._told_s = {}, {}, set(), {}, None

    def _close(self, lease: int, *, missed: bool) -> None:
        if not (missed and self._tails[lease].again):
            self._missed = self._missed * FADE + (1 - FADE) * missed
        if missed:
            self.drop(lease)
        else:
            del self._tails[lease]
            self._ended.discard(lease)
