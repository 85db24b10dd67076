"""The replicas together: who is ready, who serves what, and what is learned from all of their answers.

What is known of each one besides its cache is in member.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.core.facts import Outcome, Replica, ServedModel, Usage
from router.core.member import PREFILL, SHARE_ALL, Lease, Member
from router.core.prefill import GUESS_WEIGHT, LEARN_TOKENS_MIN, PRIOR_WEIGHT, PrefillFit, PrefillModel

WORK_FADE = 0.95  # of the mean work a request brings, per request
GUESS_RIGHT = 0.9  # at first; see Fleet.elsewhere
GUESS_LEAST = 0.05  # however wrong it was: to see when that changes
ANSWER_FADE = 0.995  # of the longest answer, per answer


@dataclass(slots=True)
class Fleet:
    """All replicas, in a stable order, and what they have in common.

    Who is ready is asked by every request and changes with observations, all of which come through here. A model that
    no ready member serves is served by those whose health checks had no answer: it may be the checks that are slow.
    """

    members: dict[str, Member] = field(default_factory=dict)
    prefill: PrefillFit = field(default_factory=PrefillFit)
    mean_work_ms: float = 0.0  # of a request's uncached part
    mean_prompt_tokens: float = 0.0
    mean_open_ms: float = 0.0  # of a lease, from placement to end
    mean_decode_ms: float = 0.0  # of a streamed answer, from its first token to its end
    mean_answer_tokens: float = 0.0
    decodes: int = 0
    answers: int = 0  # that ended well
    answer_ms_max: float = 0.0  # of late
    token_ms_max: float = 0.0  # likewise, of an answer per token of it
    longest_tokens: float = 0.0  # likewise, computed of a prompt
    short_ms: float = 0.0  # mean time of prefills that are too short to learn a speed from
    shorts: int = 0
    share: float = 1.0  # part of the ready replicas' prompt tokens that come through us, on the mean
    # How often what we did not know was held at its place on the ring.
    guess_right: float = field(default_factory=lambda: GUESS_RIGHT)
    guarded: dict[str, Member] = field(default_factory=dict)  # who may not be sent everything: see standing.py
    warming: set[str] = field(default_factory=set)  # who shall get no requests until its cache is filled
    held: dict[str, Member] = field(default_factory=dict)  # who gets none for that, and is fit: see Fleet.hold
    panics: bool = False  # a model is served only by members that are not ready
    lives: int = 0  # see Member.life
    _ready: list[Member] = field(default_factory=list)
    _usable: list[Member] = field(default_factory=list)
    _serving: dict[str, list[Member]] = field(default_factory=dict)  # of models that a usable member serves

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take a complete set; returns ids that joined and ids that left. State of those that stay is kept; where
        another engine has come to an address, its id is in both."""
        wanted, members = {replica.id: replica for replica in replicas}, self.members
        left = [id_ for id_, m in members.items() if id_ not in wanted or wanted[id_].is_another(m.replica)]
        for id_ in left:
            del members[id_]
            self.guarded.pop(id_, None)
            self.warming.discard(id_)
        joined = [id_ for id_ in wanted if id_ not in members]
        for id_ in joined:
            members[id_] = Member(wanted[id_], self.new_life())
        for id_, replica in wanted.items():
            members[id_].replica = replica.after(members[id_].replica)
        self._changed()
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
            self.guarded[id_] = member
        if flipped or (was_silent != member.health.silent and not member.health.fit):
            self._changed()
        return flipped

    def hold(self, id_: str, warming: bool) -> bool:
        """Have a member get no requests until it is warm, or let it have them; returns whether that is news. As long as
        nobody else is ready who serves all that it serves, it gets them in any case: an outage is worse than a miss."""
        if id_ not in self.members or (id_ in self.warming) is warming:
            return False
        (self.warming.add if warming else self.warming.discard)(id_)
        self._changed()
        return True

    def observe_models(self, member: Member, models: Iterable[ServedModel]) -> None:
        """What a member serves now."""
        member.models = {model.name: model for model in models}
        self._changed()

    def ready(self) -> list[Member]:
        """Members that may be sent requests. Not to be changed."""
        return self._ready

    def serving(self, model: str) -> list[Member]:
        """Usable members that serve a model. Not to be changed."""
        return self._serving.get(model, [])

    def usable(self) -> list[Member]:
        """Ready members, and those that are used for want of one. Not to be changed."""
        return self._usable

    def _changed(self) -> None:
        if self.warming or self.held:
            self._hold()
        self._ready = [member for member in self.members.values() if member.ready]
        self._serving = {}
        for member in self._ready:
            for name in member.models:
                self._serving.setdefault(name, []).append(member)
        self._usable, served = self._ready, set(self._serving)
        unfit = [m for m in self.members.values() if m.replica.ready and not m.health.fit]
        silent = [m for m in unfit if m.health.served and m.health.silent]
        doubted = [m for m in silent if not served.issuperset(m.models)]
        self.panics = bool(doubted)
        if doubted:
            for member in doubted:
                for name in member.models.keys() - served:
                    self._serving.setdefault(name, []).append(member)
            self._usable = self._ready + doubted

    def _hold(self) -> None:
        warm: set[str] = set()
        for member in self.members.values():
            if member.id not in self.warming and member.health.fit and member.replica.ready:
                warm.update(member.models)
        self.held = {}
        for member in self.members.values():
            member.held = member.id in self.warming and warm.issuperset(member.models)
            if member.held and member.health.fit and member.replica.ready:
                self.held[member.id] = member

    def same_server(self, id_: str) -> list[str]:
        """Replicas behind the same URL: the ranks of one server."""
        url = Replica(id_).url
        return [member.id for member in self.members.values() if member.replica.url == url]

    def model_names(self) -> set[str]:
        """Every model that any usable replica serves."""
        return set(self._serving)

    def model_of(self, member: Member) -> PrefillModel:
        """The replica's own prefill model, or the fleet's until it has one."""
        return member.fit.model if member.fit.observations else self.prefill.model

    def observe_share(self) -> None:
        """Probes were heard: how much of the fleet's work is ours."""
        if self._ready:
            self.share = sum([member.share for member in self._ready]) / len(self._ready)

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
        sum_ms, busy = 0.0, 0
        for member in self._ready:
            count = len(member.leases)
            if count:
                age_ms = (now_s - member.placed_sum_s / count) * 1e3
                sum_ms += age_ms
                busy += 1
                if count > 1 and not member.fit.observations:
                    ages_ms[member.id] = age_ms
        if not ages_ms:
            return ages_ms
        usual_ms = max(sum_ms / busy, self.mean_open_ms)
        return {id_: age_ms / usual_ms for id_, age_ms in ages_ms.items() if age_ms > usual_ms > 0}

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
        if (service_ms := lease.service_ms) is not None:
            if uncached < LEARN_TOKENS_MIN:
                self.shorts += 1
                self.short_ms += max(1 - WORK_FADE, 1 / self.shorts) * (service_ms - self.short_ms)
            elif uncached > member.longest_tokens:
                member.longest_tokens = uncached
            self.prefill.observe(uncached, cached, service_ms, PrefillModel(), GUESS_WEIGHT)
            member.fit.observe(uncached, cached, service_ms, self.prefill.model, PRIOR_WEIGHT, now_s)
        if lease.guessed:
            self._learn_guess(lease, usage)
        if lease.role == PREFILL:  # means are of clients' requests
            return uncached, cached
        open_ms = (now_s - lease.placed_s) * 1e3
        tokens = usage.completion_tokens if usage is not None else outcome.events
        self.answers += 1
        self.answer_ms_max = _faded_max(self.answer_ms_max, open_ms)
        self.token_ms_max = _faded_max(self.token_ms_max, open_ms / tokens if tokens else open_ms)
        self.longest_tokens = _faded_max(self.longest_tokens, uncached)
        if lease.first_token_s is not None:
            self.decodes += 1
            decode_ms = (now_s - lease.first_token_s) * 1e3
            self.mean_decode_ms += max(1 - WORK_FADE, 1 / self.decodes) * (decode_ms - self.mean_decode_ms)
        self.mean_answer_tokens += max(1 - WORK_FADE, 1 / self.answers) * (tokens - self.mean_answer_tokens)
        self.mean_open_ms += max(1 - WORK_FADE, 1 / self.answers) * (open_ms - self.mean_open_ms)
        self.mean_prompt_tokens += (1 - WORK_FADE) * (lease.prompt_tokens - self.mean_prompt_tokens)
        self.mean_work_ms += (1 - WORK_FADE) * (lease.prefill_ms - self.mean_work_ms)
        return uncached, cached

    def fade(self, member: Member, now_s: float) -> None:
        """Forget little by little that a replica is slow, while nobody asks it; to be called every second or so."""
        member.fit.fade(self.prefill.model, PRIOR_WEIGHT, now_s)


def _faded_max(known: float, new: float) -> float:
    known *= ANSWER_FADE
    return known if known > new else new  # noqa: FURB136 - half the time
