"""Forecasts of the time until a prompt's next use: survival curves over the buckets of `router.core.estimators`.

A curve has a hazard for each bucket of idle seconds: the chance of a next use within the bucket, given that it did not
come before. Within a bucket the chance grows as if the hazard were spread evenly over its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2

from loadtest.reuse_forecast.recordings import Answer
from router.core.estimators.reuse import BUCKETS, HORIZON_S, PRIOR, bucket

EDGES_S = (0.0, *(2.0**power for power in range(BUCKETS - 1)), HORIZON_S)
"""Start of each bucket, and end of the last one."""
KIND_WEIGHT = 20.0
"""Number of a kind's observations at which its curve is half its own and half that of all kinds."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A hazard for each bucket."""

    hazards: tuple[float, ...]

    def within(self, idle_s: float, more_s: float) -> float:
        """Return the chance of a next use within `more_s` seconds, given that a prompt was idle for `idle_s`."""
        return 1 - self._lasts(idle_s + more_s) / self._lasts(idle_s)

    def _lasts(self, idle_s: float) -> float:
        """Return the chance to be idle for `idle_s`."""
        lasts = 1.0
        for hazard, (begins_s, ends_s) in zip(self.hazards, pairwise(EDGES_S), strict=True):
            if idle_s <= begins_s:
                break
            lasts *= (1 - hazard) ** min(1.0, (idle_s - begins_s) / (ends_s - begins_s))
        return lasts


def curve_from_odds(odds: Sequence[float]) -> Curve:
    """Return the curve that corresponds to `ReuseModel.reuse_probability`, the chances of any later use."""
    lasts = [1 - chance for chance in odds] + [1.0]
    return Curve(tuple(1 - here / behind for here, behind in pairwise(lasts)))


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds from an answer's end until the prompt's next use, or without one, the length of the observation."""

    seconds: float
    again: bool


def gap_of(answer: Answer) -> Gap | None:
    """Return the gap after an answer; None if its length is unknown."""
    if answer.again_s <= answer.told_s and answer.again_s < inf:
        return Gap(answer.again_s, again=True)
    return Gap(answer.told_s, again=False) if answer.told_s > 0 else None


def fit_curve(gaps: Iterable[Gap], towards: Curve | None = None) -> Curve:
    """Return the estimate of Kaplan and Meier (1958), with the prior of `ReuseModel`.

    With a curve in `towards`, the estimate is drawn to it instead, more strongly with fewer gaps.
    """
    again, at_risk = [0.0] * BUCKETS, [0.0] * BUCKETS
    for gap in gaps:
        last = bucket(gap.seconds)
        for b in range(last + 1):
            at_risk[b] += 1
        again[last] += gap.again
    if towards is not None:
        drawn = zip(again, at_risk, towards.hazards, strict=True)
        return Curve(tuple((n + KIND_WEIGHT * own) / (all_ + KIND_WEIGHT) for n, all_, own in drawn))
    again[-1] += PRIOR
    return Curve(tuple(n / (all_ + 2 * PRIOR) for n, all_ in zip(again, at_risk, strict=True)))


# Kinds of answers: the information at an answer's end

Kind = Callable[[Answer], int]
FOLLOWED_S = 16.0
"""Hindsight: a prompt whose successor comes within this time is attributed to a program."""


def classify_length(answer: Answer) -> int:
    """Return the power of two of its tokens, from 64 to 2,048."""
    return min(11, max(6, int(log2(answer.turn.output_tokens))))


def classify_gap(answer: Answer) -> int:
    """Return the idle time of the conversation before this prompt, by powers of four seconds; -1 at its beginning."""
    return -1 if answer.before_s == inf else min(4, bucket(answer.before_s) // 2)


def classify_length_gap(answer: Answer) -> int:
    """Return the kind by length and by gap."""
    return 16 * classify_length(answer) + classify_gap(answer)


def classify_agent(answer: Answer) -> int:
    """Return True if a sub-agent sent the prompt."""
    return bool(answer.turn.request.agent)


def classify_last(answer: Answer) -> int:
    """Hindsight: return True if it is the last recorded one of its conversation."""
    return answer.again_s == inf


def classify_soon(answer: Answer) -> int:
    """Hindsight: return 0 if the next prompt comes within FOLLOWED_S, 1 if later, 2 if never within the recording."""
    return 0 if answer.again_s <= FOLLOWED_S else 1 + classify_last(answer)
