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
from router.core.types.replicas import Replica, matches_address

NOBODY: frozenset[str] = frozenset()


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
    if whole and fleet.stage_only:
        members = [m for m in members if m.id not in fleet.stage_only] or members
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
    return [m for m in members if m.id not in fleet.stage_only and _is_fit(m, now_s)] or whole


def _is_fit(member: ReplicaState, now_s: float) -> bool:
    return member.breaker.allows(now_s) and member.restrictions.rest_until_s <= now_s
