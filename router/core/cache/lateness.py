"""Whether an engine's events are behind its answers: what a finished answer must have stored, and what was heard.

An engine computes the block, publishes the event and sends the answer in one step, but on two ways: on a busy machine
the answer may be here, and the conversation's next request too, before the event. By the counts of an answer it is
known how many blocks it filled behind its prompt: (prompt + completion - 1) // block in all, since the last token is
never fed back. Until they are heard, what the replica holds is not known exactly, and for a moment it is worth
waiting for (vLLM 0.32: v1/core/sched/scheduler.py publishes in update_from_output).

A prompt that was answered before may get the same answer, whose blocks are held already: SGLang's radix tree stores,
and says, nothing then (srt/mem_cache/radix_cache.py, _insert_helper). Such an answer is waited for but briefly, and
its silence counts for nothing.

Where an engine's counts do not fit (they are never heard), this instrument says nothing.

Events may be late by seconds: the thread of vLLM 0.32 that publishes also answers replays, ten thousand batches at a
time (distributed/kv_events.py, _service_replay), so that one router that joins delays what all others hear. How late
they are is told by the times that batches bear, so that what was computed counts until a younger batch was heard. Tails
are given up all the same: a moment's waiting does not help then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FADE = 0.95  # part of what was heard and missed that is left after another answer
MISSED_MAX = 0.3  # part of answers whose blocks were never heard, above which nothing is said
LEASES_MAX = 4_096
ANSWERED_MAX = 4_096  # ends of prompts behind which an answer was heard
LATE_S_MAX = 10.0  # an engine may be quiet, too: no younger batch comes then
LEAST_S = 60.0  # the least lag of so long, and of as long before it, is taken for the clocks' difference and the way


class Lateness:
    """How late batches are, by the times that they bear, on whatever clock."""

    def __init__(self) -> None:
        self._least_s = self._before_s = float("inf")
        self._since_s = float("-inf")

    def late_s(self, lag_s: float, now_s: float) -> float:
        """Seconds by which a batch lags behind the quickest; it came now, `lag_s` by this machine's clock after the
        time that it bears. Clocks may differ, and drift."""
        if now_s - self._since_s > LEAST_S:
            self._before_s, self._least_s, self._since_s = self._least_s, lag_s, now_s
        self._least_s = min(self._least_s, lag_s)
        return lag_s - min(self._least_s, self._before_s)


@dataclass(slots=True)
class _Tail:
    key: int  # key of the deepest block heard
    depth: int  # number of that block in the chain; 0 is the root
    blocks: int = 0  # blocks heard of behind the prompt
    wanted: int = 0
    due_s: float = float("inf")  # time at which the blocks are given up, once the answer ended
    again: bool = False  # blocks were stored behind this prompt before


class Tails:
    """The ends of one engine's answers, as far as its events went."""

    def __init__(self) -> None:
        self.open: dict[int, list[int]] = {}  # key -> leases whose tail it is
        self._tails: dict[int, _Tail] = {}
        self._ended: set[int] = set()  # leases whose answers ended, and whose blocks are not all heard
        self._missed = 0.0
        self._answered: dict[int, None] = {}  # keys behind which an answer grew, oldest first
        self._told_s: float | None = None  # whatever the engine did before was heard; None: batches bear no time

    def told(self, until_s: float) -> None:
        """All that the engine did before this was heard."""
        self._told_s = until_s if self._told_s is None else max(self._told_s, until_s)

    def over(self, ended_s: float, now_s: float) -> bool:
        """Whether what was not heard of an answer that ended then will not be heard: a younger batch was, or LATE_S_MAX
        went by."""
        return self._told_s is None or self._told_s > ended_s or now_s >= ended_s + LATE_S_MAX

    def begin(self, lease: int, key: int, depth: int) -> None:
        """A request was placed whose prompt has `depth` full blocks; `key` is that of the last, or the chain's root."""
        if len(self._tails) < LEASES_MAX:
            self._tails[lease] = _Tail(key, depth, again=key in self._answered)
            self.open.setdefault(key, []).append(lease)

    def grow(self, parent: int, keys: Sequence[int]) -> None:
        """Blocks were stored behind the block with key `parent`, which is in `open`."""
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
        """The answer ended with this many full blocks behind its prompt; not heard by `due_s`, they are given up, by
        `again_due_s` where it may have been the same answer as before."""
        tail = self._tails.get(lease)
        if tail is None:
            return
        tail.wanted, tail.due_s = wanted, again_due_s if tail.again else due_s
        self._ended.add(lease)
        if tail.blocks >= wanted:
            self.drop(lease)
            self._missed *= FADE

    def drop(self, lease: int) -> None:
        """Nothing more is expected of this lease."""
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
        """Whether there is an answer that ended, not all of whose blocks are heard of or given up."""
        for lease in [lease for lease in self._ended if self._tails[lease].due_s <= now_s]:
            self._close(lease, missed=True)
        return bool(self._ended)

    def behind(self, now_s: float) -> bool:
        """Whether blocks of an answer that ended are still to be heard of."""
        return self.waits(now_s) and self._missed <= MISSED_MAX

    def continued(self, keys: Sequence[int], root: int, now_s: float) -> bool:
        """Whether a prompt with these keys goes on behind an answer whose blocks are still to be heard of."""
        if not self._ended or not self.behind(now_s):
            return False
        tails = (self._tails[lease] for lease in self._ended)
        return any(
            tail.depth < len(keys) and tail.key == (keys[tail.depth - 1] if tail.depth else root) for tail in tails
        )

    def clear(self) -> None:
        """The stream begins anew."""
        self.open, self._tails, self._ended, self._answered, self._told_s = {}, {}, set(), {}, None

    def _close(self, lease: int, *, missed: bool) -> None:
        if not (missed and self._tails[lease].again):
            self._missed = self._missed * FADE + (1 - FADE) * missed
        if missed:
            self.drop(lease)
        else:
            del self._tails[lease]
            self._ended.discard(lease)
