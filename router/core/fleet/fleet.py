"""The registry of replicas: which there are, who is ready, who serves what, whose cache is to be filled first.

What is known of each replica besides its cache is in member.py; what all answers teach is in core/learned/means.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from router.core.facts.legs import Role
from router.core.facts.replicas import Replica, ServedModel
from router.core.fleet.legs import Legs
from router.core.fleet.member import SHARE_ALL, Member
from router.core.fleet.pulls import Pulls
from router.core.fleet.roster import Roster
from router.core.fleet.unlearned import Unlearned
from router.core.learned.means import FleetMeans
from router.core.learned.prefill import PrefillModel


@dataclass(slots=True)
class Fleet:
    """All replicas, in a stable order.

    Every request asks who is ready; observations, all of which come through here, change it. A model that no ready
    member serves is served by members whose health checks had no answer: the checks themselves may be slow.
    """

    members: dict[str, Member] = field(default_factory=dict)
    means: FleetMeans = field(default_factory=FleetMeans)
    context_tokens_min: float = inf  # the shortest context that any replica ever said a model has
    share: float = 1.0  # part of the ready replicas' prompt tokens that is known (Member.known_share), on average
    guarded: dict[str, Member] = field(default_factory=dict)  # members that may not be sent everything: fitness.py
    warming: set[str] = field(default_factory=set)  # ids of members that had better get no requests until they are warm
    warming_up: dict[str, Member] = field(default_factory=dict)  # fit members that get no requests for that reason
    panics: bool = False  # a model is served only by members that are not ready
    roster: Roster = field(default_factory=Roster)  # members that are ready, and members by the models that they serve
    returned: dict[str, Member] = field(default_factory=dict)  # guarded members that Fitness has yet to hear of
    unlearned: Unlearned = field(init=False)
    pulls: Pulls = field(default_factory=Pulls)  # what replicas bring from each other
    legs: Legs = field(default_factory=Legs)  # replicas that prefill for others to decode
    prefillers: dict[str, Member] = field(default_factory=dict)  # members that only prefill
    replaced: int = 0  # how often discovery has told of all replicas
    _caches: int = 0  # caches that there were so far, of all replicas
    _whole_of: tuple[list[Member], list[Member]] = field(default_factory=lambda: ([], []))  # see `whole`

    def __post_init__(self) -> None:
        self.unlearned = Unlearned(self.means)

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take a complete set; returns ids that joined and ids that left. State of members that stay is kept; where
        another engine has come to an address, its id is in both."""
        self.replaced += 1
        wanted, members = {replica.id: replica for replica in replicas}, self.members
        left = [id_ for id_, m in members.items() if id_ not in wanted or wanted[id_].is_another(m.replica)]
        for id_ in left:
            self.roster.leave(members.pop(id_))
            self.guarded.pop(id_, None)
            self.returned.pop(id_, None)
            self.unlearned.members.pop(id_, None)
            self.warming.discard(id_)
            self.pulls.forget(id_)
            self.legs.forget(id_)
        joined = [id_ for id_ in wanted if id_ not in members]
        for id_ in joined:
            members[id_] = self.unlearned.members[id_] = Member(wanted[id_], self._new_life())
            self._assign_speeds(members[id_])
        for id_, replica in wanted.items():
            members[id_].replica = replica.after(members[id_].replica)
        self.prefillers = {id_: members[id_] for id_, replica in wanted.items() if replica.role is Role.PREFILL}
        self._whole_of = [], []
        self._changed(*members.values())
        return joined, left

    def clear(self, id_: str) -> bool:
        """A member's cache is empty from now on; returns whether there is such a member."""
        member = self.members.get(id_)
        if member is not None:
            member.life = self._new_life()
        return member is not None

    def lives(self) -> set[int]:
        """Numbers of the caches that there are (Member.life)."""
        return {member.life for member in self.members.values()}

    def _new_life(self) -> int:
        """The number of a cache that begins empty."""
        self._caches += 1
        return self._caches

    def observe_health(self, id_: str, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """One health observation; returns whether the member's fitness flipped. Unknown ids are ignored. `proof`: one
        failure is enough. `silent`: the check had no answer at all."""
        member = self.members.get(id_)
        if member is None:
            return False
        back, was_silent = ok and member.health.served, member.health.silent
        flipped = member.health.observe(ok, why, proof=proof, silent=silent)
        if flipped and back:
            member.came_back = True
            self.guarded[id_] = self.returned[id_] = member
        if flipped or (was_silent != member.health.silent and not member.health.fit):
            self._changed(member)
        return flipped

    def warm_up(self, id_: str, warming: bool) -> bool:
        """Send a member no requests until it is warm (`warming`), or send it some again; returns whether that is news.
        While other ready members do not serve all that it serves, it gets requests in any case: an outage is worse
        than a miss."""
        member = self.members.get(id_)
        if member is None or (id_ in self.warming) is warming:
            return False
        (self.warming.add if warming else self.warming.discard)(id_)
        member.warming_up = False  # unless found otherwise
        self._changed(member)
        return True

    def observe_models(self, member: Member, models: Iterable[ServedModel]) -> bool:
        """What a member serves now; returns whether that is news, which it is not in nearly every round of probes."""
        named = {model.name: model for model in models}
        if named == member.models:
            member.models.update(named)  # fields that are not compared may differ
            return False
        member.models = named
        self._assign_speeds(member)
        lengths = [model.max_model_len_tokens for model in named.values() if model.max_model_len_tokens]
        self.context_tokens_min = min([self.context_tokens_min, *lengths])
        self._changed(member)
        return True

    def member(self, id_: str) -> Member | None:
        """A replica's state, for others to read; None where there is no such replica."""
        return self.members.get(id_)

    def ready(self) -> list[Member]:
        """Members that may be sent requests. Not to be changed."""
        return self.roster.ready()

    def serving(self, model: str) -> list[Member]:
        """Usable members that serve a model. Not to be changed."""
        return self.roster.serving(model)

    def serving_alone(self, urls: Collection[str]) -> set[str]:
        """Of servers by their base URLs those with a ready member that serves a model which no ready member of another
        server serves, or that are ready while no other is."""
        inside = [member for member in self.ready() if member.replica.url in urls]
        outside = [member for member in self.ready() if member.replica.url not in urls]
        served = {name for member in outside for name in member.models}
        return {each.replica.url for each in inside if not outside or not served.issuperset(each.models)}

    def usable(self) -> list[Member]:
        """Ready members, and those that are used for want of one. Not to be changed."""
        return self.roster.usable()

    def whole(self, members: list[Member]) -> list[Member]:
        """Those of these members that take whole requests; all of them where none does. Not to be changed. The roster's
        lists are the same objects for as long as nothing changes, so the answer to the last one is kept."""
        if not self.prefillers:
            return members
        if self._whole_of[0] is not members:
            whole = [member for member in members if member.replica.role is not Role.PREFILL]
            self._whole_of = members, whole or members
        return self._whole_of[1]

    def _changed(self, *members: Member) -> None:
        for member in members:
            self.roster.file(member)
        if self.warming or self.warming_up:
            self._find_warming_up()
        self.panics = self.roster.panics

    def _find_warming_up(self) -> None:
        """Find the members that get no requests: of the members to be warmed, those all of whose models other ready
        members serve."""
        roster, number = self.roster, self.roster.number
        looked_at = [self.members[id_] for id_ in self.warming | self.warming_up.keys() if id_ in self.members]
        looked_at.sort(key=lambda member: number(member.id))
        own: dict[str, int] = {}  # ready members that serve a model and are themselves to be warmed
        for member in looked_at:
            if member.ready and member.id in self.warming:
                for name in member.models:
                    own[name] = own.get(name, 0) + 1
        for member in looked_at:
            others = (roster.ready_count(name) > own.get(name, 0) for name in member.models)
            member.warming_up = member.id in self.warming and all(others)
        self.warming_up = {}
        for member in looked_at:
            roster.file(member)
            if member.warming_up and member.health.fit and member.replica.ready:
                self.warming_up[member.id] = member

    def is_warming_up(self, id_: str) -> bool:
        """Whether a fit member gets no requests until its cache is filled."""
        return id_ in self.warming_up

    def is_to_warm_up(self, id_: str) -> bool:
        """Whether a member had better get no requests until its cache is filled, fit or not."""
        return id_ in self.warming

    def prefill_model(self, id_: str = "") -> PrefillModel:
        """What is known of a replica's prefill speed; of no replica, or one that has left, what most have in common."""
        member = self.members.get(id_)
        return member.prefill_model if member is not None else self.means.common.prefill.model

    def same_server(self, id_: str) -> list[str]:
        """Replicas behind the same URL: the ranks of one server."""
        url = Replica(id_).url
        return [member.id for member in self.members.values() if member.replica.url == url]

    def model_names(self) -> set[str]:
        """Every model that any usable replica serves."""
        return self.roster.models()

    def base_models(self) -> list[tuple[str, str]]:
        """(replica, base model) of each model that is no adapter."""
        return [
            (member.id, model.root or model.name)
            for member in self.members.values()
            for model in member.models.values()
            if model.parent is None
        ]

    def _assign_speeds(self, member: Member) -> None:
        """Have a member share what is learned of the base models that it serves."""
        kind = tuple(sorted({model.root or name for name, model in member.models.items() if model.parent is None}))
        speeds = self.means.of(kind, (each.speeds for each in self.members.values()))
        if speeds is not member.speeds:
            member.take_speeds(speeds)
            self.pulls.forget_times(member.id)
            self.legs.forget_times(member.id)
            self.unlearned.members[member.id] = member

    def observe_under_way(self, now_s: float) -> None:
        """Count what the answers under way have brought so far; to be called every second or so."""
        for speeds in self.means.speeds.values():
            speeds.answer_tokens.under_way_tokens = 0.0
        for member in self.members.values():
            if member.clock.streams:
                member.speeds.answer_tokens.under_way_tokens += member.under_way_tokens(now_s)

    def observe_share(self) -> None:
        """Take the share of the fleet's work that is ours or told us, as the last probes saw it."""
        if ready := self.roster.ready():
            self.share = sum([member.known_share for member in ready]) / len(ready)

    @property
    def alone(self) -> bool:
        """Whether no other router sends here without telling us: replicas do no more than is known."""
        return self.share >= SHARE_ALL

    @property
    def elsewhere(self) -> float:
        """Chance that another router placed a prompt that nobody is known to hold at its place on the ring; 0 where
        there is no other router."""
        return 0.0 if self.alone else self.means.elsewhere

    def slowness(self, now_s: float) -> dict[str, float]:
        """How many times slower than its peers a replica looks whose own speed is not known (unlearned.py)."""
        return self.unlearned.slowness(self.roster.ready(), now_s) if self.unlearned.members else {}

    def forget_speed(self, member: Member) -> None:
        """Forget what was learned of a member's speed. It kept all requests away: a trial must look worth it."""
        member.forget_speed()
        self.unlearned.members[member.id] = member
