"""Predicted times to first token: the error of the prices' expectation, learned as quantiles.

A price expects the first token at the end of the replica's wait and the prompt's prefill. It omits the engine's steps,
the network and unannounced work. These show in the ratio of the real time to the expected time. Two quantiles of that
ratio are tracked in small steps. After a ratio above it, the quantile q rises by q of a step; after a ratio below it,
it falls by 1 - q of a step. So in the long run a share q of the ratios is below it, for any distribution and any change
of it (Robbins & Monro 1951; for predictions Gibbs & Candes 2021, "Adaptive conformal inference under distribution
shift").

Expected times are grouped by size, and each size has its own quantiles: a few more milliseconds are negligible for a
long wait, and double a short one.
"""

from __future__ import annotations

from math import exp, log

SIZES = 9  # expected times below 3 ms, below 15 ms, and so on by powers of 4; from 65 s on they are of one size
SLACK_MS = 1.0  # added to both times of a ratio, because the ratio of tiny times has no meaning
LEAST_MS = 0.1  # minimum of a predicted time
MEDIAN, HIGH = 0.5, 0.9
STEP, STEP_FIRST = 0.05, 0.5  # steps of the logarithm of a ratio: after many observations, and at first
HIGH_FIRST = log(2.0)  # before any observation: one in ten takes more than twice as long
LOG_MAX = log(100.0)  # a ratio beyond a hundred has another cause


class _Quantiles:
    """Two quantiles of the logarithms of ratios."""

    __slots__ = ("high", "median", "seen")

    def __init__(self) -> None:
        self.median, self.high, self.seen = 0.0, HIGH_FIRST, 0

    def take(self, value: float) -> None:
        """Add one value."""
        self.seen += 1
        step = max(STEP, STEP_FIRST / self.seen)
        self.median += step * MEDIAN if value > self.median else -step * (1 - MEDIAN)
        self.high += step * HIGH if value > self.high else -step * (1 - HIGH)


class TtftQuantiles:
    """Prediction learned from streams of one kind of replicas. Times are in milliseconds."""

    def __init__(self) -> None:
        self._all = _Quantiles()
        self._of_size = [_Quantiles() for _ in range(SIZES)]

    @property
    def seen(self) -> int:
        """Number of observed first tokens."""
        return self._all.seen

    def predict(self, expected_ms: float) -> tuple[float, float]:
        """Return (median, 90th percentile) of the time to first token."""
        known = self._of_size[_size(expected_ms)]
        if not known.seen:
            known = self._all
        base_ms = expected_ms + SLACK_MS
        median_ms = base_ms * exp(known.median) - SLACK_MS
        high_ms = base_ms * exp(max(known.median, known.high)) - SLACK_MS
        return max(LEAST_MS, median_ms), max(LEAST_MS, high_ms)

    def observe(self, expected_ms: float, took_ms: float) -> None:
        """Record a first token that came after `took_ms`."""
        value = log((max(0.0, took_ms) + SLACK_MS) / (max(0.0, expected_ms) + SLACK_MS))
        value = max(-LOG_MAX, min(LOG_MAX, value))
        known = self._of_size[_size(expected_ms)]
        if not known.seen:
            known.median, known.high = self._all.median, self._all.high
        known.take(value)
        self._all.take(value)


def _size(expected_ms: float) -> int:
    return min(SIZES - 1, (int(max(0.0, expected_ms)) + 1).bit_length() // 2)
