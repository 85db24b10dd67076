"""Selection of the replicas that take the prefill stage of a request and no whole requests."""

from __future__ import annotations

from collections.abc import Collection

from router.core.disagg.pairs import DisaggPairs
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.member import ReplicaState
from router.core.fleet.models import NoReplicaReady
from router.core.fleet.registry import Fleet
from router.core.types.placements import Shed
from router.core.types.replicas import matches_address


def filter_prefill_members(
    fleet: Fleet,
    pairs: DisaggPairs,
    fitness: Eligibility,
    model: str | None,
    exclude: frozenset[str],
    among: frozenset[str] | None,
    full: Collection[str],
    now_s: float,
    *,
    must: bool,
    whole: bool = False,
) -> list[ReplicaState]:
    """Return the fit members that take the prefill stage of a request and no whole requests.

    A member with a half-open breaker is included if it has no trial request. A member that has just recovered is
    included if it is below its slow-start limit. If two replicas are required (`must`) and no such member is left,
    members with open breakers are included, as in `Eligibility.filter_allowed`, except for a retry. A full member is
    included only if all of them are full and no replica has capacity for the request as a `whole`.
    """
    there = ready_prefillers(fleet, pairs, model, exclude, among)
    awake = [m for m in there if m.restrictions.rest_until_s <= now_s]
    found = [m for m in awake if m.breaker.allows(now_s)]
    if fleet.restricted:
        found = fitness.filter_with_room(found, now_s) or found
    if must and not found and not exclude:
        found = awake
    return [m for m in found if m.id not in full] or ([] if whole else found)


def refusal(
    fleet: Fleet,
    pairs: DisaggPairs,
    model: str | None,
    exclude: frozenset[str],
    among: frozenset[str] | None,
    now_s: float,
) -> NoReplicaReady | Shed:
    """Return the error for a request that needs two replicas and cannot have them. It is Shed if all replicas that
    could prefill the request have requested a cooldown, and NoReplicaReady otherwise."""
    there = ready_prefillers(fleet, pairs, model, exclude, among)
    if not there or any(m.restrictions.rest_until_s <= now_s for m in there):
        return NoReplicaReady()
    after_s = min([m.restrictions.rest_until_s for m in there]) - now_s
    return Shed("overloaded", "All matching prefill replicas are in cooldown; try again later.", after_s)


def ready_prefillers(
    fleet: Fleet, pairs: DisaggPairs, model: str | None, exclude: frozenset[str], among: frozenset[str] | None
) -> list[ReplicaState]:
    """Return the ready members that take the prefill stage of a request and no whole requests."""
    found = list[ReplicaState]()
    for id_, m in fleet.prefillers.items():
        if id_ in exclude or not (m.ready and pairs.may_prefill(m)):
            continue
        if (model is None or model in m.models) and (among is None or matches_address(id_, among)):
            found.append(m)
    return found
