"""Router: a request in, a lease out; leases back with what became of them.

    route:   chain of keys -> credit a past answer -> match -> candidates -> policy -> lease
    finish:  touch again and unpin, learn (bytes per token, prefill speed), remember who answered, compare with events

Two beliefs about every replica run side by side. The estimate (index) is a chain over canonical bytes and knows what
we sent; the events (knowledge) are a chain over token ids and know what the engine said. A prompt whose token ids are
known is matched against both, and the replica's grade says which one counts.

Knows nothing of HTTP: the same object places for a proxy, for a gateway's endpoint picker, and in virtual time.
Synchronous and single-threaded by contract: a method runs to its end before the next begins, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from router.core import blocks, silence
from router.core.answers import Answer, AnswerMemory, Span
from router.core.blocks import Chain
from router.core.breaker import Cause, State
from router.core.facts import (
    Ask,
    Candidate,
    Ending,
    Grade,
    Held,
    Load,
    Outcome,
    Question,
    Reason,
    Receipt,
    Replica,
    ServedModel,
    Usage,
)
from router.core.fleet import Fleet
from router.core.keys import TokenPrompt
from router.core.knowledge import Knowledge
from router.core.learning import Learner
from router.core.live import behind_marks
from router.core.member import ANSWER_TOKENS_MAX, Lease, Member
from router.core.miss import Sighting
from router.core.models import Models, NoReplica
from router.core.observatory.explain import Explainer
from router.core.policies import Policy
from router.core.prefill import PrefillModel
from router.core.prefix import PrefixIndex
from router.core.pricing import Pricer, Size, size_of
from router.core.reuse import ReuseMemory
from router.core.spill import spill
from router.core.standing import Standing

TIE_TOKENS = 1_000  # prices within the learned time of this many prefill tokens cannot be told apart
BACKLOG_TOKENS = 16_000  # unit of the fleet's backlog: about a second of prefill on the GPUs of the first study
_OK, _LEFT = Ending.OK, Ending.CLIENT_LEFT  # to look an enum's member up costs as much as a call
_WARM, _COLD = Reason.WARM, Reason.COLD
HELD_BLOCKS_MAX = 1 << 20  # blocks of one replica that its events may fill the index with


class Router:
    """All state of placement. `now_s` is any clock that does not go back."""

    def __init__(
        self,
        policy: Policy,
        *,
        index_bytes_max: int,
        memory_max: int,
        blocks_max_default: int,
        held_blocks_max: int = HELD_BLOCKS_MAX,
        graded: Callable[[str, Grade, str], None] = lambda *_: None,
        resync: Callable[[str], None] = lambda _: None,
        suspect: Callable[[str], None] = lambda _: None,
        slow_start_s: float = 0.0,
        stuck_after_s: float = 3.0,
        stood: Callable[[str, State, str], None] = lambda *_: None,
        cleared: Callable[[str], None] = lambda _: None,
        explainer: Explainer | None = None,
    ) -> None:
        """`graded(replica, grade, why)` hears each change of grade once; `resync(replica)` is asked to have a replica's
        events told again from the beginning, `suspect(replica)` to have its stream prove to be the same process.
        `stood(replica, state, why)` hears when a replica's breaker opens or closes, `cleared(replica)` when its
        cache is gone. `slow_start_s` of 0: nobody starts
        slowly. With an `explainer` receipts say why tokens miss the cache."""
        self.explainer = explainer
        self.fleet = Fleet()
        self.standing = Standing(self.fleet, slow_start_s=slow_start_s, stood=stood)
        self._stuck_after_s = stuck_after_s
        self._tell_graded = graded
        self._tell_cleared = cleared
        self._suspect = suspect
        self.knowledge = Knowledge(
            blocks_max=held_blocks_max,
            aside_max=held_blocks_max // 8,
            names_max=held_blocks_max // 8,
            graded=self._graded,
            resync=resync,
            restarted=self._cleared,
        )
        self.index = PrefixIndex(index_bytes_max)
        self.reuse = ReuseMemory(memory_max)
        self.answers = AnswerMemory(memory_max)
        self.policy = policy
        self._pricer = Pricer(self.fleet, self.index, self.knowledge, self.reuse)
        self._blocks_max_default = blocks_max_default
        self.models = Models(self.fleet, self.knowledge)
        self._next_lease = 0
        self._units = _units(self.fleet.prefill.model)
        learner = Learner(self.fleet, self.standing, self.models, self.answers, self.knowledge)
        self._learn, self.unannounced = learner.learn, learner.unannounced

    def configure(self, *, slow_start_s: float, stuck_after_s: float) -> None:
        """What holds from now on."""
        self.standing.slow_start_s, self._stuck_after_s = slow_start_s, stuck_after_s

    # -- what the edge tells us ----------------------------------------------------------------------------------

    def replace(self, replicas: Iterable[Replica]) -> tuple[list[str], list[str]]:
        """Take discovery's complete set; what left is purged, open leases on it may still be finished. An engine that
        was replaced at its address has left, and another has joined: its id is in both lists."""
        joined, left = self.fleet.replace(replicas)
        for id_ in left:
            self.index.remove(id_)
            self._pricer.forget(id_)
            self.knowledge.forget(id_)
        for id_ in joined:
            self.index.add(id_, self._blocks_max_default)
            self.models.judge(self.fleet.members[id_])
        return joined, left

    def observe_health(self, id_: str, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """One health observation; returns whether the replica's fitness flipped."""
        return self.fleet.observe_health(id_, ok, why, proof=proof, silent=silent)

    def observe_models(self, id_: str, models: Iterable[ServedModel]) -> None:
        """What a replica serves now."""
        member = self.fleet.members.get(id_)
        if member:
            self.fleet.observe_models(member, models)
            self.models.judge(member)

    def observe_load(self, id_: str, load: Load, now_s: float | None = None) -> None:
        """A probe's view; sizes the replica's LRU by the engine's capacity, scaled by our share of its work. With
        `now_s`, counters that moved are a sign of life."""
        member = self.fleet.members.get(id_)
        if member is None:
            return
        if _restarted(member.load, load):
            self.forget(id_)
        member.observe_load(load, now_s)
        if now_s is not None:
            self.fleet.fade(member, now_s)
        if load.kv_tokens_max:
            ratio = max((self.models.tokens(name).bytes_per_token for name in member.models), default=4.0)
            held = load.kv_tokens_max * member.share * ratio / blocks.BLOCK_BYTES
            self.index.resize(id_, max(1, int(held)))

    def forget(self, id_: str) -> None:
        """The replica's cache is gone (it restarted)."""
        if id_ in self.fleet.members:
            self._cleared(id_)
            self._suspect(id_)

    def check(self, now_s: float) -> None:
        """Hold what events say against what engines count, and see how much of the fleet's work is ours; to be called
        every second or so."""
        self.fleet.observe_share()
        for member in self.fleet.members.values():
            self.knowledge.checked(member.id, member.load, now_s)

    def alive(self, id_: str, now_s: float) -> None:
        """Something came of a replica's work: a piece of an answer."""
        member = self.fleet.members.get(id_)
        if member is not None:
            member.alive(now_s)

    def rest(self, id_: str, until_s: float) -> None:
        """A replica asked to be left alone until then. That is no failure; nothing is placed there before."""
        member = self.fleet.members.get(id_)
        if member is not None:
            self.standing.rest(member, until_s)

    def stuck(self, now_s: float) -> list[str]:
        """Look for replicas from which nothing comes; to be called a few times a second. Returns those whose silent
        requests are to be tried elsewhere."""
        stuck = []
        for member in self.fleet.members.values():  # one whose health checks failed may still owe answers
            verdict = silence.judge(self.fleet, member, now_s, self._stuck_after_s)
            if verdict is not None:
                if verdict.placed_s >= member.breaker.until_s:  # else it is left from before its rest: no trial
                    self.standing.trip(member, Cause.STUCK, verdict.why, now_s)
                member.left_late = 0
                if verdict.elsewhere:
                    stuck.append(member.id)
        return stuck

    # -- placing -------------------------------------------------------------------------------------------------

    def route(
        self,
        ask: Ask,
        model: str | None,
        chain: Chain | None,
        now_s: float,
        *,
        ring_key: str,
        tokens: TokenPrompt | None = None,
        body_tokens: int = 0,
        exclude: frozenset[str] = frozenset(),
        only: str | None = None,
        full: Collection[str] = (),
        sighting: Sighting | None = None,
        held_s: float | None = None,
    ) -> Lease:
        """Place one request on a fit replica that serves `model` (None: any) and is not excluded.

        `tokens` are the prompt's own, where they are known; `body_tokens` sizes a prompt that is unknown; with
        `exclude` the placement is a retry; `only` names the one replica that can answer, which may be held (see
        Fleet.hold); those that are `full` are passed over while there are others. Raises NoReplica when no candidate is
        left, Shed when all that are asked to be left alone. `sighting` is what is known of the prompt's text. One that
        has been held for `held_s` may be held longer: then Held is raised; None: it may not.
        """
        ready = self.fleet.usable()
        members = self._members(ready, model, exclude, only, now_s)
        if full:
            members = [m for m in members if m.id not in full] or members
        pending_ms = {m.id: m.pending_ms(now_s) for m in (ready if only is None else members)}
        self.knowledge.tick(now_s)
        learned = self.models.tokens(model or "")
        quoted = self.answers.quoted(chain.spans) if chain and chain.spans else []
        size = size_of(ask, chain, learned, body_tokens, tokens, quoted)
        home = self._home(quoted[0][1]) if quoted else ""
        credit = None
        if chain and learned.try_credit() and home:
            credit = self._credit_answer(chain, quoted[0], size, now_s)
        depths = self.index.match(chain.keys) if chain and chain.keys else {}
        held = self.knowledge.held(tokens, now_s) if tokens else {}
        whole = chain.keys if chain else []
        candidates = self._pricer.candidates(members, size, whole, depths, held, pending_ms, now_s)
        choice = self.policy.choose(self._question(ring_key, home, candidates), candidates)
        if held_s is not None and choice.hold_ms > held_s * 1e3:
            raise Held
        chosen = candidates[0]
        for chosen in candidates:
            if chosen.id == choice.id:
                break
        reason = self._reason(chosen, candidates, choice.tied, bool(exclude))
        name, grade, predicted = self.policy.name, chosen.grade, chosen.cached_tokens
        receipt = Receipt(chosen.id, name, reason, grade, size.prompt_tokens, predicted, tuple(candidates))
        if depths or held:
            elsewhere = self._pricer.elsewhere(candidates, size, depths, held)
            if spilled := spill(chosen, candidates, reason, elsewhere=elsewhere, exclude=exclude, full=full):
                receipt.spill, receipt.spilled_tokens = spilled.cause.value, spilled.tokens
        if self.explainer is not None:
            member = self.fleet.members[chosen.id]
            self.explainer.explain(
                receipt,
                chain,
                size.bytes_per_token,
                depths.get(chosen.id, 0),
                member.life,
                sighting,
                now_s,
                block_tokens=member.load.block_tokens or 1,
                lives=self._lives,
                retry=bool(exclude),
            )
        most = self.index.holders[chosen.id].blocks_max
        keys = whole if len(whole) <= most else whole[:most]  # no more than it has room for, of the longest prompt
        lease = Lease(  # by place: with the names it takes three times as long
            self._next_lease,
            chosen.id,
            receipt,
            now_s,
            model or "",
            ask.stream,
            size.prompt_tokens,
            chosen.cached_tokens,
            credit[1] if credit and credit[0] == chosen.id else 0,
            chosen.uncached_ms,
            size.prompt_tokens - int(behind_marks(len(keys)) * blocks.BLOCK_BYTES / size.bytes_per_token),
            keys,
            chain.end_key if chain else None,
            size.text_bytes,
            ask.output_tokens_max or ANSWER_TOKENS_MAX,
            tokens,
            held.get(chosen.id),
            choice.guessed and not (exclude or only or full),  # else it may not be where others send it
        )
        self._open(lease, now_s)
        if lease.held is not None and tokens is not None:
            self.knowledge.expect(chosen.id, lease.id, tokens, lease.held)
        return lease

    def candidates(self, model: str | None, only: str | None, now_s: float) -> list[Member]:
        """Who may take a request, as `route` would find now, full or not. Not to be changed. Raises NoReplica."""
        return self._members(self.fleet.usable(), model, frozenset(), only, now_s)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The first body event of a stream arrived."""
        member = self.fleet.members.get(lease.replica)
        if member and lease.id in member.leases and lease.first_token_s is None:
            member.prefilled(lease, now_s)
            if member.breaker.backoff_s:
                self.standing.token(member, lease, now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Give a lease back at the end of the answer, whatever the end. A second time changes nothing."""
        member = self.fleet.members.get(lease.replica)
        if member is None:
            return
        left = outcome.ending is _LEFT
        late = (
            left
            and lease.placed_s >= member.breaker.until_s
            and silence.is_late(self.fleet, member, lease, now_s, self._stuck_after_s)
        )
        if not member.close(lease, now_s):
            return
        if late:
            member.left_late += 1
        elif left and lease.first_token_s is None:
            member.left_ms += lease.prefill_ms
        ok = outcome.ending is _OK
        computed = ok or lease.first_token_s is not None
        if lease.held is not None and lease.tokens is not None:
            grown = _grown_blocks(lease.held.block_tokens, outcome.usage)
            self.knowledge.settle(lease.replica, lease.id, lease.tokens, now_s, computed=computed, grown_blocks=grown)
        unseen = left and not lease.streams  # it may have been computed
        if computed or unseen:
            self.index.unpin(lease.replica, lease.id, now_s, grown=self._answer_keys(lease, outcome))
        else:
            self.index.retract(lease.replica, lease.id)
            if self.explainer is not None and lease.end_key is not None:
                self.explainer.take_back(lease.receipt, lease.keys, lease.end_key, lease.placed_s, member.life)
        if member.breaker.failures or member.breaker.backoff_s or not (ok or left):
            self.standing.ended(member, lease, outcome.ending, now_s)
        if ok:
            member.answered(lease, now_s)
            self._learn(member, lease, outcome, now_s)

    def _answer_keys(self, lease: Lease, outcome: Outcome) -> list[int]:
        if lease.end_key is None:
            return []
        tokens = outcome.usage.completion_tokens if outcome.usage else outcome.events
        tokens = min(tokens, lease.answer_tokens_max)  # an engine may say anything
        answer_bytes = int(tokens * self.models.tokens(lease.model).bytes_per_token)
        most = self.index.capacity(lease.replica) * blocks.BLOCK_BYTES
        return blocks.answer_keys(lease.end_key, min(answer_bytes, most))

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self, lease: Lease, now_s: float) -> None:
        self._next_lease += 1
        member = self.fleet.members[lease.replica]
        member.open(lease, now_s)
        if self.fleet.guarded:
            self.standing.opened(member, lease)
        if not (member.ready or member.held):
            self.standing.panics += 1
        self.reuse.observe(lease.keys, now_s)
        self.index.pin(lease.replica, lease.id, lease.keys, now_s)

    def _members(
        self, ready: list[Member], model: str | None, exclude: frozenset[str], only: str | None, now_s: float
    ) -> list[Member]:
        """Who may take the request. Raises NoReplica and Shed."""
        members = ready if model is None else self.fleet.serving(model)
        held = None if only is None else self.fleet.held.get(only)
        if held is not None and (model is None or model in held.models):
            members = [held]
        if exclude or only is not None:
            members = [m for m in members if m.id not in exclude and only in (None, m.id)]
        if self.fleet.guarded:
            members = self.standing.allowed(members, now_s, retry=bool(exclude))
        if exclude:  # a second failure would be the client's: to one that has not just failed, if there is any
            members = [m for m in members if not m.breaker.failures] or members
            servers = {Replica(id_).url for id_ in exclude}  # what is wrong with one rank is so with all, as a rule
            members = [m for m in members if m.replica.url not in servers] or members
        if not members:
            raise NoReplica
        return members

    def _lives(self) -> set[int]:
        return {member.life for member in self.fleet.members.values()}

    def _cleared(self, id_: str) -> None:
        member = self.fleet.members.get(id_)
        if member is not None:
            member.life = self.fleet.new_life()
            self.index.clear(id_)
            self._tell_cleared(id_)

    def _graded(self, id_: str, grade: Grade, why: str) -> None:
        member = self.fleet.members.get(id_)
        if member is not None:
            member.grade = grade
            self._tell_graded(id_, grade, why)

    def _question(self, ring_key: str, home: str, candidates: list[Candidate]) -> Question:
        if self._units[0] is not self.fleet.prefill.model:
            self._units = _units(self.fleet.prefill.model)
        _, tie_ms, unit_ms = self._units
        waits_ms = sorted([c.pending_ms if c.pending_ms > c.kv_wait_ms else c.kv_wait_ms for c in candidates])  # noqa: FURB136 - half the time
        count = len(waits_ms)
        half = (count + 1) // 2
        backlog, calm = sum(waits_ms) / count / unit_ms, sum(waits_ms[:half]) / half / unit_ms
        fleet, in_flight, arrivals_per_ms = self.fleet, 0, 0.0
        for c in candidates:
            in_flight += c.in_flight
        if fleet.mean_open_ms:  # by Little's law
            arrivals_per_ms = in_flight / count / fleet.mean_open_ms
        return Question(ring_key, tie_ms, unit_ms, backlog, home, calm, fleet.elsewhere, arrivals_per_ms)

    def _home(self, answer: Answer) -> str:
        """Who gave it, if that cache is still there."""
        member = self.fleet.members.get(answer.replica)
        return member.id if member is not None and member.life == answer.life else ""

    def _credit_answer(
        self, chain: Chain, quoted: tuple[Span, Answer], size: Size, now_s: float
    ) -> tuple[str, int] | None:
        """Count a past answer as held by its home, now that a prompt quotes it: (replica, tokens)."""
        (key, start, end), answer = quoted
        upto = min(end, start + int(answer.completion_tokens * size.bytes_per_token))
        first, last = start // blocks.BLOCK_BYTES, upto // blocks.BLOCK_BYTES
        prefix = chain.keys[:last]
        held = self.index.depth(answer.replica, prefix)
        if not first <= held < last:  # only behind a prefix that is still there
            return None
        self.index.drop(answer.replica, blocks.answer_keys(key, (last - held) * blocks.BLOCK_BYTES))
        self.index.touch(answer.replica, prefix, now_s)
        return answer.replica, round((last - held) * blocks.BLOCK_BYTES / size.bytes_per_token)

    def _reason(self, chosen: Candidate, candidates: list[Candidate], tied: bool, retry: bool) -> Reason:
        if retry:
            return Reason.RETRY
        if len(candidates) == 1:
            return Reason.ONLY
        if not self.policy.cache_aware:
            return Reason.POLICY
        longest = 0
        for c in candidates:
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if not longest:
            return _COLD
        if chosen.cached_tokens == longest:
            return _WARM
        return Reason.TIE if tied else Reason.SPILL


def _units(model: PrefillModel) -> tuple[PrefillModel, float, float]:
    """What it says of prices in milliseconds: which cannot be told apart, and what a backlog is measured in."""
    return model, model.ms(TIE_TOKENS, 0) - model.floor_ms, model.ms(BACKLOG_TOKENS, 0)


def _grown_blocks(block_tokens: int, usage: Usage | None) -> int:
    """Full blocks that an answer fills behind its prompt's own; its last token is never fed back."""
    if usage is None or not usage.completion_tokens or not block_tokens:
        return 0
    return (usage.prompt_tokens + usage.completion_tokens - 1) // block_tokens - usage.prompt_tokens // block_tokens


def _restarted(before: Load, after: Load) -> bool:
    """Counters that went back: another process answers at this address."""
    old, new = before.prompt_tokens_total, after.prompt_tokens_total
    return old is not None and new is not None and new < old
