"""Probability that a prompt is requested again, given its idle time: learned from the gaps that the router observes.

Every prompt leaves a mark at its last full block. When a later prompt contains that mark, the gap since then is a
*reuse*. A waiting mark is censored: it may still be reused. This is a survival curve, so the Kaplan-Meier estimator
applies (Kaplan & Meier 1958). Over log2 buckets of seconds, hazard(b) = reuses in b / marks that entered b, and

    P(requested again | idle t) = 1 - product over b >= bucket(t) of (1 - hazard(b))

Marks outlive the cache entries that they stand for: otherwise the return of a prematurely evicted prompt would never be
observed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from math import exp

HORIZON_S = 4_096.0  # a mark that is idle for longer counts as never reused
BUCKETS = 13  # [0, 1) s, then one per power of two up to the horizon
LAST_S = 2.0 ** (BUCKETS - 2)  # seconds at which the last bucket begins
BIN_S = 4.0  # waiting marks are counted in bins this wide
# Largest growth of a turn that still counts as the next of its conversation: about 32,000 tokens.
TURN_BLOCKS_MAX = 256
PRIOR = 1.0  # one reuse and one ending in the last bucket as a prior: even odds


class ReuseModel:
    """Marks at the ends of past prompts, bounded in number and age, and the statistics of their gaps."""

    def __init__(self, marks_max: int) -> None:
        self._marks_max = marks_max
        # Block key -> time of its mark, oldest first. Not a dict: one that loses its first entries is searched from its
        # first slot, 20 us a time.
        self._marks: OrderedDict[int, float] = OrderedDict()
        self._bins: dict[int, int] = {}  # floor(left / BIN_S) -> marks
        self._reused = [0.0] * BUCKETS
        self._ended = [0.0] * BUCKETS
        self._odds = [0.5] * BUCKETS
        self._odds_at_s = float("-inf")
        self._due_s = float("-inf")  # no mark is too old before this time

    def __len__(self) -> int:
        return len(self._marks)

    def observe(self, keys: Sequence[int], now_s: float, *, final: bool = False) -> float | None:
        """Record a request for a prompt with these block keys. Its deepest mark counts as reused, and a new mark is
        left at its end. No new mark is left for the `final` prompt of a conversation, because the odds are those of
        prompts that may return. Returns the gap in seconds; None if no mark was found or the prompt has no block."""
        if not keys:
            return None
        gap_s: float | None = None
        marks = self._marks
        # A conversation's last mark is near its end, one turn ago.
        deepest = next(filter(marks.__contains__, islice(reversed(keys), TURN_BLOCKS_MAX)), None)
        if deepest is not None:
            gap_s = now_s - self._take(deepest)
            self._reused[bucket(gap_s)] += 1
        last, bins = keys[-1], self._bins
        if last in marks:
            self._take(last)
        if final:
            return gap_s
        marks[last] = now_s
        bin_ = int(now_s // BIN_S)
        bins[bin_] = bins.get(bin_, 0) + 1
        if now_s > self._due_s or len(marks) > self._marks_max:
            self._forget(now_s)
        return gap_s

    def withdraw(self, key: int) -> None:
        """Remove the mark of a prompt that is known not to return. It counts neither as reused nor as ended, because it
        contains no information about other prompts."""
        if key in self._marks:
            self._take(key)

    def reuse_probability(self, now_s: float) -> Sequence[float]:
        """Return the probability that a prompt is requested again, by the `bucket` of its idle seconds. It is
        recomputed at most once a second."""
        if now_s - self._odds_at_s >= 1.0:
            self._refresh(now_s)
        return self._odds

    @property
    def counts(self) -> tuple[list[float], list[float]]:
        """(reuses, endings) by bucket; older ones count less. They must not be modified."""
        return self._reused, self._ended

    def adopt(self, reused: Sequence[float], ended: Sequence[float]) -> bool:
        """Start with another router's `counts` if there are none yet; returns True if there were none."""
        if any(self._reused) or any(self._ended) or len(reused) != BUCKETS or len(ended) != BUCKETS:
            return False
        self._reused, self._ended = list(reused), list(ended)
        return True

    def _forget(self, now_s: float) -> None:
        self._due_s = now_s + HORIZON_S
        while self._marks:
            oldest, left_s = next(iter(self._marks.items()))
            if len(self._marks) <= self._marks_max and now_s - left_s <= HORIZON_S:
                self._due_s = left_s + HORIZON_S
                return
            self._take(oldest)
            self._ended[bucket(now_s - left_s)] += 1

    def _take(self, key: int) -> float:
        left_s = self._marks.pop(key)
        bin_ = int(left_s // BIN_S)
        self._bins[bin_] -= 1
        if not self._bins[bin_]:
            del self._bins[bin_]
        return left_s

    def _refresh(self, now_s: float) -> None:
        if self._odds_at_s > float("-inf"):
            fade = exp(-(now_s - self._odds_at_s) / HORIZON_S)
            self._reused = [count * fade for count in self._reused]
            self._ended = [count * fade for count in self._ended]
        self._odds_at_s = now_s
        waiting = [0.0] * BUCKETS
        for bin_, count in self._bins.items():
            waiting[bucket(now_s - bin_ * BIN_S)] += count
        survive, at_risk = 1.0, 2 * PRIOR
        for b in range(BUCKETS - 1, -1, -1):
            reused = self._reused[b] + (PRIOR if b == BUCKETS - 1 else 0.0)
            at_risk += self._reused[b] + self._ended[b] + waiting[b]
            survive *= 1 - min(1.0, reused / at_risk)
            self._odds[b] = 1 - survive


def bucket(seconds: float) -> int:
    """Return the index of an idle time in the odds."""
    if seconds < 1:
        return 0
    return int(seconds).bit_length() if seconds < LAST_S else BUCKETS - 1
