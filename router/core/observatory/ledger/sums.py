"""What requests add up to: the layout of a sum, windows that fade, and percentiles of a histogram.

A window fades exponentially: what was added a window ago counts for a third of what is added now. Nothing is faded
where it lies. What is added is weighed the heavier the later it comes, and a sum is read against the weight of now,
which comes to the same:

    sum of x * exp((t - now) / window) = (sum of x * exp((t - begin) / window)) / exp((now - begin) / window)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp

from router.core.facts.misses import Miss

# Places in a sum; the reasons of misses stand behind the others.
REQUESTS, PROMPT, PREDICTED, HIT, REPLAY, REPLAYS, UNTOLD, TOOL_CALLS, SAVED_MS = range(9)  # UNTOLD: replays or not
VERIFIED, VERIFIED_HIT, VERIFIED_PREDICTED = range(9, 12)  # prompt tokens of answers whose engine told what was cached
MISSES = 12
SIZE = MISSES + len(Miss)
AT = {miss: MISSES + number for number, miss in enumerate(Miss)}

TTFT_S = tuple(round(0.005 * 1.25**step, 6) for step in range(50))  # bounds of buckets, to 280 s
RAISE_WINDOWS = 256.0  # windows after which weights begin anew: e^256 is nothing that a float cannot hold
AGAIN_S = 0.25


def zeros() -> list[float]:
    """A sum of nothing."""
    return [0.0] * SIZE


def misses_of(sums: Sequence[float]) -> dict[str, int]:
    """Tokens by reason, of all reasons."""
    return {miss.value: round(sums[at]) for miss, at in AT.items()}


def verified_of(sums: Sequence[float]) -> dict[str, int]:
    """Prompt tokens of answers whose engine told how many were cached; those that it found, and those that it was
    predicted to find."""
    return {
        "verified_tokens": round(sums[VERIFIED]),
        "verified_hit_tokens": round(sums[VERIFIED_HIT]),
        "verified_predicted_tokens": round(sums[VERIFIED_PREDICTED]),
    }


def ratio(part: float, whole: float) -> float | None:
    """The quotient, to four digits; None where there is nothing to divide by."""
    return round(part / whole, 4) if whole > 1e-9 else None


def percentile(counts: Sequence[float], bounds: Sequence[float], part: float) -> float | None:
    """A percentile of a histogram with an open last bucket, taken as even within a bucket; None where it is empty."""
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
    """A ratio over a window of its own."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._part = self._whole = self._at_s = 0.0

    def add(self, part: float, whole: float, now_s: float) -> None:
        """Add to part and whole, and fade what was added before; steps of less than AGAIN_S are let pass."""
        if now_s > self._at_s + AGAIN_S:  # records of several workers need not come in order
            fade = exp((self._at_s - now_s) / self._window_s)
            self._part, self._whole, self._at_s = self._part * fade, self._whole * fade, now_s
        self._part += part
        self._whole += whole

    @property
    def value(self) -> float | None:
        """None until something was added."""
        return self._part / self._whole if self._whole > 1e-9 else None


class Fading:
    """Weights of a window. `weight` is what to multiply with when something is added, and to divide by when read."""

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
        """The time up to which all was moved."""
        return self._now_s

    @property
    def age_s(self) -> float:
        """Seconds that sums are of: a window, or less where less has passed."""
        return min(self._now_s - self._began_s, self._window_s)

    @property
    def per_hour(self) -> float:
        """What a faded sum is to be multiplied with to be a rate by the hour: less than a window may have passed. Of
        the first seconds it is no rate that says anything."""
        age_s = max(self._now_s - self._began_s, 1.0)
        return 3_600.0 / self._window_s / (1 - exp(-age_s / self._window_s))
