"""Sums over requests: the layout of a sum, windows that fade, and percentiles of a histogram.

A window fades exponentially: a value added one window ago counts for a third of a value added now. Stored sums are not
multiplied. Instead, a later value is added with a larger weight, and a sum is divided by the current weight when it is
read. The result is the same:

    sum of x * exp((t - now) / window) = (sum of x * exp((t - begin) / window)) / exp((now - begin) / window)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp

from router.core.types.cache_misses import MissReason

# Indices in a sum; the reasons of misses follow the others.
REQUESTS, PROMPT, PREDICTED, HIT, REPLAY, REPLAYS, UNTOLD, TOOL_CALLS, SAVED_MS = range(9)  # UNTOLD: unknown if replay
# prompt tokens of answers with a cached-token count from the engine
VERIFIED, VERIFIED_HIT, VERIFIED_PREDICTED = range(9, 12)
MISSES = 12
SIZE = MISSES + len(MissReason)
AT = {miss: MISSES + number for number, miss in enumerate(MissReason)}

TTFT_S = tuple(round(0.005 * 1.25**step, 6) for step in range(50))  # bounds of buckets, to 280 s
RAISE_WINDOWS = 256.0  # windows after which weights begin anew: a float can hold e^256
AGAIN_S = 0.25


def zeros() -> list[float]:
    """Return an empty sum."""
    return [0.0] * SIZE


def misses_of(sums: Sequence[float]) -> dict[str, int]:
    """Return tokens by reason, for all reasons."""
    return {miss.value: round(sums[at]) for miss, at in AT.items()}


def verified_of(sums: Sequence[float]) -> dict[str, int]:
    """Return prompt tokens of answers with a cached-token count from the engine; those that it found, and those that it
    was predicted to find."""
    return {
        "verified_tokens": round(sums[VERIFIED]),
        "verified_hit_tokens": round(sums[VERIFIED_HIT]),
        "verified_predicted_tokens": round(sums[VERIFIED_PREDICTED]),
    }


def ratio(part: float, whole: float) -> float | None:
    """Return the quotient, to four digits. None if the divisor is zero."""
    return round(part / whole, 4) if whole > 1e-9 else None


def percentile(counts: Sequence[float], bounds: Sequence[float], part: float) -> float | None:
    """Return a percentile of a histogram with an open last bucket, assuming an even distribution within a bucket. None
    if it is empty."""
    sums = list(accumulate(counts))
    total = sums[-1] if sums else 0.0
    if total <= 0:
        return None
    rank = part * total
    at = next(number for number, upto in enumerate(sums) if upto >= rank)
    if at >= len(bounds):
        return bounds[-1]
    low = bounds[at - 1] if at else 0.0
    before = sums[at - 1] if at else 0.0
    return low + (bounds[at] - low) * ((rank - before) / counts[at] if counts[at] else 0.0)


class FadingRatio:
    """A ratio over a separate window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._part = self._whole = self._at_s = 0.0

    def add(self, part: float, whole: float, now_s: float) -> None:
        """Add to part and whole, and fade earlier values. Steps of less than AGAIN_S are not faded."""
        if now_s > self._at_s + AGAIN_S:  # records may be out of order
            fade = exp((self._at_s - now_s) / self._window_s)
            self._part, self._whole, self._at_s = self._part * fade, self._whole * fade, now_s
        self._part += part
        self._whole += whole

    @property
    def value(self) -> float | None:
        """None until a value was added."""
        return self._part / self._whole if self._whole > 1e-9 else None


class DecayingSum:
    """Weights of a window. Added values are multiplied with `weight`, and sums are divided by it when read."""

    def __init__(self, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._begin_s = self._began_s = self._now_s = now_s
        self.weight = 1.0

    def move(self, now_s: float) -> float:
        """Move on to `now_s`. Returns the factor for all sums: not 1 only when weights begin anew (RAISE_WINDOWS)."""
        self._now_s = max(now_s, self._now_s)
        passed = (self._now_s - self._begin_s) / self._window_s
        if passed > RAISE_WINDOWS:
            self._begin_s, self.weight = self._now_s, 1.0
            return exp(-passed)
        self.weight = exp(passed)
        return 1.0

    @property
    def now_s(self) -> float:
        """Time of the last move."""
        return self._now_s

    @property
    def age_s(self) -> float:
        """Seconds covered by the sums: a window, or less if less has passed."""
        return min(self._now_s - self._began_s, self._window_s)

    @property
    def per_hour(self) -> float:
        """Factor from a faded sum to an hourly rate, corrected if less than a window has passed. Within the first
        seconds the rate is not meaningful."""
        age_s = max(self._now_s - self._began_s, 1.0)
        return 3_600.0 / self._window_s / (1 - exp(-age_s / self._window_s))
