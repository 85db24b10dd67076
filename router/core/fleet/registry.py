"""Registry of replicas: membership, readiness, served models, and members that must be prewarmed before they serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from router.core.estimators.fleet_means import FleetMeans
from router.core.estimators.prefill import PrefillModel
from router.core.fleet.cold_estimates import ColdReplicaEstimates
from router.core.fleet.engine_counters import SHARE_ALL
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.pulls import Pulls
from router.core.fleet.ready_index import ReadyIndex
from router.core.types.replicas import Replica, ServedModel


class MemberObserver(Protocol):
    """State about members that is kept outside of Fleet."""

    def forget(self, replica: str) -> None:
        """Drop a replica that left or was replaced by another engine."""

    def forget_times(self, replica: str) -> None:
        """Forget learned times of a replica that serves other models now."""

    def on_engine_restarted(self, replica: str) -> None:
        """Forget the state of a replica's engine, which is a new process."""


@dataclass(slots=True)
class Fleet:
    """All replicas, in a stable order.

    Every request reads the set of ready members; it changes only by observations, and all of them are methods of this
    class. If no ready member serves a model, members with timed-out health checks serve it, because the checks
    themselves may be slow.
    """

    members: dict[str, ReplicaState] = field(default_factory=dict)
    means: FleetMeans = field(default_factory=FleetMeans)
    context_tokens_min: float = inf  # the shortest context that any replica has ever reported for a model
    share: float = 1.0  # mean over ready replicas of the known part of their prompt tokens (Member.known_share)
    restricted: dict[str, ReplicaState] = field(default_factory=dict)  # members with limited admission: eligibility.py
    # ids of members that should get no requests until their cache is warm
    warming: set[str] = field(default_factory=set)
    warming_up: dict[str, ReplicaState] = field(
        default_factory=dict
    )  # fit members that get no requests for that reason
    panics: bool = False  # True if a model is served only by members that are not ready
    roster: ReadyIndex = field(default_factory=ReadyIndex)  # ready members, and members by the models that they serve
    returned: dict[str, ReplicaState] = field(
        default_factory=dict
    )  # guarded members that Eligibility has not handled yet
    unlearned: ColdReplicaEstimates = field(init=False)
    pulls: Pulls = field(default_factory=Pulls)  # P2P KV transfers between replicas
    observers: list[MemberObserver] = field(default_factory=list)
    stage_only: set[str] = field(default_factory=set)  # ids of members that serve only one stage of a request
    # (lease, time, stall timeout) -> True if the replica of the request's other stage may cause the lease's delay.
    # None: each request has one stage.
    waits_for_peer: Callable[[Lease, float, float], bool] | None = None
    prefillers: dict[str, ReplicaState] = field(default_factory=dict)  # members that only prefill
    replaced: int = 0  # number of complete sets received from discovery
    _caches: int = 0  # caches counted so far, over all replicas
    _whole_of: tuple[list[ReplicaState], list[ReplicaState]] = field(default_factory=lambda: ([], []))  # see `whole`

    def __post_init__(self) -> None:
        self.unlearned = ColdReplicaEstimates(self.means)

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take a complete set of replicas. Return the ids that joined and the ids that left.

        Members that stay keep their state. If another engine has taken over an address, its id is in both lists.
        """
        self.replaced += 1
        wanted, members = {replica.id: replica for replica in replicas}, self.members
        left = [id_ for id_, m in members.items() if id_ not in wanted or wanted[id_].is_different_engine(m.replica)]
        for id_ in left:
            self.roster.leave(members.pop(id_))
            self.restricted.pop(id_, None)
            self.returned.pop(id_, None)
            self.unlearned.members.pop(id_, None)
            self.warming.discard(id_)
            self.pulls.forget(id_)
            for observer in self.observers:
                observer.forget(id_)
        joined = [id_ for id_ in wanted if id_ not in members]
        for id_ in joined:
            members[id_] = self.unlearned.members[id_] = ReplicaState(wanted[id_], self._new_life())
            self._assign_speeds(members[id_])
        for id_, replica in wanted.items():
            members[id_].replica = replica.merge_previous(members[id_].replica)
        self.prefillers = {id_: members[id_] for id_, replica in wanted.items() if replica.only_prefills}
        self._whole_of = [], []
        self._on_members_changed(*members.values())
        return joined, left

    def clear(self, id_: str) -> bool:
        """Start a new cache epoch for a member, with an empty cache. Return False if the id is unknown."""
        member = self.members.get(id_)
        if member is not None:
            member.cache_epoch = self._new_life()
        return member is not None

    def cache_epochs(self) -> set[int]:
        """Return the cache epochs of all members (Member.life)."""
        return {member.cache_epoch for member in self.members.values()}

    def _new_life(self) -> int:
        """Return the number of a new cache epoch, with an empty cache."""
        self._caches += 1
        return self._caches

    def observe_health(self, id_: str, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """Record one health observation. Return True if the member's fitness changed. Unknown ids are ignored.

        - `proof`: one failure is enough.
        - `silent`: the check timed out without any answer.
        """
        member = self.members.get(id_)
        if member is None:
            return False
        back, was_silent = ok and member.health.served, member.health.silent
        flipped = member.health.observe(ok, why, proof=proof, silent=silent)
        if flipped and back:
            self.restricted[id_] = self.returned[id_] = member
        if flipped or (was_silent != member.health.silent and not member.health.fit):
            self._on_members_changed(member)
        return flipped

    def warm_up(self, id_: str, warming: bool) -> bool:
        """Exclude a member from requests until its cache is warm (`warming`), or admit it again. Return True if that is
        a change.

        The member still gets requests while other ready members do not serve all of its models: an outage is worse than
        a cache miss.
        """
        member = self.members.get(id_)
        if member is None or (id_ in self.warming) is warming:
            return False
        (self.warming.add if warming else self.warming.discard)(id_)
        member.restrictions.warming_up = False  # unless `_find_warming_up` sets it again
        self._on_members_changed(member)
        return True

    def observe_models(self, member: ReplicaState, models: Iterable[ServedModel]) -> bool:
        """Record the models that a member serves now. Return True if they changed, which is rare among rounds of
        probes."""
        named = {model.name: model for model in models}
        if named == member.models:
            member.models.update(named)  # fields that are not compared may differ
            return False
        member.models = named
        self._assign_speeds(member)
        lengths = [model.max_model_len_tokens for model in named.values() if model.max_model_len_tokens]
        self.context_tokens_min = min([self.context_tokens_min, *lengths])
        self._on_members_changed(member)
        return True

    def member(self, id_: str) -> ReplicaState | None:
        """Return a replica's state, read-only; None for an unknown id."""
        return self.members.get(id_)

    def ready(self) -> list[ReplicaState]:
        """Return the members that may be sent requests. The list must not be changed."""
        return self.roster.ready()

    def list_serving(self, model: str) -> list[ReplicaState]:
        """Return the usable members that serve a model. The list must not be changed."""
        return self.roster.list_serving(model)

    def serving_alone(self, urls: Collection[str]) -> set[str]:
        """Return the servers, among these base URLs, that cannot be spared.

        Such a server has a ready member with a model that no ready member outside `urls` serves. If no member outside
        `urls` is ready, every server with a ready member counts.
        """
        inside = [member for member in self.ready() if member.replica.url in urls]
        outside = [member for member in self.ready() if member.replica.url not in urls]
        served = {name for member in outside for name in member.models}
        return {each.replica.url for each in inside if not outside or not served.issuperset(each.models)}

    def usable(self) -> list[ReplicaState]:
        """Return ready members, and those used because no ready member serves a model. The list must not be changed."""
        return self.roster.usable()

    def filter_unsplit(self, members: list[ReplicaState]) -> list[ReplicaState]:
        """Return the members of these that take whole requests, or all of them if none does. The list must not be
        changed.

        The roster returns the same list objects until its members change, so the result for the last list is cached.
        """
        if not self.prefillers:
            return members
        if self._whole_of[0] is not members:
            whole = [member for member in members if not member.replica.only_prefills]
            self._whole_of = members, whole or members
        return self._whole_of[1]

    def _on_members_changed(self, *members: ReplicaState) -> None:
        for member in members:
            self.roster.file(member)
        if self.warming or self.warming_up:
            self._find_warming_up()
        self.panics = self.roster.panics

    def _find_warming_up(self) -> None:
        """Find members to exclude from requests: those to be warmed, if other ready members serve all of their
        models."""
        roster, number = self.roster, self.roster.number
        looked_at = [self.members[id_] for id_ in self.warming | self.warming_up.keys() if id_ in self.members]
        looked_at.sort(key=lambda member: number(member.id))
        own: dict[str, int] = {}  # number of ready members by model that are themselves to be warmed
        for member in looked_at:
            if member.ready and member.id in self.warming:
                for name in member.models:
                    own[name] = own.get(name, 0) + 1
        for member in looked_at:
            others = (roster.ready_count(name) > own.get(name, 0) for name in member.models)
            member.restrictions.warming_up = member.id in self.warming and all(others)
        self.warming_up = {}
        for member in looked_at:
            roster.file(member)
            if member.restrictions.warming_up and member.health.fit and member.replica.ready:
                self.warming_up[member.id] = member

    def is_warming_up(self, id_: str) -> bool:
        """True if a fit member gets no requests until its cache is warm."""
        return id_ in self.warming_up

    def is_to_warm_up(self, id_: str) -> bool:
        """True if a member should get no requests until its cache is warm, whether it is fit or not."""
        return id_ in self.warming

    def prefill_model(self, id_: str = "") -> PrefillModel:
        """Return a replica's prefill model; for an unknown id, the one common to most replicas."""
        member = self.members.get(id_)
        return member.prefill_model if member is not None else self.means.common.prefill.model

    def same_server(self, id_: str) -> list[str]:
        """Return the replicas with the same URL: the ranks of one server."""
        url = Replica(id_).url
        return [member.id for member in self.members.values() if member.replica.url == url]

    def model_names(self) -> set[str]:
        """Return every model that any usable replica serves."""
        return self.roster.models()

    def base_models(self) -> list[tuple[str, str]]:
        """Return (replica, base model) of each model that is not an adapter."""
        return [
            (member.id, model.root or model.name)
            for member in self.members.values()
            for model in member.models.values()
            if model.parent is None
        ]

    def _assign_speeds(self, member: ReplicaState) -> None:
        """Let a member share the speeds learned for the base models that it serves."""
        kind = tuple(sorted({model.root or name for name, model in member.models.items() if model.parent is None}))
        speeds = self.means.get_or_create(kind, (each.speeds for each in self.members.values()))
        if speeds is not member.speeds:
            member.take_speeds(speeds)
            self.pulls.forget_times(member.id)
            for observer in self.observers:
                observer.forget_times(member.id)
            self.unlearned.members[member.id] = member

    def observe_under_way(self, now_s: float) -> None:
        """Count the tokens of answers in progress; must be called about once a second."""
        for speeds in self.means.speeds.values():
            speeds.answer_tokens.under_way_tokens = 0.0
        for member in self.members.values():
            if member.clock.streams:
                under_way_tokens = member.clock.under_way_tokens(member.step_model, now_s)
                member.speeds.answer_tokens.under_way_tokens += under_way_tokens

    def observe_share(self) -> None:
        """Update the fleet's share of known work (own requests, and those that other routers report) from the last
        probes."""
        if ready := self.roster.ready():
            self.share = sum([member.counters.known_share for member in ready]) / len(ready)

    @property
    def is_only_sender(self) -> bool:
        """True if no other router sends requests here unreported, so that all work of the replicas is known."""
        return self.share >= SHARE_ALL

    @property
    def other_router_probability(self) -> float:
        """Probability that another router placed a prompt, with no known cached prefix, on the replica that the ring
        selects; 0 without another router."""
        return 0.0 if self.is_only_sender else self.means.elsewhere

    def slowness(self, now_s: float) -> dict[str, float]:
        """Return how many times slower than their peers replicas of unknown speed look (cold_estimates.py)."""
        return self.unlearned.slowness(self.roster.ready(), now_s) if self.unlearned.members else {}

    def forget_speed(self, member: ReplicaState) -> None:
        """Forget the learned speed of a member. It kept all requests away, and a trial must look worthwhile."""
        member.forget_speed()
        self.unlearned.members[member.id] = member
