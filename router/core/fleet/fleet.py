"""The replicas together: who is ready, who serves what, and what is learned from all of their answers.

What is known of each one besides its cache is in member.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from router.core.facts.placements import Outcome, Usage
from router.core.facts.replicas import Replica, ServedModel
from router.core.fleet.lease import PREFILL, Lease
from router.core.fleet.member import SHARE_ALL, Member
from router.core.fleet.roster import Roster
from router.core.learned.prefill import GUESS_WEIGHT, LEARN_TOKENS_MIN, PRIOR_WEIGHT, PrefillModel
from router.core.learned.speeds import WORK_FADE, Speeds
from router.core.learned.steps import ANSWER_TOKENS_MIN, StepModel, Stretch
from router.core.learned.steps import GUESS_WEIGHT as STEP_GUESS_WEIGHT
from router.core.learned.steps import PRIOR_WEIGHT as STEP_PRIOR_WEIGHT

GUESS_RIGHT = 0.9  # at first; see Fleet.elsewhere
GUESS_LEAST = 0.05  # however wrong it was: to see when that changes
SPEEDS_MAX = 256  # kinds of replicas whose speeds are kept

Kind = tuple[str, ...]
"""Names of the base models that a replica serves, in order."""


@dataclass(slots=True)
class Fleet:
    """All replicas, in a stable order, and what they have in common.

    Who is ready is asked by every request and changes with observations, all of which come through here. A model that
    no ready member serves is served by those whose health checks had no answer: it may be the checks that are slow.
    """

    members: dict[str, Member] = field(default_factory=dict)
    speeds: dict[Kind, Speeds] = field(default_factory=dict)  # by the base models that replicas serve
    context_tokens_min: float = inf  # the shortest context that any replica ever said a model has
    share: float = 1.0  # part of the ready replicas' prompt tokens that come through us, on the mean
    # How often what we did not know was held at its place on the ring.
    guess_right: float = field(default_factory=lambda: GUESS_RIGHT)
    guarded: dict[str, Member] = field(default_factory=dict)  # who may not be sent everything: see fitness.py
    warming: set[str] = field(default_factory=set)  # who shall get no requests until its cache is filled
    held: dict[str, Member] = field(default_factory=dict)  # who gets none for that, and is fit: see Fleet.hold
    panics: bool = False  # a model is served only by members that are not ready
    lives: int = 0  # see Member.life
    roster: Roster = field(default_factory=Roster)  # who is ready, and who serves what
    returned: dict[str, Member] = field(default_factory=dict)  # guarded members that Standing has yet to hear of
    # Members whose own speed is not known, as far as was seen: some may have learned it since.
    _unlearned: dict[str, Member] = field(default_factory=dict)

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take a complete set; returns ids that joined and ids that left. State of those that stay is kept; where
        another engine has come to an address, its id is in both."""
        wanted, members = {replica.id: replica for replica in replicas}, self.members
        left = [id_ for id_, m in members.items() if id_ not in wanted or wanted[id_].is_another(m.replica)]
        for id_ in left:
            self.roster.leave(members.pop(id_))
            self.guarded.pop(id_, None)
            self.returned.pop(id_, None)
            self._unlearned.pop(id_, None)
            self.warming.discard(id_)
        joined = [id_ for id_ in wanted if id_ not in members]
        for id_ in joined:
            members[id_] = self._unlearned[id_] = Member(wanted[id_], self.new_life())
            self._assign_speeds(members[id_])
        for id_, replica in wanted.items():
            members[id_].replica = replica.after(members[id_].replica)
        self._changed(*members.values())
        return joined, left

    def new_life(self) -> int:
        """The number of a cache that begins empty."""
        self.lives += 1
        return self.lives

    def observe_health(self, id_: str, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """One health observation; returns whether the member's fitness flipped. Unknown ids are ignored."""
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

    def hold(self, id_: str, warming: bool) -> bool:
        """Have a member get no requests until it is warm, or let it have them; returns whether that is news. As long as
        nobody else is ready who serves all that it serves, it gets them in any case: an outage is worse than a miss."""
        member = self.members.get(id_)
        if member is None or (id_ in self.warming) is warming:
            return False
        (self.warming.add if warming else self.warming.discard)(id_)
        member.held = False  # unless found otherwise
        self._changed(member)
        return True

    def observe_models(self, member: Member, models: Iterable[ServedModel]) -> bool:
        """What a member serves now; returns whether that is news, which it is not in nearly every round of probes."""
        named = {model.name: model for model in models}
        if named == member.models:
            return False
        member.models = named
        self._assign_speeds(member)
        lengths = [model.max_model_len_tokens for model in named.values() if model.max_model_len_tokens]
        self.context_tokens_min = min([self.context_tokens_min, *lengths])
        self._changed(member)
        return True

    def ready(self) -> list[Member]:
        """Members that may be sent requests. Not to be changed."""
        return self.roster.ready()

    def serving(self, model: str) -> list[Member]:
        """Usable members that serve a model. Not to be changed."""
        return self.roster.serving(model)

    def usable(self) -> list[Member]:
        """Ready members, and those that are used for want of one. Not to be changed."""
        return self.roster.usable()

    def _changed(self, *members: Member) -> None:
        for member in members:
            self.roster.file(member)
        if self.warming or self.held:
            self._hold()
        self.panics = self.roster.panics

    def _hold(self) -> None:
        """See again who is held: of those to be warmed, whoever serves nothing that no other ready member serves."""
        roster, number = self.roster, self.roster.number
        looked_at = [self.members[id_] for id_ in self.warming | self.held.keys() if id_ in self.members]
        looked_at.sort(key=lambda member: number(member.id))
        own: dict[str, int] = {}  # ready members that serve a model and are themselves to be warmed
        for member in looked_at:
            if member.ready and member.id in self.warming:
                for name in member.models:
                    own[name] = own.get(name, 0) + 1
        for member in looked_at:
            others = (roster.ready_count(name) > own.get(name, 0) for name in member.models)
            member.held = member.id in self.warming and all(others)
        self.held = {}
        for member in looked_at:
            roster.file(member)
            if member.held and member.health.fit and member.replica.ready:
                self.held[member.id] = member

    def same_server(self, id_: str) -> list[str]:
        """Replicas behind the same URL: the ranks of one server."""
        url = Replica(id_).url
        return [member.id for member in self.members.values() if member.replica.url == url]

    def model_names(self) -> set[str]:
        """Every model that any usable replica serves."""
        return self.roster.models()

    @property
    def common(self) -> Speeds:
        """Of the kind of replicas with the most answers: what a figure is made of that names no replica."""
        return max(self.speeds.values(), key=lambda speeds: speeds.answers, default=Speeds())

    def _assign_speeds(self, member: Member) -> None:
        """Have a member share what is learned of the base models that it serves."""
        kind = tuple(sorted({model.root or name for name, model in member.models.items() if model.parent is None}))
        speeds = self.speeds.get(kind)
        if speeds is None:
            if len(self.speeds) >= SPEEDS_MAX:
                used = {id(each.speeds) for each in self.members.values()}
                self.speeds = {key: each for key, each in self.speeds.items() if id(each) in used}
            speeds = self.speeds[kind] = Speeds()
        if speeds is not member.speeds:
            member.take_speeds(speeds)
            self._unlearned[member.id] = member

    def observe_under_way(self, now_s: float) -> None:
        """Count what the answers under way have brought so far; to be called every second or so."""
        for speeds in self.speeds.values():
            speeds.answer_tokens.under_way_tokens = 0.0
        for member in self.members.values():
            clock = member.clock
            if clock.streams:
                step_ms = member.step_model.ms(clock.streams, clock.context_tokens)
                member.speeds.answer_tokens.under_way_tokens += clock.running_s(now_s) * 1e3 / step_ms

    def observe_share(self) -> None:
        """Probes were heard: how much of the fleet's work is ours."""
        if ready := self.roster.ready():
            self.share = sum([member.share for member in ready]) / len(ready)

    @property
    def alone(self) -> bool:
        """Whether nobody else sends here: replicas do no more than we ask of them."""
        return self.share >= SHARE_ALL

    @property
    def elsewhere(self) -> float:
        """Chance that a prompt that nobody is known to hold is held at its place on the ring, by another router's
        doing: there must be one, and it must have been so of late."""
        return 0.0 if self.alone else max(self.guess_right, GUESS_LEAST)

    def slowness(self, now_s: float) -> dict[str, float]:
        """How much slower than its peers a replica looks whose first tokens are never seen, because nothing streams:
        by the age of what it has not answered, which is usually the mean over ready replicas, or how long leases take.
        Only of ready replicas that look slower, and not where their speed is learned."""
        ages_ms: dict[str, float] = {}
        if not self._unlearned:
            return ages_ms
        for member in list(self._unlearned.values()):
            if member.fit.observations:
                del self._unlearned[member.id]
            elif (count := len(member.leases)) > 1 and member.ready:
                ages_ms[member.id] = (now_s - member.placed_sum_s / count) * 1e3
        if not ages_ms:
            return ages_ms
        sum_ms, busy = 0.0, 0
        for member in self.roster.ready():
            if count := len(member.leases):
                sum_ms += (now_s - member.placed_sum_s / count) * 1e3
                busy += 1
        usual_ms = max(sum_ms / busy, self.common.mean_open_ms)
        return {id_: age_ms / usual_ms for id_, age_ms in ages_ms.items() if age_ms > usual_ms > 0}

    def forget_pace(self, member: Member) -> None:
        """What was learned of its speed made nobody send anything there: a trial must look worth it."""
        member.forget_pace()
        self._unlearned[member.id] = member

    def _learn_guess(self, lease: Lease, usage: Usage | None) -> None:
        """Whether half of what was not known to be held was held: the engine says so, or its time to first token."""
        if usage is not None and usage.cached_tokens is not None:
            right = usage.cached_tokens - lease.cached_tokens > lease.uncached_tokens / 2
        elif lease.service_ms is not None:
            right = lease.service_ms < lease.prefill_ms / 2
        else:
            return
        self.guess_right += (1 - WORK_FADE) * (right - self.guess_right)

    def learn(self, member: Member, lease: Lease, outcome: Outcome, now_s: float) -> tuple[int, int]:
        """Learn from a lease that ended well: speed of prefill, size of requests, length of leases. Returns how many
        tokens of its prompt were computed, and how many were cached."""
        usage = outcome.usage
        uncached, cached = lease.uncached_tokens, lease.cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            uncached, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
            lease.recount(max(0, uncached))  # an engine may say anything
        speeds = member.speeds
        if (service_ms := lease.service_ms) is not None:
            if uncached < LEARN_TOKENS_MIN:
                speeds.was_short(service_ms)
            elif uncached > member.longest_tokens:
                member.longest_tokens = uncached
            speeds.prefill.observe(uncached, cached, service_ms, PrefillModel(), GUESS_WEIGHT)
            member.fit.observe(uncached, cached, service_ms, speeds.prefill.model, PRIOR_WEIGHT, now_s)
        if lease.guessed:
            self._learn_guess(lease, usage)
        if lease.role == PREFILL:  # means are of clients' requests
            return uncached, cached
        tokens = usage.completion_tokens if usage is not None else outcome.events
        speeds.ended((now_s - lease.placed_s) * 1e3, tokens, uncached)
        if lease.first_token_s is not None:
            speeds.decoded((now_s - lease.first_token_s) * 1e3)
            if lease.streams:
                _learn_steps(member, lease.stretch, tokens)
        speeds.asked(lease.prompt_tokens, lease.prefill_ms)
        return uncached, cached

    def fade(self, member: Member, now_s: float) -> None:
        """Forget little by little that a replica is slow, while nobody asks it; to be called every second or so."""
        member.fit.fade(member.speeds.prefill.model, PRIOR_WEIGHT, now_s)


def _learn_steps(member: Member, stretch: Stretch | None, tokens: int) -> None:
    """Take what an answer of so many tokens says of a step."""
    if stretch is None or tokens < ANSWER_TOKENS_MIN:
        return
    step_ms, steps = stretch.step_ms(tokens - 1), member.speeds.steps
    steps.observe(stretch.streams, stretch.context_tokens, step_ms, StepModel(), STEP_GUESS_WEIGHT)
    member.steps.observe(stretch.streams, stretch.context_tokens, step_ms, steps.model, STEP_PRIOR_WEIGHT)
