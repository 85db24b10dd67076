"""What this router has learned, for others that have learned nothing yet; and theirs, while we have not.

Whoever has seen answers of a kind of replicas keeps to what it saw: in front of the same engines all learn the same.
"""

from __future__ import annotations

from itertools import chain
from math import isfinite

from router.core.learned.speeds import Speeds
from router.core.placement.router import Router
from router.core.sharing.messages import (
    KIND_MAX,
    KINDS_MAX,
    MEANS,
    BadMessage,
    SharedFit,
    SharedModels,
    SharedSpeeds,
)

OBSERVATIONS_MAX = 50  # another router's fit counts for so many at most: sums forget what is longer ago
MAGNITUDE_MAX = 1e15  # no sum and no mean is that large


def learned(router: Router) -> SharedModels | None:
    """What there is to tell; None before anything was learned."""
    kinds = router.fleet.means.speeds
    speeds = [_told(kind, each) for kind, each in kinds.items() if each.answers and len(kind) <= KIND_MAX]
    reused, ended = router.reuse.counts
    return SharedModels(speeds[:KINDS_MAX], reused, ended) if speeds else None


def adopt(router: Router, models: SharedModels) -> None:
    """Take what another router has learned, where this one has learned nothing. Raises BadMessage."""
    numbers = chain(models.reused, models.ended, *map(_numbers, models.speeds))
    if not all(isfinite(each) and abs(each) < MAGNITUDE_MAX for each in numbers):
        raise BadMessage("what it learned is not finite")
    router.reuse.adopt(models.reused, models.ended)
    for told in models.speeds:
        speeds = router.fleet.means.speeds.get(tuple(told.kind))
        if speeds is not None and not speeds.answers:
            _adopt(speeds, told)


def _told(kind: tuple[str, ...], speeds: Speeds) -> SharedSpeeds:
    prefill, steps = speeds.prefill, speeds.steps
    return SharedSpeeds(
        list(kind),
        SharedFit(prefill.sums.xx, prefill.sums.xy, prefill.observations),
        SharedFit(steps.sums.xx, steps.sums.xy, steps.observations),
        speeds.answer_tokens.counts,
        speeds.answers,
        speeds.decodes,
        [getattr(speeds, name) for name in MEANS],
    )


def _adopt(speeds: Speeds, told: SharedSpeeds) -> None:
    prefill, steps = told.prefill, told.steps
    if prefill.observations and not speeds.prefill.observations:
        speeds.prefill.adopt(prefill.xx, prefill.xy, min(prefill.observations, OBSERVATIONS_MAX))
    if steps.observations and not speeds.steps.observations:
        speeds.steps.adopt(steps.xx, steps.xy, min(steps.observations, OBSERVATIONS_MAX))
    if not speeds.answer_tokens.counts[1]:
        speeds.answer_tokens.adopt(*told.answer_counts)
    for name, value in zip(MEANS, told.means, strict=True):
        setattr(speeds, name, value)
    speeds.answers = min(told.answers, OBSERVATIONS_MAX)
    speeds.decodes = min(told.decodes, OBSERVATIONS_MAX)


def _numbers(told: SharedSpeeds) -> list[float]:
    fits = [*told.prefill.xx, *told.prefill.xy, *told.steps.xx, *told.steps.xy]
    return [*told.means, *told.answer_counts, *fits]
