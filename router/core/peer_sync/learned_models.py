"""Exchange of learned values between routers.

The speeds of a kind are fitted to sums of observations (core/estimators/least_squares.py), and the sums of several
routers can be added. The same holds for the evidence for a replica's factor (core/estimators/speed_factor.py). So all
routers learn the same, though each observes only a part of the answers. Means and probabilities of reuse need no sums:
each router observes enough of them, and only a router without observations starts with another router's values.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import isfinite

from router.core.estimators.decode_step import StepFit, StepModel
from router.core.estimators.model_speeds import ModelSpeeds
from router.core.estimators.prefill import PrefillFit, PrefillModel
from router.core.estimators.speed_factor import SpeedFactor
from router.core.fleet.member import ReplicaState
from router.core.peer_sync.cache_epochs import number_of
from router.core.peer_sync.messages import (
    KIND_MAX,
    KINDS_MAX,
    MEANS,
    BadMessage,
    FitSums,
    SharedFactor,
    SharedFits,
    SharedModels,
    SharedSpeeds,
)
from router.core.placement.router import Router

ANSWERS_MAX = 50  # limit on the weight of another router's means, in answers
MAGNITUDE_MAX = 1e15  # sums and means are below this


def export_models(router: Router) -> SharedModels | None:
    """Return the learned values to share; None before the first."""
    kinds = router.fleet.means.speeds
    there = [(kind, each) for kind, each in kinds.items() if each.answer_tokens.counts[0] and len(kind) <= KIND_MAX]
    speeds = [_export_speeds(kind, each) for kind, each in there]
    reused, ended = router.reuse.counts
    return SharedModels(speeds[:KINDS_MAX], reused, ended) if speeds else None


def fits_of(router: Router, ids: Iterable[str]) -> list[SharedFits]:
    """Return the evidence for the speeds of these replicas, also if all of it has faded. Replicas that never had any
    are omitted."""
    found, members = [], router.fleet.members
    for id_ in ids:
        member = members.get(id_)
        if member is None:
            continue
        prefill, steps = member.own_speed.prefill_factor, member.own_speed.step_factor
        if prefill.had_evidence or steps.had_evidence:
            found.append(SharedFits(number_of(id_), _factor(prefill), _factor(steps)))
    return found


def take_models(router: Router, name: str, models: SharedModels) -> None:
    """Apply another router's values for kinds of replicas. Its observations and counts add to ours. Its means are used
    only if this router has no means of its own. Raises BadMessage."""
    check_finite([*models.reused, *models.ended, *chain.from_iterable(map(_numbers, models.speeds))])
    router.reuse.adopt(models.reused, models.ended)
    for told in models.speeds:
        speeds = router.fleet.means.speeds.get(tuple(told.kind))
        if speeds is not None:
            prefill, steps = told.prefill, told.steps
            speeds.prefill.tell(name, prefill.xx, prefill.xy)
            speeds.steps.tell(name, steps.xx, steps.xy)
            speeds.answer_tokens.tell(name, *map(abs, told.answer_counts))
            if not speeds.answers:
                _adopt(speeds, told)


def take_fits(name: str, member: ReplicaState, fits: SharedFits) -> None:
    """Apply another router's evidence for the speed of a replica. Raises BadMessage."""
    prefill, steps = fits.prefill, fits.steps
    check_finite([prefill.log_sum, prefill.weight, steps.log_sum, steps.weight])
    member.own_speed.prefill_factor.share(name, prefill.log_sum, prefill.weight)
    member.own_speed.step_factor.share(name, steps.log_sum, steps.weight)


def adopt_models(router: Router, models: SharedModels) -> None:
    """Start with values that were learned before this router started, if none were learned here. They become our own
    observations, and fade like these. Raises BadMessage."""
    check_finite([*models.reused, *models.ended, *chain.from_iterable(map(_numbers, models.speeds))])
    router.reuse.adopt(models.reused, models.ended)
    for told in models.speeds:
        speeds = router.fleet.means.speeds.get(tuple(told.kind))
        if speeds is not None and not speeds.answers:
            prefill, steps = told.prefill, told.steps
            speeds.prefill.adopt(prefill.xx, prefill.xy, prefill.observations)
            speeds.steps.adopt(steps.xx, steps.xy, steps.observations)
            _adopt(speeds, told)


def check_finite(numbers: list[float]) -> None:
    """Raise BadMessage if any of the numbers cannot be a sum or a mean."""
    if not all(map(isfinite, numbers)) or max(map(abs, numbers), default=0.0) >= MAGNITUDE_MAX:
        raise BadMessage("a learned value is not finite")


def _fit(fit: PrefillFit | StepFit) -> FitSums:
    return FitSums(fit.sums.xx, fit.sums.xy, fit.observations)


def _factor(factor: SpeedFactor[PrefillModel] | SpeedFactor[StepModel]) -> SharedFactor:
    return SharedFactor(*factor.evidence, factor.observations)


def _export_speeds(kind: tuple[str, ...], speeds: ModelSpeeds) -> SharedSpeeds:
    return SharedSpeeds(
        list(kind),
        _fit(speeds.prefill),
        _fit(speeds.steps),
        speeds.answer_tokens.counts,
        speeds.answers,
        speeds.decodes,
        [getattr(speeds, name) for name in MEANS],
    )


def _adopt(speeds: ModelSpeeds, told: SharedSpeeds) -> None:
    for name, value in zip(MEANS, told.means, strict=True):
        setattr(speeds, name, value)
    speeds.answers = min(told.answers, ANSWERS_MAX)
    speeds.decodes = min(told.decodes, ANSWERS_MAX)


def _numbers(told: SharedSpeeds) -> list[float]:
    fits = [*told.prefill.xx, *told.prefill.xy, *told.steps.xx, *told.steps.xy]
    return [*told.means, *told.answer_counts, *fits]
