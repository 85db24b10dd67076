"""What this router has learned, for the others, and what they have.

Speeds are fitted to sums of observations (core/learned/least_squares.py), and sums of several routers add up: all fit
to the same, though each sees a part of the answers. Means and chances of reuse need no such care: each sees enough of
them, and only who has seen nothing yet begins with another's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import isfinite

from router.core.fleet.member import Member
from router.core.learned.prefill import GUESS_WEIGHT, PRIOR_WEIGHT, PrefillFit, PrefillModel
from router.core.learned.speeds import Speeds
from router.core.learned.steps import GUESS_WEIGHT as STEP_GUESS_WEIGHT
from router.core.learned.steps import PRIOR_WEIGHT as STEP_PRIOR_WEIGHT
from router.core.learned.steps import StepFit, StepModel
from router.core.placement.router import Router
from router.core.sharing.engines import number_of
from router.core.sharing.messages import (
    KIND_MAX,
    KINDS_MAX,
    MEANS,
    BadMessage,
    SharedFit,
    SharedFits,
    SharedModels,
    SharedSpeeds,
)

ANSWERS_MAX = 50  # another router's means count for so many answers at most
MAGNITUDE_MAX = 1e15  # no sum and no mean is that large


def learned(router: Router) -> SharedModels | None:
    """What there is to tell; None before anything was learned."""
    kinds = router.fleet.means.speeds
    speeds = [_told(kind, each) for kind, each in kinds.items() if each.answers and len(kind) <= KIND_MAX]
    reused, ended = router.reuse.counts
    return SharedModels(speeds[:KINDS_MAX], reused, ended) if speeds else None


def fits_of(router: Router, ids: Iterable[str]) -> list[SharedFits]:
    """What was learned of the own speeds of these replicas; of some nothing was."""
    found, members = [], router.fleet.members
    for id_ in ids:
        member = members.get(id_)
        if member is not None and member.fit.observations + member.steps.observations:
            fits = SharedFits(number_of(id_), _fit(member.fit), _fit(member.steps))
            found.append(fits)
    return found


def take_models(router: Router, name: str, models: SharedModels) -> None:
    """Take what another router has learned of kinds of replicas: its observations count as ours, and its means where
    there are none here. Raises BadMessage."""
    _check(chain(models.reused, models.ended, *map(_numbers, models.speeds)))
    router.reuse.adopt(models.reused, models.ended)
    for told in models.speeds:
        speeds = router.fleet.means.speeds.get(tuple(told.kind))
        if speeds is not None:
            prefill, steps = told.prefill, told.steps
            speeds.prefill.tell(name, prefill.xx, prefill.xy, PrefillModel(), GUESS_WEIGHT)
            speeds.steps.tell(name, steps.xx, steps.xy, StepModel(), STEP_GUESS_WEIGHT)
            if not speeds.answers:
                _adopt(speeds, told)


def take_fits(name: str, member: Member, fits: SharedFits) -> None:
    """Take what another router has learned of a replica's own speed. Raises BadMessage."""
    prefill, steps, speeds = fits.prefill, fits.steps, member.speeds
    _check([*prefill.xx, *prefill.xy, *steps.xx, *steps.xy])
    member.fit.tell(name, prefill.xx, prefill.xy, speeds.prefill.model, PRIOR_WEIGHT)
    member.steps.tell(name, steps.xx, steps.xy, speeds.steps.model, STEP_PRIOR_WEIGHT)


def _check(numbers: Iterable[float]) -> None:
    if not all(isfinite(each) and abs(each) < MAGNITUDE_MAX for each in numbers):
        raise BadMessage("what it learned is not finite")


def _fit(fit: PrefillFit | StepFit) -> SharedFit:
    return SharedFit(fit.sums.xx, fit.sums.xy, fit.observations)


def _told(kind: tuple[str, ...], speeds: Speeds) -> SharedSpeeds:
    return SharedSpeeds(
        list(kind),
        _fit(speeds.prefill),
        _fit(speeds.steps),
        speeds.answer_tokens.counts,
        speeds.answers,
        speeds.decodes,
        [getattr(speeds, name) for name in MEANS],
    )


def _adopt(speeds: Speeds, told: SharedSpeeds) -> None:
    if not speeds.answer_tokens.counts[1]:
        speeds.answer_tokens.adopt(*told.answer_counts)
    for name, value in zip(MEANS, told.means, strict=True):
        setattr(speeds, name, value)
    speeds.answers = min(told.answers, ANSWERS_MAX)
    speeds.decodes = min(told.decodes, ANSWERS_MAX)


def _numbers(told: SharedSpeeds) -> list[float]:
    fits = [*told.prefill.xx, *told.prefill.xy, *told.steps.xx, *told.steps.xy]
    return [*told.means, *told.answer_counts, *fits]
