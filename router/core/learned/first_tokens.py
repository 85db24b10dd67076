"""When first tokens come, against what prices expect: how far a predicted time can be trusted.

A price expects a first token when the wait at the replica is over and the prompt's prefill is done. What it leaves out,
such as steps of the engine, the network and work that nobody announced, shows in the ratio of the real time to the
expected one. Two quantiles of that ratio are followed by small steps: behind a ratio that is above, the quantile q goes
up by q of a step, and behind one below it goes down by 1 - q of a step. So in the long run a share q of the ratios is
below, whatever their distribution is and however it changes (Robbins & Monro 1951; for predictions Gibbs & Candes 2021,
"Adaptive conformal inference under distribution shift").

Times of a size have quantiles of their own: some milliseconds more are nothing to a long wait, and twice a short one.
"""

from __future__ import annotations

from math import exp, log

SIZES = 9  # expected times below 3 ms, below 15 ms, and so on by powers of 4; from 65 s on they are of one size
SLACK_MS = 1.0  # added to both times of a ratio, which of next to nothing would say nothing
LEAST_MS = 0.1  # least time that is predicted
MEDIAN, HIGH = 0.5, 0.9
STEP, STEP_FIRST = 0.05, 0.5  # steps of the logarithm of a ratio: once much was seen, and at first
HIGH_FIRST = log(2.0)  # before anything was seen: one in ten takes more than twice as long
LOG_MAX = log(100.0)  # a ratio beyond a hundred says that something else went wrong


class _Quantiles:
    """Two quantiles of the logarithms of ratios."""

    __slots__ = ("high", "median", "seen")

    def __init__(self) -> None:
        self.median, self.high, self.seen = 0.0, HIGH_FIRST, 0

    def take(self, value: float) -> None:
        """One more."""
        self.seen += 1
        step = max(STEP, STEP_FIRST / self.seen)
        self.median += step * MEDIAN if value > self.median else -step * (1 - MEDIAN)
        self.high += step * HIGH if value > self.high else -step * (1 - HIGH)


class FirstTokens:
    """Learned from streams of one kind of replicas. Times in milliseconds."""

    def __init__(self) -> None:
        self._all = _Quantiles()
        self._of_size = [_Quantiles() for _ in range(SIZES)]

    @property
    def seen(self) -> int:
        """First tokens so far."""
        return self._all.seen

    def predict(self, expected_ms: float) -> tuple[float, float]:
        """(time before which half of such first tokens come, time before which nine in ten come)."""
        known = self._of_size[_size(expected_ms)]
        if not known.seen:
            known = self._all
        base_ms = expected_ms + SLACK_MS
        median_ms = base_ms * exp(known.median) - SLACK_MS
        high_ms = base_ms * exp(max(known.median, known.high)) - SLACK_MS
        return max(LEAST_MS, median_ms), max(LEAST_MS, high_ms)

    def observe(self, expected_ms: float, took_ms: float) -> None:
        """A first token came after `took_ms`."""
        value = log((max(0.0, took_ms) + SLACK_MS) / (max(0.0, expected_ms) + SLACK_MS))
        value = max(-LOG_MAX, min(LOG_MAX, value))
        known = self._of_size[_size(expected_ms)]
        if not known.seen:
            known.median, known.high = self._all.median, self._all.high
        known.take(value)
        self._all.take(value)


def _size(expected_ms: float) -> int:
    return min(SIZES - 1, (int(max(0.0, expected_ms)) + 1).bit_length() // 2)
