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

from collections.abc import Callable, Collection, Iterable, Iterator

from msgspec import Struct

from router.core.cache.estimate import PrefixIndex
from router.core.cache.knowledge import BYTES_MAX as HELD_BYTES_MAX
from router.core.cache.knowledge import Knowledge
from router.core.facts.misses import Sighting
from router.core.facts.placements import Candidate, Ending, Grade, Held, Outcome, Question, Reason, Receipt, Usage
from router.core.facts.replicas import Load, Replica, ServedModel
from router.core.facts.requests import Ask
from router.core.fleet import stuck as silence
from router.core.fleet.breaker import Cause, State
from router.core.fleet.fitness import Standing
from router.core.fleet.fleet import Fleet
from router.core.fleet.kv_room import behind_marks
from router.core.fleet.lease import Lease
from router.core.fleet.member import ANSWER_TOKENS_MAX, Member
from router.core.fleet.models import Models, NoReplica
from router.core.learned.answers import Answer, AnswerMemory, Span
from router.core.learned.reuse import ReuseMemory
from router.core.observatory.explain import Explainer
from router.core.placement.candidates import FEW, Pricer, Size, Work, size_of
from router.core.placement.learner import Learner
from router.core.placement.policies import Near, Policy
from router.core.placement.receipts import kept
from router.core.placement.spill import spill
from router.core.prompts import blocks
from router.core.prompts.blocks import Chain
from router.core.prompts.token_keys import TokenPrompt

ESTIMATE_SLACK = 0.9  # an estimated number of prompt tokens may be as much too high
NEAR = 4  # places on the ring that are looked at for every request
# A slice of a look for stuck replicas: so many open leases are 0.2 ms, and a replica is as much work as a few.
LOOK_LEASES, LOOK_LEASES_MIN = 128, 4
_OK, _LEFT = Ending.OK, Ending.CLIENT_LEFT  # to look an enum's member up costs as much as a call
_WARM, _COLD = Reason.WARM, Reason.COLD
HELD_BLOCKS_MAX = 1 << 20  # blocks of one replica that its events may fill the index with


class _Credit(Struct, gc=False):
    """A past answer that a replica holds behind its prompt: `tokens` of it are not counted as held yet."""

    replica: str
    prefix: list[int]  # keys up to the last full block of the answer
    tokens: int
    answer_keys: list[int]  # under which its blocks have been counted so far


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
        held_bytes_max: int = HELD_BYTES_MAX,
        repeats: bool = False,
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
        slowly. With an `explainer` receipts say why tokens miss the cache. `held_blocks_max` is for the events of one
        replica, `held_bytes_max` for those of all; `repeats`: see cache/engine_blocks.py."""
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
            bytes_max=held_bytes_max,
            repeats=repeats,
        )
        self.index = PrefixIndex(index_bytes_max)
        self.reuse = ReuseMemory(memory_max)
        self.answers = AnswerMemory(memory_max)
        self.policy = policy
        self._pricer = Pricer(self.fleet, self.index, self.knowledge, self.reuse)
        self._blocks_max_default = blocks_max_default
        self.models = Models(self.fleet, self.knowledge)
        self._next_lease = 0
        self._named: tuple[list[Member], dict[str, None]] = ([], {})
        self._near = policy.near if isinstance(policy, Near) else None
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
            self.models.names.forget(id_)
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
        if member and self.fleet.observe_models(member, models):
            self.models.names.observe(id_, member.models.values())
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
            learned = [self.models.tokens(name) for name in member.models]
            ratio = max((tokens.bytes_per_token * tokens.pool_ratio for tokens in learned), default=4.0)
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
        self.fleet.observe_under_way(now_s)
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
        return [id_ for found in self.look(now_s) for id_ in found]

    def look(self, now_s: float) -> Iterator[list[str]]:
        """`stuck` in slices of some LOOK_LEASES open leases, so that something else can be done between them."""
        peers, stuck, looked_at = silence.Peers(self.fleet), list[str](), 0
        for member in list(self.fleet.members.values()):  # one whose health checks failed may still owe answers
            if not silence.quiet(member, now_s, self._stuck_after_s):
                continue
            if looked_at >= LOOK_LEASES:
                yield stuck
                stuck, looked_at = [], 0
                if self.fleet.members.get(member.id) is not member:
                    continue  # it has left meanwhile
            looked_at += LOOK_LEASES_MIN + len(member.leases)
            verdict = silence.judge(self.fleet, member, now_s, self._stuck_after_s, peers)
            if verdict is not None:
                if verdict.placed_s >= member.breaker.until_s:  # else it is left from before its rest: no trial
                    self.standing.trip(member, Cause.STUCK, verdict.why, now_s)
                member.left_late = 0
                if verdict.elsewhere:
                    stuck.append(member.id)
        yield stuck

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
        may_hold: bool = False,
    ) -> Lease:
        """Place one request on a fit replica that serves `model` (None: any) and is not excluded.

        `tokens` are the prompt's own, where they are known; `body_tokens` sizes a prompt that is unknown; with
        `exclude` the placement is a retry; `only` names the one replica that can answer, which may be held (see
        Fleet.hold); those that are `full` are passed over while there are others. Raises NoReplica when no candidate is
        left, Shed when all that are asked to be left alone, and Held where it is better placed later, if it `may_hold`.
        `sighting` is what is known of the prompt's text.
        """
        ready = self.fleet.usable()
        members = self._members(ready, model, exclude, only, now_s)
        if full:
            members = [m for m in members if m.id not in full] or members
        self.knowledge.tick(now_s)
        answer_tokens = min(members[0].speeds.answer_tokens.mean, ask.output_tokens_max or ANSWER_TOKENS_MAX)
        work, home, credit = self._believe(ask, model, chain, tokens, body_tokens, answer_tokens, now_s)
        size, depths, held, whole = work.size, work.depths, work.held, work.keys
        if size.prompt_tokens > self.fleet.context_tokens_min and model is not None:
            members = _long_enough(members, model, size.prompt_tokens * (1.0 if tokens else ESTIMATE_SLACK))
        question, candidates = self._weigh(members, work, ring_key, home, now_s)
        choice = self.policy.choose(question, candidates)
        if may_hold and choice.hold:
            raise Held
        if home:
            self.models.tokens(model or "").count_credit()
        if credit is not None:
            self._credit(credit, now_s)
        chosen = candidates[0]
        for chosen in candidates:
            if chosen.id == choice.id:
                break
        reason = self._reason(chosen, candidates, choice.tied, bool(exclude))
        name, grade, predicted = self.policy.name, chosen.grade, chosen.cached_tokens
        receipt = Receipt(chosen.id, name, reason, grade, size.prompt_tokens, predicted, kept(candidates, chosen))
        receipt.weighed = question.replicas
        if depths or held:
            elsewhere = self._pricer.elsewhere(members, work)
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
            credit.tokens if credit is not None and credit.replica == chosen.id else 0,
            chosen.uncached_ms,
            size.prompt_tokens - int(behind_marks(len(keys)) * blocks.BLOCK_BYTES / size.bytes_per_token),
            keys,
            chain.end_key if chain else None,
            size.text_bytes,
            ask.output_tokens_max or ANSWER_TOKENS_MAX,
            tokens,
            None if held is None else held.get(chosen.id) or self.knowledge.empty(chosen.id),
            choice.guessed and not (exclude or only or full),  # else it may not be where others send it
            max(0.0, chosen.uncached_ms - self.fleet.members[chosen.id].prefill_model.floor_ms),
        )
        lease.opaque_bytes = size.opaque_bytes
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
            and silence.is_late(member, lease, now_s, self._stuck_after_s)
        )
        if not member.close(lease, now_s, member.speeds.mean_answer_tokens):
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

    def _believe(
        self,
        ask: Ask,
        model: str | None,
        chain: Chain | None,
        tokens: TokenPrompt | None,
        body_tokens: int,
        answer_tokens: float,
        now_s: float,
    ) -> tuple[Work, str, _Credit | None]:
        """The request in tokens with what is believed held of its prompt; the home of its conversation, "" where there
        is none; and what of a past answer the home holds besides. Changes nothing."""
        learned = self.models.tokens(model or "")
        quoted = self.answers.quoted(chain.spans) if chain and chain.spans else []
        size = size_of(ask, chain, learned, body_tokens, tokens, quoted)
        home = self._home(quoted[0][1]) if quoted else ""
        credit = None
        depths = self.index.match(chain.keys) if chain and chain.keys else {}
        if chain and home and learned.may_credit:
            credit = self._answer_credit(chain, quoted[0], size)
            if credit is not None:
                depths[credit.replica] = len(credit.prefix)
        held = self.knowledge.held(tokens, now_s) if tokens else None
        return Work(size, answer_tokens, chain.keys if chain else [], depths, held), home, credit

    def _weigh(
        self, members: list[Member], work: Work, ring_key: str, home: str, now_s: float
    ) -> tuple[Question, list[Candidate]]:
        """The policy's question, and who may be its answer: all members, or of many those that can be the cheapest."""
        pricer, count = self._pricer, len(members)
        standings = pricer.survey(members, now_s)
        waits_ms, order = standings.waits_ms, list[str]()
        if count > FEW and self._near is not None:
            order = self._near(ring_key, self._ids_of(members))
            listed = pricer.shortlist(members, work, standings, [home, *order[:NEAR]])
            members, waits_ms = [members[n] for n in listed], [waits_ms[n] for n in listed]
        candidates = pricer.candidates(members, waits_ms, standings.slower, work, now_s)
        tie_ms, unit_ms = members[0].speeds.units()
        backlog, median = standings.backlog_ms / unit_ms, standings.median_ms / unit_ms
        all_in_flight, all_blocks = standings.in_flight, standings.footprint_blocks
        elsewhere = self.fleet.elsewhere
        question = Question(
            ring_key, tie_ms, unit_ms, backlog, median, count, all_in_flight, all_blocks, home, elsewhere, order
        )
        return question, candidates

    def _ids_of(self, members: list[Member]) -> dict[str, None]:
        """Their ids; lists of members are made anew when anything changes in them (roster.py)."""
        if self._named[0] is not members or len(self._named[1]) != len(members):
            self._named = members, dict.fromkeys([member.id for member in members])
        return self._named[1]

    def _home(self, answer: Answer) -> str:
        """Who gave it, if that cache is still there."""
        member = self.fleet.members.get(answer.replica)
        return member.id if member is not None and member.life == answer.life else ""

    def _answer_credit(self, chain: Chain, quoted: tuple[Span, Answer], size: Size) -> _Credit | None:
        """What of a past answer its home holds, now that a prompt quotes it; None where nothing is."""
        (key, start, end), answer = quoted
        upto = min(end, start + int(answer.completion_tokens * size.text_bytes_per_token))
        first, last = start // blocks.BLOCK_BYTES, upto // blocks.BLOCK_BYTES
        prefix = chain.keys[:last]
        held = self.index.depth(answer.replica, prefix)
        if not first <= held < last:  # only behind a prefix that is still there
            return None
        tokens = round((last - held) * blocks.BLOCK_BYTES / size.text_bytes_per_token)
        return _Credit(answer.replica, prefix, tokens, blocks.answer_keys(key, (last - held) * blocks.BLOCK_BYTES))

    def _credit(self, credit: _Credit, now_s: float) -> None:
        """Count it as held from now on, under the keys that its text has as part of a prompt."""
        self.index.drop(credit.replica, credit.answer_keys)
        self.index.touch(credit.replica, credit.prefix, now_s)

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


def _long_enough(members: list[Member], model: str, prompt_tokens: float) -> list[Member]:
    """Of these, who says that its context is long enough for the prompt; all of them, if nobody does: then the engine
    is to refuse it."""

    def fits(member: Member) -> bool:
        served = member.models.get(model)
        longest = served.max_model_len_tokens if served is not None else None
        return longest is None or prompt_tokens <= longest

    return [member for member in members if fits(member)] or members


def _grown_blocks(block_tokens: int, usage: Usage | None) -> int:
    """Full blocks that an answer fills behind its prompt's own; its last token is never fed back."""
    if usage is None or not usage.completion_tokens or not block_tokens:
        return 0
    return (usage.prompt_tokens + usage.completion_tokens - 1) // block_tokens - usage.prompt_tokens // block_tokens


def _restarted(before: Load, after: Load) -> bool:
    """Counters that went back: another process answers at this address."""
    old, new = before.prompt_tokens_total, after.prompt_tokens_total
    return old is not None and new is not None and new < old
