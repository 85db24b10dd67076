"""Ring of the last ten minutes in steps of five seconds. Steps that are over never change, and are rendered once."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from typing import Any

from router.core.insights.ledger.decaying_sums import (
    AT,
    HIT,
    PREDICTED,
    PROMPT,
    REPLAY,
    REPLAYS,
    REQUESTS,
    TTFT_S,
    percentile,
    ratio,
    verified_of,
    zeros,
)

STEP_S = 5
STEPS = 120
_MISSES = [(miss.value, at) for miss, at in AT.items()]


class Step:
    """One step. Callers add to its fields directly: a call would cost more."""

    __slots__ = ("number", "point", "sums", "ttft")

    def __init__(self, number: int) -> None:
        self.number = number  # steps since 1970
        self.sums = zeros()
        self.ttft = [0.0] * (len(TTFT_S) + 1)
        self.point: dict[str, Any] | None = None  # row of the step on pages, rendered once the step is over


class Timeline:
    """The steps of the last ten minutes. `now` is the current step."""

    def __init__(self, now_s: float) -> None:
        self.now = Step(int(now_s // STEP_S))
        self._over: deque[Step] = deque(maxlen=STEPS - 1)

    @property
    def end_s(self) -> float:
        """End time of the current step."""
        return (self.now.number + 1) * STEP_S

    def move(self, now_s: float) -> None:
        """Begin a new step if the current one is over by `now_s`."""
        number = int(now_s // STEP_S)
        if number > self.now.number:
            self.now.point = _point(self.now)
            self._over.append(self.now)
            self.now = Step(number)

    def points(self) -> list[dict[str, Any]]:
        """Return rows of all steps of the last ten minutes, oldest first. A step without requests is all zeros."""
        last = self.now.number
        known = {step.number: step for step in self._over}
        points = []
        for number in range(last - STEPS + 1, last):
            step = known.get(number)
            points.append(step.point if step is not None and step.point is not None else _empty(number))
        return [*points, _point(self.now)]

    def ttft_s(self, *parts: float) -> list[float | None]:
        """Return percentiles of the last ten minutes."""
        counts = list(map(sum, zip(*(step.ttft for step in self._recent()), strict=True)))
        return [_round_seconds(percentile(counts, TTFT_S, part)) for part in parts]

    def diversity(self) -> float | None:
        """Return the part of the last ten minutes' requests that were not replays."""
        steps = self._recent()
        requests = sum(step.sums[REQUESTS] for step in steps)
        return ratio(requests - sum(step.sums[REPLAYS] for step in steps), requests)

    def _recent(self) -> list[Step]:
        oldest = self.now.number - STEPS
        return [step for step in (*self._over, self.now) if step.number > oldest]


def _round_seconds(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None


def _point(step: Step) -> dict[str, Any]:
    sums, (p50_s, p90_s) = step.sums, map(percentile, repeat(step.ttft), repeat(TTFT_S), (0.5, 0.9))
    return {
        "at_s": step.number * STEP_S,
        "requests": round(sums[REQUESTS]),
        "prompt_tokens": round(sums[PROMPT]),
        "predicted_tokens": round(sums[PREDICTED]),
        "hit_tokens": round(sums[HIT]),
        "genuine_tokens": round(sums[HIT] - sums[REPLAY]),
        "replay_tokens": round(sums[REPLAY]),
        **verified_of(sums),
        "misses": {miss: round(sums[at]) for miss, at in _MISSES if sums[at]},
        "ttft_p50_s": _round_seconds(p50_s),
        "ttft_p90_s": _round_seconds(p90_s),
    }


_EMPTY = _point(Step(0))


def _empty(number: int) -> dict[str, Any]:
    return {**_EMPTY, "at_s": number * STEP_S}
