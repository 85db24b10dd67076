"""Which replicas may take a request: those that serve its model, less those that it may not go to or had better not."""

from __future__ import annotations

from collections.abc import Collection

from router.core.facts.replicas import Replica, is_among
from router.core.fleet.fitness import Fitness
from router.core.fleet.fleet import Fleet
from router.core.fleet.member import Member
from router.core.fleet.models import NoReplica


def who_may(
    fleet: Fleet,
    fitness: Fitness,
    model: str | None,
    exclude: frozenset[str],
    only: str | frozenset[str] | None,
    full: Collection[str],
    now_s: float,
) -> list[Member]:
    """Members that may take a request for this model (None: any), as Router.route says of the arguments. Not to be
    changed. Raises NoReplica, and Shed where all of them have asked for a rest."""
    members = fleet.usable() if model is None else fleet.serving(model)
    if isinstance(only, str):
        warming_up = fleet.warming_up.get(only)
        if warming_up is not None and (model is None or model in warming_up.models):
            members = [warming_up]
        members = [m for m in members if m.id == only]
    elif only is not None:
        members = [m for m in members if is_among(m.id, only)]
    if exclude:
        members = [m for m in members if m.id not in exclude]
    if fleet.guarded:
        members = fitness.allowed(members, now_s, retry=bool(exclude))
    if not isinstance(only, str):
        members = fleet.whole(members)
    if exclude:  # a second failure would be the client's: avoid members that have just failed, if there are others
        members = [m for m in members if not m.breaker.failures] or members
        servers = {Replica(id_).url for id_ in exclude}  # ranks of one server mostly fail together
        members = [m for m in members if m.replica.url not in servers] or members
    if not members:
        raise NoReplica
    if full:
        members = [m for m in members if m.id not in full] or members
    return members


def only_prefill(
    fleet: Fleet,
    model: str | None,
    exclude: frozenset[str],
    among: frozenset[str] | None,
    full: Collection[str],
    now_s: float,
) -> list[Member]:
    """Members that take a request's prefill leg and no whole requests, and of which nothing says that they had better
    not. One whose breaker was open long enough is among them while it has no trial."""
    found = list[Member]()
    for id_, m in fleet.prefillers.items():
        if id_ in exclude or id_ in full or not (m.ready and fleet.legs.may_prefill(m)):
            continue
        if (model is not None and model not in m.models) or (among is not None and not is_among(id_, among)):
            continue
        if m.breaker.allows(now_s) and m.rest_until_s <= now_s:
            found.append(m)
    return found
