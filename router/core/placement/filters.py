"""Filter of the replicas that may take a request.

A replica is eligible if it serves the request's model and is not excluded. Replicas that are likely to fail or are full
are avoided.
"""

from __future__ import annotations

from collections.abc import Collection

from router.core.fleet.eligibility import Eligibility
from router.core.fleet.member import ReplicaState
from router.core.fleet.models import NoReplicaReady
from router.core.fleet.registry import Fleet
from router.core.types.placements import Shed
from router.core.types.replicas import Replica, matches_address


def filter_members(
    fleet: Fleet,
    fitness: Eligibility,
    model: str | None,
    exclude: frozenset[str],
    only: str | frozenset[str] | None,
    full: Collection[str],
    now_s: float,
    *,
    whole: bool = False,
) -> list[ReplicaState]:
    """Return the members that may take a request for this model (None: any); the arguments are those of `Router.route`.
    With `whole` these are members that serve a request without disaggregated prefill, if there are any. The list must
    not be modified. Raises NoReplicaReady, and Shed if all members have requested a cooldown."""
    members = fleet.usable() if model is None else fleet.list_serving(model)
    if whole and fleet.legs.hands:
        members = fleet.legs.filter_unsplit(members)
    if isinstance(only, str):
        warming_up = fleet.warming_up.get(only)
        if warming_up is not None and (model is None or model in warming_up.models):
            members = [warming_up]
        members = [m for m in members if m.id == only]
    elif only is not None:
        members = [m for m in members if matches_address(m.id, only)]
    if exclude:
        members = [m for m in members if m.id not in exclude]
    if fleet.prefillers and not isinstance(only, str):
        members = _filter_unsplit(fleet, members, now_s)
    if fleet.restricted:
        members = fitness.filter_allowed(members, now_s, retry=bool(exclude))
    if exclude:  # A second failure would reach the client: avoid members that have just failed if there are others.
        members = [m for m in members if not m.breaker.failures] or members
        servers = {Replica(id_).url for id_ in exclude}  # the ranks of one server mostly fail together
        members = [m for m in members if m.replica.url not in servers] or members
    if not members:
        raise NoReplicaReady
    if full:
        members = [m for m in members if m.id not in full] or members
    return members


def _filter_unsplit(fleet: Fleet, members: list[ReplicaState], now_s: float) -> list[ReplicaState]:
    """Return the members that take whole requests. If none of them is fit, return the fit members of the prefill role
    that can serve a whole request."""
    whole = fleet.filter_unsplit(members)
    if not fleet.restricted or any(_is_fit(m, now_s) for m in whole):
        return whole
    return [m for m in members if fleet.legs.serves_unsplit(m) and _is_fit(m, now_s)] or whole


def _is_fit(member: ReplicaState, now_s: float) -> bool:
    return member.breaker.allows(now_s) and member.rest_until_s <= now_s


def filter_prefill_members(
    fleet: Fleet,
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
    there = _prefillers(fleet, model, exclude, among)
    awake = [m for m in there if m.rest_until_s <= now_s]
    found = [m for m in awake if m.breaker.allows(now_s)]
    if fleet.restricted:
        found = fitness.filter_with_room(found, now_s) or found
    if must and not found and not exclude:
        found = awake
    return [m for m in found if m.id not in full] or ([] if whole else found)


def refusal(
    fleet: Fleet, model: str | None, exclude: frozenset[str], among: frozenset[str] | None, now_s: float
) -> NoReplicaReady | Shed:
    """Return the error for a request that needs two replicas and cannot have them. It is Shed if all replicas that
    could prefill the request have requested a cooldown, and NoReplicaReady otherwise."""
    there = _prefillers(fleet, model, exclude, among)
    if not there or any(m.rest_until_s <= now_s for m in there):
        return NoReplicaReady()
    after_s = min([m.rest_until_s for m in there]) - now_s
    return Shed("overloaded", "All matching prefill replicas are in cooldown; try again later.", after_s)


def _prefillers(
    fleet: Fleet, model: str | None, exclude: frozenset[str], among: frozenset[str] | None
) -> list[ReplicaState]:
    """Return the ready members that take the prefill stage of a request and no whole requests."""
    found = list[ReplicaState]()
    for id_, m in fleet.prefillers.items():
        if id_ in exclude or not (m.ready and fleet.legs.may_prefill(m)):
            continue
        if (model is None or model in m.models) and (among is None or matches_address(id_, among)):
            found.append(m)
    return found
