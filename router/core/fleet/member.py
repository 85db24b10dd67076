"""One replica as the router sees it, its cache apart: open leases, load, speed, signs of life.

Prefill that waits there is in prefill_queue.py, who decodes there in core/learned/steps.py (DecodeClock).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from router.core.facts.legs import Handshake
from router.core.facts.peers import NOTHING, PeerSums
from router.core.facts.placements import Grade, Outcome
from router.core.facts.replicas import Load, Replica, ServedModel
from router.core.fleet.breaker import Breaker, State
from router.core.fleet.health import Health
from router.core.fleet.kv_room import Live
from router.core.fleet.lease import DECODE, PREFILL, Lease, PrefillBatch, Timed
from router.core.fleet.loads import TierLinks, learn_load
from router.core.fleet.others import Others
from router.core.fleet.page_source import PageSource
from router.core.fleet.prefill_queue import PrefillQueue
from router.core.learned.prefill import LEARN_TOKENS_MIN, PrefillModel
from router.core.learned.speed_factor import SpeedFactor
from router.core.learned.speeds import Speeds
from router.core.learned.steps import ANSWER_TOKENS_MIN, DecodeClock, StepModel, Stretch

FOREIGN_PROBES = 3  # probes over which requests of others that wait there are averaged
SHARE_FADE = 0.98  # part of the counts behind our share of a replica's prompts that is left after a probe with news
# Above 90 % we are the only sender: the rest is requests that the engine has counted and we have not, or the reverse.
SHARE_ALL = 0.9
SHARE_TOKENS_MIN = 50_000  # prompt tokens counted by the engine before the share says anything
PROMPT_TOKENS_MAX = 1 << 24  # most tokens of one prompt that an engine is believed
ON_TIME_FACTOR, ON_TIME_MS = 3.0, 1_500.0  # a first token is on time within 3 x its modelled time + 1,500 ms
LATE_S = 3.0  # after a late first token, first tokens that came with it prove nothing for so long
HIDDEN_FACTOR = 3.0  # work whose end is not seen may take so many times its modelled time
UNCOUNTED_MAX = 256  # open leases that an engine may not have counted yet, or no more
# First tokens of one batch are less than half a step apart, those of two batches a step or more. Those that other
# routers saw are placed by an estimate of a message's delay.
BATCH_STEPS, BATCH_LEAST_MS, BATCH_MOST_MS = 0.5, 0.2, 20.0  # a part of a step, within limits
BATCH_OTHERS_LEAST_MS = 5.0
GATHERED_MS = 10.0  # an answer that came within so long was gathered on its way: its time says nothing of steps
BATCHES_MAX = 16  # latest batches of a replica: others' first tokens are heard a moment later
TIMED_MAX = 8  # first tokens of a replica that are compared with its peers'
ANSWER_TOKENS_MAX = 32_768  # longest answer believed where the client set no limit


@dataclass(slots=True)
class Member:
    """One replica's state. Written only in this room (core/fleet)."""

    replica: Replica
    life: int = 0  # number of its cache, counted over all replicas: what one cache held, the next one does not
    id: str = field(init=False)
    health: Health = field(default_factory=Health)
    breaker: Breaker = field(default_factory=Breaker)
    grade: Grade = Grade.ESTIMATED
    models: dict[str, ServedModel] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    page_source: PageSource = field(default_factory=PageSource)
    prefill_factor: SpeedFactor[PrefillModel] = field(default_factory=SpeedFactor)
    step_factor: SpeedFactor[StepModel] = field(default_factory=SpeedFactor)
    speeds: Speeds = field(default_factory=Speeds)  # speeds of all replicas that serve the same models
    clock: DecodeClock = field(default_factory=DecodeClock)
    queue: PrefillQueue = field(init=False)
    leases: dict[int, Lease] = field(default_factory=dict)  # open leases
    others: Others = field(default_factory=Others)  # what other routers say that they have open there
    links: TierLinks = field(default_factory=TierLinks)  # loads from its tiers
    roomless: set[int] = field(default_factory=set)  # leases without a first token that wait for KV room, as believed
    decoding: int = 0  # open leases whose prefill is over, as far as that was seen
    placed_sum_s: float = 0.0  # sum of the open leases' times of placement
    context_tokens: int = 0  # prompts of open leases, each in full: attention reads every stream's own
    live: Live = field(default_factory=Live)  # room that prompts of open leases take in the KV pool
    sent_prompt_tokens: float = 0.0  # prompt tokens that we sent, faded
    told_prompt_tokens: float = 0.0  # prompt tokens that other routers say they sent, faded alike
    seen_prompt_tokens: float = 0.0  # prompt tokens that the engine counted, faded alike
    faded: int = 0  # how often these counts have faded
    foreign_waiting: float = 0.0  # mean number of requests waiting there that are not ours, over the last probes
    # Most open leases that other routers are believed to have there: whoever writes to the store that they share may
    # say anything, and the engine counts its requests. None: it does not tell.
    others_max: int | None = None
    in_flight_probed: int = 0  # open leases when `load` was heard of
    coming: set[int] = field(default_factory=set)  # ids of decode legs whose engine waits for their blocks
    coming_peak: int = 0  # most of them at once since the last probe
    coming_probed: int = 0  # decode legs that waited in the engine for their blocks when `load` was heard of
    _foreign: deque[int] = field(default_factory=lambda: deque([0], maxlen=FOREIGN_PROBES))
    first_token_s: float = 0.0  # time of the last first token
    long_s: float = -inf  # time of the last first token of a long prefill
    _batch: PrefillBatch | None = None  # batch of the last first token
    _batches: deque[PrefillBatch] = field(default_factory=lambda: deque(maxlen=BATCHES_MAX))  # while there are others
    _others_tokens: int = 0  # tokens that other routers had computed, as heard at the last first token
    # What requests say of the replica, for breaker.py, stuck.py, slow.py and fitness.py.
    alive_s: float = 0.0  # last sign of life
    on_time_s: float = -inf  # last first token that was on time, or answer that did not stream
    late_s: float = -inf  # last first token that was late
    unseen_end_s: float = 0.0  # end of the last answer that did not stream
    counts: bool = False  # whether the engine's counters move when it works
    unseen_answers: int = 0  # requests sent there whose answers do not come by here: nothing was learned from them
    left_late: int = 0  # clients that left without a token that was late, since the last sign of life
    left_ms: float = 0.0  # modelled prefill of requests whose clients left before it ended: it may have been worked on
    timed: deque[Timed] = field(default_factory=lambda: deque(maxlen=TIMED_MAX))
    longest_tokens: int = 0  # most uncached tokens of a prompt from which its speed was learned
    rest_until_s: float = 0.0
    full: bool = False  # resting because its queue was full, with no time given
    full_trial: int = -1  # number of the last lease that was placed there during such a rest
    came_back: bool = False  # health checks are fine again, and nothing was placed since
    warming_up: bool = False  # no requests are sent until the cache is filled (Fleet.warm_up)
    back_s: float = -inf  # time at which the slow start began

    def __post_init__(self) -> None:
        self.id = self.replica.id
        self.queue = PrefillQueue(self._decodes)

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests, as far as its health checks, discovery and its warming say."""
        return self.health.fit and self.replica.ready and not self.warming_up

    @property
    def prefill_model(self) -> PrefillModel:
        """The model of prefill of all such replicas, at the member's own speed."""
        return self.prefill_factor.of(self.speeds.prefill.model)

    @property
    def step_model(self) -> StepModel:
        """The model of a decoding step of all such replicas, at the member's own speed."""
        return self.step_factor.of(self.speeds.steps.model)

    @property
    def batch_ms(self) -> float:
        """Longest time between two first tokens of one batch, by the learned step with the streams of now."""
        step_ms = self.step_model.ms(self.clock.streams, self.clock.context_tokens)
        return min(max(BATCH_STEPS * step_ms, BATCH_LEAST_MS), BATCH_MOST_MS)

    def context_tokens_max(self, model: str) -> float:
        """The longest context that it says the model has; infinite where it does not say."""
        served = self.models.get(model)
        return inf if served is None or served.max_model_len_tokens is None else served.max_model_len_tokens

    def take_speeds(self, speeds: Speeds) -> None:
        """Share the speeds of other models from now on: what was learned of its own speed is of no use any more."""
        self.speeds, self.longest_tokens = speeds, 0
        self.prefill_factor.reset()
        self.step_factor.reset()
        self.links.forget_speed()

    def pending_ms(self, now_s: float) -> float:
        """Modelled time until everything that we sent there is prefilled."""
        return self.queue.pending_ms(now_s)

    def wait_ms(self, now_s: float) -> float:
        """Modelled time until everything there is prefilled that we sent, and that other routers say they sent."""
        own_ms, others, queue = self.queue.pending_ms(now_s), self.others, self.queue
        if not others.waiting_ms:
            return own_ms
        placed_s, head_ms = others.head()
        prefill_ms = float(head_ms)  # native code keeps whole numbers apart
        head = queue.head
        if head is not None and head.queued_s <= placed_s:
            placed_s, prefill_ms = head.queued_s, head.prefill_ms
        since_s = max(placed_s, self.first_token_s, others.first_token_s)
        gone_ms = min(max(0.0, (now_s - since_s) * 1e3), prefill_ms)
        return max(0.0, queue.waiting_ms() + others.waiting_ms - gone_ms)

    @property
    def open_leases(self) -> int:
        """Open leases, those of other routers included, as far as they say and the engine bears it out."""
        others, most = self.others.open, self.others_max
        return len(self.leases) + (others if most is None or others < most else most)

    def take_others(self, peer: str, sums: PeerSums, clock_s: float, now_s: float, *, known: bool = True) -> None:
        """Take what another router says that it has open here: that is not foreign any more. `clock_s` is what our
        clock shows more than its clock. Of a router that was not `known` before, what it has counted says nothing,
        unless it was heard earlier: what it sent while nobody heard it was no foreigner's."""
        others, stall_ms = self.others, 0
        before = others.take(peer, sums, clock_s)
        if before is None and (sent_tokens := others.sent_meanwhile(peer, sums.sent_tokens)) is not None:
            self.told_prompt_tokens += sent_tokens
        elif before is not None or known:
            before = before or NOTHING
            self.told_prompt_tokens += max(0, sums.sent_tokens - before.sent_tokens)
            stall_ms = max(0, sums.stall_ms - before.stall_ms)
        self.clock.beside(others.decoding, others.decoding_tokens, stall_ms / self.prefill_model.pace_ms, now_s)

    def others_first_token(self, at_s: float, tokens: int) -> None:
        """Another router had a first token from here then, of a prompt of which so many tokens were computed."""
        self.others.first_token(at_s, tokens)
        for batch in self._batches:
            if batch.until_s > at_s - max(self.batch_ms, BATCH_OTHERS_LEAST_MS) / 1e3:
                self._share(batch)
        if at_s > self.alive_s:
            self.alive(at_s)

    def _share(self, batch: PrefillBatch) -> None:
        """Have others' prompts take their parts of a batch's time, as far as they are known by now."""
        before_s, batch.others_tokens = self.others.batch(
            batch.until_s, max(self.batch_ms, BATCH_OTHERS_LEAST_MS) / 1e3
        )
        batch.since_s = max(batch.since_s, before_s)

    def computed_for(self, lease: Lease, tokens: int, now_s: float) -> bool:
        """Another router's prompt came here at the same moment, and has so many of a waiting lease's leading tokens:
        they are computed once, for that. Returns whether less waits here than was believed."""
        cached_tokens = min(tokens, lease.prompt_tokens - 1)
        if cached_tokens <= lease.cached_tokens:
            return False
        model = self.prefill_model
        prefill_ms = model.ms(lease.prompt_tokens - cached_tokens, cached_tokens)
        if prefill_ms >= lease.prefill_ms or not self.queue.recount(lease, prefill_ms):
            return False
        lease.cached_tokens, lease.turn_s = cached_tokens, now_s
        lease.stall_ms = max(0.0, prefill_ms - model.floor_ms)
        return True

    def forget_other(self, peer: str, now_s: float) -> None:
        """Another router is there no more."""
        self.prefill_factor.forget(peer)
        self.step_factor.forget(peer)
        if self.others.forget(peer):
            self.clock.beside(self.others.decoding, self.others.decoding_tokens, 0.0, now_s)

    def open(self, lease: Lease, now_s: float, kv_wait_ms: float = 0.0) -> None:
        """Take a lease on; `kv_wait_ms` is the time until the KV pool has room for it, and for those that wait for room
        before it."""
        if lease.role != DECODE:
            self.queue.join(lease, now_s)
        elif (leg := lease.receipt.leg) is not None and leg.handshake is not Handshake.NIXL:
            self.awaits(lease)
        self.leases[lease.id] = lease
        if kv_wait_ms:
            self.roomless.add(lease.id)
        self.live.open(lease.id, lease.keys, lease.own_tokens)
        self.placed_sum_s += lease.placed_s
        self.context_tokens += lease.prompt_tokens
        self.sent_prompt_tokens += lease.prompt_tokens  # now, before the engine can count it: never too few
        lease.faded, lease.others_tokens = self.faded, self.others.computed_tokens
        if lease.to_load is not None:
            self.links.begin(lease, self.speeds.loads, now_s)

    def undisturbed(self, lease: Lease) -> bool:
        """Whether no long prefill went on since a lease was placed whose first token is about to be noted, nor is its
        own long: what it took beyond its prefill is then the time of what it brought."""
        is_long = lease.uncached_tokens >= LEARN_TOKENS_MIN
        return not self.queue.computing and self.long_s < lease.placed_s and not is_long

    def prefilled(self, lease: Lease, now_s: float) -> None:
        """The first token was seen; what it took is the replica's service time."""
        queue = self.queue
        queue.decay(now_s)
        lease.first_token_s = now_s
        since_s = max(lease.placed_s, self.first_token_s)
        lease.batch, lease.batch_tokens = self._join(lease, since_s, now_s), lease.uncached_tokens
        if self.others.computed_tokens:
            if self._batch is not lease.batch:
                self._batches.append(lease.batch)
            self._share(lease.batch)
        self._batch = lease.batch
        is_long = lease.uncached_tokens >= LEARN_TOKENS_MIN
        if lease is queue.head:
            self._time(lease, max(since_s, self.unseen_end_s), now_s)
        if lease.id in self.roomless:  # most of the time was no prefill, and says nothing of its speed
            self.roomless.discard(lease.id)
            lease.batch = lease.own_ms = None
        self._others_tokens = self.others.computed_tokens
        self.first_token_s = self.alive_s = now_s
        self.left_late, self.left_ms = 0, 0.0
        queue.leave(lease, now_s)
        if (load := lease.to_load) is not None:
            self.links.loaded(lease, load, now_s, alone=load.alone and self.undisturbed(lease))
        if is_long:
            self.long_s = now_s

    def passed_on(self, lease: Lease, now_s: float) -> None:
        """The prefill of a lease is over, as another replica's first token shows: when that was is not known."""
        lease.first_token_s = self.alive_s = now_s
        self.left_late, self.left_ms = 0, 0.0
        self.queue.leave(lease, now_s)

    def awaits(self, lease: Lease) -> None:
        """The engine has a decode leg from now on, and waits for its blocks. NIXL's is asked once they are computed."""
        self.coming.add(lease.id)
        self.coming_peak = max(self.coming_peak, len(self.coming))

    def decodes(self, lease: Lease, now_s: float) -> None:
        """The prompt of a decode leg is prefilled elsewhere: it decodes here from now on. A second time changes
        nothing."""
        self.coming.discard(lease.id)
        if lease.mark is None:
            self._decodes(lease, now_s)

    def computes(self, lease: Lease, cached_tokens: int, now_s: float) -> None:
        """Nothing comes of the prefill elsewhere: this member computes the prompt of a decode leg itself, and holds so
        many of its tokens. It waits for that from now on, as any prompt does. One that decodes already does not."""
        if lease.mark is not None or lease.first_token_s is not None:
            return
        model = self.prefill_model
        self.coming.discard(lease.id)
        lease.cached_tokens, lease.turn_s = cached_tokens, now_s
        lease.prefill_ms = model.ms(lease.prompt_tokens - cached_tokens, cached_tokens)
        lease.stall_ms = max(0.0, lease.prefill_ms - model.floor_ms)
        self.queue.join(lease, now_s)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """The first token of a decode leg was seen: no prefill of this member's is over, unless it computed the prompt
        itself. How long that took is not learned from: an attempt elsewhere came before it."""
        lease.first_token_s = self.alive_s = now_s
        self.left_late, self.left_ms = 0, 0.0
        self.roomless.discard(lease.id)
        if self.queue.holds(lease):
            self.queue.leave(lease, now_s)
            self.first_token_s, self._batch = now_s, None
            if lease.uncached_tokens >= LEARN_TOKENS_MIN:
                self.long_s = now_s
        self.decodes(lease, now_s)

    def _join(self, lease: Lease, since_s: float, now_s: float) -> PrefillBatch:
        """The batch of the last first token, if this first token came with it; a new batch otherwise."""
        batch, before_s = self._batch, self.first_token_s
        if batch is None or lease.placed_s >= before_s or (now_s - before_s) * 1e3 > self.batch_ms:
            return PrefillBatch(before_s, since_s, now_s, lease.uncached_tokens)
        began_s = max(lease.placed_s, batch.before_s)
        if began_s < batch.since_s:
            batch.since_s = began_s
        batch.until_s = now_s
        batch.tokens += lease.uncached_tokens
        return batch

    def _time(self, lease: Lease, since_s: float, now_s: float) -> None:
        """The head of the queue has its first token: how long that took, and whether it was on time."""
        took_ms = (now_s - since_s) * 1e3
        if others := self.others.computed_tokens - max(lease.others_tokens, self._others_tokens):
            took_ms *= lease.uncached_tokens / (lease.uncached_tokens + others)  # of the time they had their part
        expected_ms = lease.prefill_ms + lease.loading_ms
        if took_ms > ON_TIME_FACTOR * expected_ms:  # late, unless it waited for work whose end is not seen
            hidden_ms = sum(each.prefill_ms for each in self.leases.values() if not each.streams)
            if hidden_ms and not self.prefill_factor.observations:
                return  # nobody knows how long the hidden work takes
            took_ms -= HIDDEN_FACTOR * hidden_ms
        if not lease.loading_ms and (not lease.queued or took_ms > self.batch_ms):  # a load says nothing of prefill
            lease.own_ms = max(0.0, took_ms)
        if took_ms > ON_TIME_FACTOR * expected_ms + ON_TIME_MS:
            self.late_s = now_s
        elif now_s - self.late_s > LATE_S:
            self.on_time_s = now_s

    def answered(self, lease: Lease, now_s: float) -> None:
        """An answer ended well."""
        self.alive_s, self.left_late, self.left_ms = now_s, 0, 0.0
        if not lease.streams:
            self.unseen_end_s = now_s
            if now_s - self.late_s > LATE_S:
                self.on_time_s = now_s

    def sent(self, lease: Lease, prompt_tokens: int) -> None:
        """Count an answered prompt at the length that its engine says, not at the length believed at placement."""
        more = min(prompt_tokens, PROMPT_TOKENS_MAX) - lease.prompt_tokens
        if more:
            sent = self.sent_prompt_tokens + more * SHARE_FADE ** (self.faded - lease.faded)
            self.sent_prompt_tokens = max(0.0, sent)

    def forget_speed(self) -> None:
        """Forget what was learned of its speed, which kept all requests away: a trial must look worth it."""
        self.timed.clear()
        self.prefill_factor.reset()
        self.step_factor.reset()

    def alive(self, now_s: float) -> None:
        """Take any other sign of life."""
        self.alive_s, self.left_late, self.left_ms = now_s, 0, 0.0

    def close(self, lease: Lease, now_s: float, answer_tokens: float = 0.0) -> bool:
        """Give a lease back; False when it was already back. `answer_tokens` is the mean length of answers there."""
        self.queue.decay(now_s)
        if self.leases.pop(lease.id, None) is None:
            return False
        self.roomless.discard(lease.id)
        if lease.role != DECODE or lease.mark is not None or self.queue.holds(lease):
            self.decoding -= 1  # `_decodes` adds this 1 back if the prefill was still pending
        self.coming.discard(lease.id)
        self.context_tokens -= lease.prompt_tokens
        if lease.mark is not None:
            lease.stretch = self.clock.leave(lease.prompt_tokens, lease.mark, now_s, answer_tokens)
        self.live.close(lease.id, lease.keys, lease.own_tokens)
        self.placed_sum_s = self.placed_sum_s - lease.placed_s if self.leases else 0.0
        self.queue.leave(lease, now_s)
        if lease.to_load is not None:
            self.links.leave(lease, now_s)
        return True

    def left(self, lease: Lease, *, late: bool) -> None:
        """The client of a lease left; `late` says that its first token should have come by then."""
        if late:
            self.left_late += 1
        elif lease.first_token_s is None:
            self.left_ms += lease.prefill_ms

    def learn(self, lease: Lease, outcome: Outcome, now_s: float) -> tuple[int, int]:
        """Learn from a lease that ended well: speed of prefill and of decoding, size of requests, length of leases.
        Returns how many tokens of its prompt were computed, and how many were cached."""
        usage = outcome.usage
        uncached, cached = lease.uncached_tokens, lease.cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            uncached, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
            lease.recount(max(0, uncached))  # an engine may say anything
        speeds = self.speeds
        if lease.loading_ms:
            learn_load(self.links, speeds.loads, lease, cached)
        elif (service_ms := lease.service_ms) is not None:
            if uncached < LEARN_TOKENS_MIN:
                speeds.was_short(service_ms)
            elif uncached > self.longest_tokens:
                self.longest_tokens = uncached
            speeds.prefill.observe(uncached, cached, service_ms)
            if uncached >= LEARN_TOKENS_MIN:
                self.prefill_factor.observe(service_ms, speeds.prefill.model.ms(uncached, cached), now_s)
        if lease.role == PREFILL:  # means are of clients' requests
            speeds.computed(uncached)
            return uncached, cached
        leg = lease.receipt.leg
        prefill_ms = lease.prefill_ms if leg is None else leg.uncached_ms
        if outcome.unseen:  # lengths and rates are those of answers that were seen
            speeds.passed((now_s - lease.placed_s) * 1e3)
            speeds.asked(lease.prompt_tokens, prefill_ms)
            return uncached, cached
        tokens = usage.completion_tokens if usage is not None else outcome.events
        speeds.ended((now_s - lease.placed_s) * 1e3, tokens, uncached)
        if lease.first_token_s is not None:
            speeds.decoded((now_s - lease.first_token_s) * 1e3)
            if lease.streams and lease.stretch is not None and tokens >= ANSWER_TOKENS_MIN:
                self._learn_steps(lease.stretch, tokens - 1, now_s)
        speeds.asked(lease.prompt_tokens, prefill_ms)
        return uncached, cached

    def _learn_steps(self, stretch: Stretch, tokens: int, now_s: float) -> None:
        step_ms = stretch.step_ms(tokens, self.prefill_model.pace_ms)
        streams, context, common = stretch.streams, stretch.context_tokens, self.speeds.steps
        if step_ms > 0 and stretch.ms >= GATHERED_MS:
            common.observe(streams, context, step_ms)
            self.step_factor.observe(step_ms, common.model.ms(streams, context), now_s)

    def under_way_tokens(self, now_s: float) -> float:
        """Tokens that the answers under way have brought so far, by the model of a decoding step."""
        clock = self.clock
        streams, context_tokens = clock.streams + clock.other_streams, clock.context_tokens + clock.other_tokens
        return clock.running_s(now_s) * 1e3 / self.step_model.ms(streams, context_tokens)

    def observe_load(self, load: Load, now_s: float | None = None) -> None:
        """Take a probe's view: who else uses the replica, and how much of it is ours. Counters that move are a sign of
        life, which /health is not: it may be green before a dead engine."""
        before, self.load = self.load, load
        if load.running is None or load.waiting is None:
            self.others_max = None
        else:
            waiting = load.waiting + (load.deferred or 0)
            self.others_max = max(0, load.running) + max(0, waiting) + UNCOUNTED_MAX
        self.in_flight_probed = self.open_leases
        # Requests whose blocks are on their way are deferred ones, where the engine counts these apart.
        self.coming_probed = len(self.coming) if load.deferred is None else 0
        if now_s is not None and _moved(before, load):
            self.counts = True
            self.alive(now_s)
        # Our own count moves while the engine's is under way, so only an excess over the most we had waiting is
        # somebody else's. The mean of several probes counts: between two of them nothing is heard of others. Engines
        # count as waiting, too, whose blocks are on their way (vLLM: WAITING_FOR_REMOTE_KVS).
        coming = self.coming_peak if load.deferred is None else 0
        known = self.queue.restart_peak() + self.others.restart_peak() + coming
        self.coming_peak = len(self.coming)
        self._foreign.append(max(0, (load.waiting or 0) - known))
        self.foreign_waiting = sum(self._foreign) / len(self._foreign)
        old, new = before.prompt_tokens_total, load.prompt_tokens_total
        if old is not None and new is not None and new > old:
            self.faded += 1
            self.sent_prompt_tokens *= SHARE_FADE
            self.told_prompt_tokens *= SHARE_FADE
            self.seen_prompt_tokens = self.seen_prompt_tokens * SHARE_FADE + new - old
        if now_s is not None:  # slowness is forgotten little by little while nobody asks the replica
            self.prefill_factor.fade(now_s)
            self.step_factor.fade(now_s)

    def forget_counters(self) -> None:
        """What the engine's counters showed was of several processes: neither our share nor a sign of life."""
        self.counts = False
        self.seen_prompt_tokens = 0.0

    def state(self, now_s: float) -> State:
        """What it is sent, as far as requests have a say in it."""
        return State.RESTING if now_s < self.rest_until_s else self.breaker.state(now_s)

    @property
    def share(self) -> float:
        """Part of the replica's prompt tokens that come through us: others fill its cache too."""
        return self._part(self.sent_prompt_tokens)

    @property
    def known_share(self) -> float:
        """Part of the replica's prompt tokens that come through us, and through routers that tell us what they do."""
        return self._part(self.sent_prompt_tokens + self.told_prompt_tokens)

    def _part(self, prompt_tokens: float) -> float:
        if self.seen_prompt_tokens < SHARE_TOKENS_MIN:
            return 1.0
        share = prompt_tokens / self.seen_prompt_tokens
        return share if share < SHARE_ALL else 1.0

    def _decodes(self, lease: Lease, now_s: float) -> None:
        """A lease left the queue of prefills."""
        self.decoding += 1
        if lease.id in self.leases:
            model = self.prefill_model
            stall_ms = model.ms(lease.uncached_tokens, lease.cached_tokens) - model.floor_ms
            lease.mark = self.clock.join(lease.prompt_tokens, stall_ms / model.pace_ms, now_s)


def _moved(before: Load, after: Load) -> bool:
    return (
        _rose(before.prompt_tokens_total, after.prompt_tokens_total)
        or _rose(before.generation_tokens_total, after.generation_tokens_total)
        or _rose(before.computed_tokens_total, after.computed_tokens_total)
    )


def _rose(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > before
