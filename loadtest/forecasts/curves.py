"""Forecasts of the time until a prompt is asked for again: survival curves over the buckets of `router.core.learned`.

A curve has a hazard for each bucket of idle seconds: the chance to be asked for within it, of what was not asked for
before it. Within a bucket the chance grows as if the hazard were spread evenly over its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2

from loadtest.forecasts.recordings import Answer
from router.core.learned.reuse import BUCKETS, HORIZON_S, PRIOR, bucket

EDGES_S = (0.0, *(2.0**power for power in range(BUCKETS - 1)), HORIZON_S)
"""Where buckets begin, and where the last one ends."""
KIND_WEIGHT = 20.0
"""Observations of its own at which a kind's curve is half its own and half everybody's."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A hazard for each bucket."""

    hazards: tuple[float, ...]

    def within(self, idle_s: float, more_s: float) -> float:
        """The chance that what has been idle so long is asked for within so many seconds more."""
        return 1 - self._lasts(idle_s + more_s) / self._lasts(idle_s)

    def _lasts(self, idle_s: float) -> float:
        """The chance to be idle so long."""
        lasts = 1.0
        for hazard, (begins_s, ends_s) in zip(self.hazards, pairwise(EDGES_S), strict=True):
            if idle_s <= begins_s:
                break
            lasts *= (1 - hazard) ** min(1.0, (idle_s - begins_s) / (ends_s - begins_s))
        return lasts


def of_odds(odds: Sequence[float]) -> Curve:
    """The curve behind the chances that `ReuseMemory.odds` gives: that something is ever asked for again."""
    lasts = [1 - chance for chance in odds] + [1.0]
    return Curve(tuple(1 - here / behind for here, behind in pairwise(lasts)))


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds from an answer's end until its prompt was asked for again, or, if it was not, as long as is known."""

    seconds: float
    again: bool


def gap_of(answer: Answer) -> Gap | None:
    """What is known of an answer; None for nothing."""
    if answer.again_s <= answer.told_s and answer.again_s < inf:
        return Gap(answer.again_s, again=True)
    return Gap(answer.told_s, again=False) if answer.told_s > 0 else None


def fitted(gaps: Iterable[Gap], towards: Curve | None = None) -> Curve:
    """The estimate of Kaplan and Meier (1958) with the prior of `ReuseMemory`; or, `towards` a curve, drawn to it the
    more the fewer gaps there are."""
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


# Kinds of answers: what is known when one ends

Kind = Callable[[Answer], int]
FOLLOWED_S = 16.0
"""Hindsight: a prompt that comes within this is called a program's."""


def by_length(answer: Answer) -> int:
    """The power of two of its tokens, from 64 to 2,048."""
    return min(11, max(6, int(log2(answer.turn.output_tokens))))


def by_gap(answer: Answer) -> int:
    """How long the conversation had been idle before, by powers of four seconds; -1 where it began."""
    return -1 if answer.before_s == inf else min(4, bucket(answer.before_s) // 2)


def by_both(answer: Answer) -> int:
    """Both together."""
    return 16 * by_length(answer) + by_gap(answer)


def by_agent(answer: Answer) -> int:
    """Whether a sub-agent asked."""
    return bool(answer.turn.request.agent)


def if_last(answer: Answer) -> int:
    """Hindsight: whether it is the last one of its conversation, as far as was recorded."""
    return answer.again_s == inf


def if_soon(answer: Answer) -> int:
    """Hindsight: whether the next prompt comes within FOLLOWED_S, later, or never as far as was recorded."""
    return 0 if answer.again_s <= FOLLOWED_S else 1 + if_last(answer)
