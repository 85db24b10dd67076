"""State of one replica as the router knows it, without its cache: open leases, load, speed, signs of life.

Its queue of waiting prefills is in prefill_queue.py, and its decoding streams are in core/estimators/decode_step.py
(DecodeClock).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from router.core.estimators.decode_step import ANSWER_TOKENS_MIN, DecodeClock, DecodeInterval, StepModel
from router.core.estimators.model_speeds import ModelSpeeds
from router.core.estimators.prefill import LEARN_TOKENS_MIN, PrefillModel
from router.core.estimators.speed_factor import SpeedFactor
from router.core.fleet.breaker import Breaker, State
from router.core.fleet.health import Health
from router.core.fleet.kv_reservations import KvReservations
from router.core.fleet.lease import DECODE, PREFILL, Lease, PrefillBatch, TtftSample
from router.core.fleet.peer_leases import PeerLoadView
from router.core.fleet.prefill_queue import PrefillQueue
from router.core.fleet.restart_detection import PageSource
from router.core.fleet.tier_loads import TierLinks, learn_load
from router.core.types.peer_load import ZERO_LOAD, PeerLoad
from router.core.types.placements import Confidence, Outcome
from router.core.types.replicas import Load, Replica, ServedModel

FOREIGN_PROBES = 3  # number of probes over which waiting requests of other senders are averaged
SHARE_FADE = 0.98  # factor on the counts behind our share of a replica's prompts, for each probe with progress
# Above 90 % we count as the only sender: the difference is requests that only one of engine and router has counted so
# far.
SHARE_ALL = 0.9
SHARE_TOKENS_MIN = 50_000  # prompt tokens that the engine must count before the share is used
PROMPT_TOKENS_MAX = 1 << 24  # limit on the reported length of one prompt
ON_TIME_FACTOR, ON_TIME_MS = 3.0, 1_500.0  # a first token is on time within 3 x its modelled time + 1,500 ms
LATE_S = 3.0  # for this time after a late first token, first tokens that arrived together prove nothing
HIDDEN_FACTOR = 3.0  # work with an invisible end may take this multiple of its modelled time
UNCOUNTED_MAX = 256  # allowance for open leases that an engine counts with a delay
# First tokens of one batch are less than half a step apart, those of two batches at least one step. First tokens at
# other routers have a tolerance for the estimated delay of messages.
BATCH_STEPS, BATCH_LEAST_MS, BATCH_MOST_MS = 0.5, 0.2, 20.0  # a fraction of a step, within limits
BATCH_OTHERS_LEAST_MS = 5.0
# an answer that arrived within this time was buffered on its way: its time teaches nothing about steps
GATHERED_MS = 10.0
BATCHES_MAX = 16  # latest batches of a replica: other routers' first tokens are received a moment later
TIMED_MAX = 8  # first tokens of a replica that are compared with those of its peers
ANSWER_TOKENS_MAX = 32_768  # longest answer assumed if the client set no limit


@dataclass(slots=True)
class ReplicaState:
    """State of one replica. Written only in this package (core/fleet)."""

    replica: Replica
    cache_epoch: int = 0  # cache epoch, numbered over all replicas: cached blocks of one epoch do not exist in the next
    id: str = field(init=False)
    health: Health = field(default_factory=Health)
    breaker: Breaker = field(default_factory=Breaker)
    grade: Confidence = Confidence.ESTIMATED
    models: dict[str, ServedModel] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    page_source: PageSource = field(default_factory=PageSource)
    prefill_factor: SpeedFactor[PrefillModel] = field(default_factory=SpeedFactor)
    step_factor: SpeedFactor[StepModel] = field(default_factory=SpeedFactor)
    speeds: ModelSpeeds = field(default_factory=ModelSpeeds)  # speeds shared by all replicas that serve the same models
    clock: DecodeClock = field(default_factory=DecodeClock)
    queue: PrefillQueue = field(init=False)
    leases: dict[int, Lease] = field(default_factory=dict)  # open leases
    others: PeerLoadView = field(default_factory=PeerLoadView)  # open work that other routers report for this replica
    links: TierLinks = field(default_factory=TierLinks)  # loads from its tiers
    # leases without a first token that, by estimate, wait for KV headroom
    waiting_for_kv: set[int] = field(default_factory=set)
    decoding: int = 0  # open leases with a completed prefill, by observation
    placed_sum_s: float = 0.0  # sum of the open leases' times of placement
    context_tokens: int = 0  # prompts of open leases, each in full: attention reads each stream's own context
    live: KvReservations = field(default_factory=KvReservations)  # KV pool blocks in use by prompts of open leases
    sent_prompt_tokens: float = 0.0  # prompt tokens that we sent, with decay
    peer_prompt_tokens: float = 0.0  # prompt tokens that other routers report as sent, with the same decay
    engine_prompt_tokens: float = 0.0  # prompt tokens that the engine counted, with the same decay
    decay_count: int = 0  # number of decays of these counts
    untracked_waiting: float = 0.0  # mean number of waiting requests of other senders, over the last probes
    # Upper limit of other routers' open leases here, from the engine's own request counts. A writer of the shared store
    # could publish any number. None: the engine does not report its counts.
    others_max: int | None = None
    in_flight_probed: int = 0  # open leases when `load` was received
    # ids of decode-stage leases that the engine holds until their blocks arrive
    awaiting_transfer: set[int] = field(default_factory=set)
    coming_peak: int = 0  # their maximum at one time since the last probe
    coming_probed: int = 0  # decode-stage leases that waited in the engine for their blocks when `load` was received
    _foreign: deque[int] = field(default_factory=lambda: deque([0], maxlen=FOREIGN_PROBES))
    first_token_s: float = 0.0  # time of the last first token
    long_s: float = -inf  # time of the last first token of a long prefill
    _batch: PrefillBatch | None = None  # batch of the last first token
    # kept while there are other routers
    _batches: deque[PrefillBatch] = field(default_factory=lambda: deque(maxlen=BATCHES_MAX))
    _others_tokens: int = 0  # tokens computed for other routers, as received by the last first token
    # Observations from requests, for breaker.py, stall_detector.py, outlier_detection.py and eligibility.py.
    alive_s: float = 0.0  # last sign of life
    on_time_s: float = -inf  # last first token that was on time, or end of an answer that did not stream
    late_s: float = -inf  # last first token that was late
    unseen_end_s: float = 0.0  # end of the last answer that did not stream
    has_moving_counters: bool = False  # the engine's counters move while it works
    # requests placed there with an answer that does not pass this router: nothing was learned from them
    unobserved_responses: int = 0
    late_disconnects: int = 0  # clients that left after their first token was late, since the last sign of life
    # modelled prefill of requests that their clients abandoned before its end; the engine may have worked on it
    abandoned_prefill_ms: float = 0.0
    timed: deque[TtftSample] = field(default_factory=lambda: deque(maxlen=TIMED_MAX))
    longest_tokens: int = 0  # largest number of uncached tokens of a prompt from which its speed was learned
    rest_until_s: float = 0.0
    full: bool = False  # in cooldown because its queue was full, without a given time
    full_trial: int = -1  # number of the last lease placed there during such a cooldown
    recovered: bool = False  # health checks succeed again, and no request was placed since
    warming_up: bool = False  # no requests are sent until the cache is warm (Fleet.warm_up)
    slow_start_at_s: float = -inf  # time at which the slow start began

    def __post_init__(self) -> None:
        self.id = self.replica.id
        self.queue = PrefillQueue(self._decodes)

    @property
    def ready(self) -> bool:
        """True if it may be sent requests, by its health checks, discovery and its warm-up."""
        return self.health.fit and self.replica.ready and not self.warming_up

    @property
    def prefill_model(self) -> PrefillModel:
        """Prefill model of all replicas with the same models, scaled to the member's own speed."""
        return self.prefill_factor.scale_model(self.speeds.prefill.model)

    @property
    def step_model(self) -> StepModel:
        """Decode step model of all replicas with the same models, scaled to the member's own speed."""
        return self.step_factor.scale_model(self.speeds.steps.model)

    @property
    def batch_ms(self) -> float:
        """Longest time between two first tokens of one batch, from the learned step time with the current streams."""
        step_ms = self.step_model.ms(self.clock.streams, self.clock.context_tokens)
        return min(max(BATCH_STEPS * step_ms, BATCH_LEAST_MS), BATCH_MOST_MS)

    def context_tokens_max(self, model: str) -> float:
        """Return the longest context that the member reports for the model; infinite if it reports none."""
        served = self.models.get(model)
        return inf if served is None or served.max_model_len_tokens is None else served.max_model_len_tokens

    def take_speeds(self, speeds: ModelSpeeds) -> None:
        """Share the speeds of other models from now on. The learned own speed is no longer valid, and is reset."""
        self.speeds, self.longest_tokens = speeds, 0
        self.prefill_factor.reset()
        self.step_factor.reset()
        self.links.forget_speed()

    def pending_ms(self, now_s: float) -> float:
        """Return the modelled time until all our requests there are prefilled."""
        return self.queue.pending_ms(now_s)

    def wait_ms(self, now_s: float) -> float:
        """Return the modelled time until all requests there are prefilled: ours, and those that other routers
        report."""
        own_ms, others, queue = self.queue.pending_ms(now_s), self.others, self.queue
        if not others.waiting_ms:
            return own_ms
        placed_s, head_ms = others.head()
        prefill_ms = float(head_ms)  # native code distinguishes integers from floats
        head = queue.head
        if head is not None and head.queued_s <= placed_s:
            placed_s, prefill_ms = head.queued_s, head.prefill_ms
        since_s = max(placed_s, self.first_token_s, others.first_token_s)
        gone_ms = min(max(0.0, (now_s - since_s) * 1e3), prefill_ms)
        return max(0.0, queue.waiting_ms() + others.waiting_ms - gone_ms)

    @property
    def open_leases(self) -> int:
        """Open leases, including those that other routers report, up to the limit that the engine's counts confirm."""
        others, most = self.others.open, self.others_max
        return len(self.leases) + (others if most is None or others < most else most)

    def apply_peer_load(self, peer: str, sums: PeerLoad, clock_s: float, now_s: float, *, known: bool = True) -> None:
        """Take the open work that another router reports for this replica, so that it no longer counts as foreign.

        - `clock_s`: offset of our clock from that router's clock.
        - `known`: the router was known before, so that its first counts are added in full. The first counts of an
          unknown router are ignored, because they also cover earlier times.

        If the router was lost and is received again, the tokens that it sent in between are added as well.
        """
        others, stall_ms = self.others, 0
        before = others.take(peer, sums, clock_s)
        if before is None and (sent_tokens := others.tokens_since(peer, sums.sent_tokens)) is not None:
            self.peer_prompt_tokens += sent_tokens
        elif before is not None or known:
            before = before or ZERO_LOAD
            self.peer_prompt_tokens += max(0, sums.sent_tokens - before.sent_tokens)
            stall_ms = max(0, sums.stall_ms - before.stall_ms)
        self.clock.set_peer_load(others.decoding, others.decoding_tokens, stall_ms / self.prefill_model.pace_ms, now_s)

    def on_peer_first_token(self, at_s: float, tokens: int) -> None:
        """Record a first token that another router received from here, and the computed tokens of its prompt."""
        self.others.first_token(at_s, tokens)
        for batch in self._batches:
            if batch.until_s > at_s - max(self.batch_ms, BATCH_OTHERS_LEAST_MS) / 1e3:
                self._share(batch)
        if at_s > self.alive_s:
            self.alive(at_s)

    def _share(self, batch: PrefillBatch) -> None:
        """Assign other routers' prompts their part of a batch's time, from the first tokens received so far."""
        before_s, batch.others_tokens = self.others.batch(
            batch.until_s, max(self.batch_ms, BATCH_OTHERS_LEAST_MS) / 1e3
        )
        batch.since_s = max(batch.since_s, before_s)

    def dedupe_prefill(self, lease: Lease, tokens: int, now_s: float) -> bool:
        """Record that another router placed a prompt here at the same moment, with `tokens` leading tokens in common
        with a waiting lease. They are computed once, for that prompt. Return True if less prefill waits here than
        estimated before."""
        cached_tokens = min(tokens, lease.prompt_tokens - 1)
        if cached_tokens <= lease.cached_tokens:
            return False
        model = self.prefill_model
        prefill_ms = model.ms(lease.prompt_tokens - cached_tokens, cached_tokens)
        if prefill_ms >= lease.prefill_ms or not self.queue.recount(lease, prefill_ms):
            return False
        lease.cached_tokens, lease.effective_start_s = cached_tokens, now_s
        lease.stall_ms = max(0.0, prefill_ms - model.floor_ms)
        return True

    def forget_peer(self, peer: str, now_s: float) -> None:
        """Drop another router that is no longer there."""
        self.prefill_factor.forget(peer)
        self.step_factor.forget(peer)
        if self.others.forget(peer):
            self.clock.set_peer_load(self.others.decoding, self.others.decoding_tokens, 0.0, now_s)

    def open(self, lease: Lease, now_s: float, kv_wait_ms: float = 0.0) -> None:
        """Add a placed lease. `kv_wait_ms` is the time until the KV pool has capacity for it and for the leases that
        wait before it."""
        if lease.role != DECODE:
            self.queue.join(lease, now_s)
        self.leases[lease.id] = lease
        if kv_wait_ms:
            self.waiting_for_kv.add(lease.id)
        self.live.open(lease.id, lease.keys, lease.unshared_tokens)
        self.placed_sum_s += lease.placed_s
        self.context_tokens += lease.prompt_tokens
        # now, before the engine can count it, so that the sum is never too low
        self.sent_prompt_tokens += lease.prompt_tokens
        lease.faded, lease.others_tokens = self.decay_count, self.others.computed_tokens
        if lease.to_load is not None:
            self.links.begin(lease, self.speeds.loads, now_s)

    def is_clean_sample(self, lease: Lease) -> bool:
        """True if no long prefill disturbed the measurement of a lease's load.

        It must be called just before the first token of the lease is recorded. No long prefill may have run since its
        placement, nor may its own prefill be long. Its time beyond the prefill is then the time of its load or
        transfer.
        """
        is_long = lease.uncached_tokens >= LEARN_TOKENS_MIN
        return not self.queue.computing and self.long_s < lease.placed_s and not is_long

    def on_first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first token of a lease, and learn the replica's service time from it."""
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
        if lease.id in self.waiting_for_kv:  # most of the time was waiting, and teaches nothing about prefill speed
            self.waiting_for_kv.discard(lease.id)
            lease.batch = lease.own_ms = None
        self._others_tokens = self.others.computed_tokens
        self.first_token_s = self.alive_s = now_s
        self.late_disconnects, self.abandoned_prefill_ms = 0, 0.0
        queue.leave(lease, now_s)
        if (load := lease.to_load) is not None:
            self.links.on_load_complete(lease, load, now_s, alone=load.alone and self.is_clean_sample(lease))
        if is_long:
            self.long_s = now_s

    def prefill_done_unobserved(self, lease: Lease, now_s: float) -> None:
        """Record that the prefill of a lease is complete, as another replica's first token shows. The exact time is
        unknown."""
        lease.first_token_s = self.alive_s = now_s
        self.late_disconnects, self.abandoned_prefill_ms = 0, 0.0
        self.queue.leave(lease, now_s)

    def start_transfer_wait(self, lease: Lease) -> None:
        """Record that the engine now holds a decode-stage lease and waits for its blocks. With NIXL, the engine gets
        the request only after they are computed."""
        self.awaiting_transfer.add(lease.id)
        self.coming_peak = max(self.coming_peak, len(self.awaiting_transfer))

    def decodes(self, lease: Lease, now_s: float) -> None:
        """Record that another replica has prefilled the prompt of a decode-stage lease, so that it decodes here from
        now on. No effect when repeated."""
        self.awaiting_transfer.discard(lease.id)
        if lease.decode_start is None:
            self._decodes(lease, now_s)

    def computes(self, lease: Lease, cached_tokens: int, now_s: float) -> None:
        """Let this member compute the prompt of a decode-stage lease itself, because the prefill stage failed.

        `cached_tokens` of the prompt are cached here. The lease joins the prefill queue like any prompt. No effect if
        it decodes already.
        """
        if lease.decode_start is not None or lease.first_token_s is not None:
            return
        model = self.prefill_model
        self.awaiting_transfer.discard(lease.id)
        lease.cached_tokens, lease.effective_start_s = cached_tokens, now_s
        lease.prefill_ms = model.ms(lease.prompt_tokens - cached_tokens, cached_tokens)
        lease.stall_ms = max(0.0, lease.prefill_ms - model.floor_ms)
        self.queue.join(lease, now_s)

    def on_first_token_disagg(self, lease: Lease, now_s: float) -> None:
        """Record the first token of a decode-stage lease. It ends a prefill of this member only if the member computed
        the prompt itself. Its time is not learned from, because an attempt at another replica preceded it."""
        lease.first_token_s = self.alive_s = now_s
        self.late_disconnects, self.abandoned_prefill_ms = 0, 0.0
        self.waiting_for_kv.discard(lease.id)
        if self.queue.holds(lease):
            self.queue.leave(lease, now_s)
            self.first_token_s, self._batch = now_s, None
            if lease.uncached_tokens >= LEARN_TOKENS_MIN:
                self.long_s = now_s
        self.decodes(lease, now_s)

    def _join(self, lease: Lease, since_s: float, now_s: float) -> PrefillBatch:
        """Return the batch of the last first token if this one arrived with it, or a new batch."""
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
        """Measure the prefill of the queue's head at its first token, and judge if it was on time."""
        took_ms = (now_s - since_s) * 1e3
        if others := self.others.computed_tokens - max(lease.others_tokens, self._others_tokens):
            # the rest of the time went to the other routers' prompts
            took_ms *= lease.uncached_tokens / (lease.uncached_tokens + others)
        expected_ms = lease.prefill_ms + lease.loading_ms
        if took_ms > ON_TIME_FACTOR * expected_ms:  # late, unless it waited for work with an invisible end
            hidden_ms = sum(each.prefill_ms for each in self.leases.values() if not each.streams)
            if hidden_ms and not self.prefill_factor.observations:
                return  # the duration of the invisible work is unknown
            took_ms -= HIDDEN_FACTOR * hidden_ms
        # a load teaches nothing about prefill
        if not lease.loading_ms and (not lease.queued or took_ms > self.batch_ms):
            lease.own_ms = max(0.0, took_ms)
        if took_ms > ON_TIME_FACTOR * expected_ms + ON_TIME_MS:
            self.late_s = now_s
        elif now_s - self.late_s > LATE_S:
            self.on_time_s = now_s

    def on_response_end(self, lease: Lease, now_s: float) -> None:
        """Record the successful end of an answer."""
        self.alive_s, self.late_disconnects, self.abandoned_prefill_ms = now_s, 0, 0.0
        if not lease.streams:
            self.unseen_end_s = now_s
            if now_s - self.late_s > LATE_S:
                self.on_time_s = now_s

    def correct_prompt_tokens(self, lease: Lease, prompt_tokens: int) -> None:
        """Correct the length of an answered prompt from the estimate at placement to the engine's count."""
        more = min(prompt_tokens, PROMPT_TOKENS_MAX) - lease.prompt_tokens
        if more:
            sent = self.sent_prompt_tokens + more * SHARE_FADE ** (self.decay_count - lease.faded)
            self.sent_prompt_tokens = max(0.0, sent)

    def forget_speed(self) -> None:
        """Forget its learned speed, which kept all requests away. A trial must look worthwhile."""
        self.timed.clear()
        self.prefill_factor.reset()
        self.step_factor.reset()

    def alive(self, now_s: float) -> None:
        """Record any other sign of life."""
        self.alive_s, self.late_disconnects, self.abandoned_prefill_ms = now_s, 0, 0.0

    def close(self, lease: Lease, now_s: float, answer_tokens: float = 0.0) -> bool:
        """Close a lease; return False if it was closed before. `answer_tokens` is the mean length of answers there."""
        self.queue.decay(now_s)
        if self.leases.pop(lease.id, None) is None:
            return False
        self.waiting_for_kv.discard(lease.id)
        if lease.role != DECODE or lease.decode_start is not None or self.queue.holds(lease):
            self.decoding -= 1  # `_decodes` adds this 1 back if the prefill was still pending
        self.awaiting_transfer.discard(lease.id)
        self.context_tokens -= lease.prompt_tokens
        if lease.decode_start is not None:
            lease.decode_stats = self.clock.leave(lease.prompt_tokens, lease.decode_start, now_s, answer_tokens)
        self.live.close(lease.id, lease.keys, lease.unshared_tokens)
        self.placed_sum_s = self.placed_sum_s - lease.placed_s if self.leases else 0.0
        self.queue.leave(lease, now_s)
        if lease.to_load is not None:
            self.links.leave(lease, now_s)
        return True

    def on_client_disconnect(self, lease: Lease, *, late: bool) -> None:
        """Record that the client of a lease left. `late`: its first token was overdue at that time."""
        if late:
            self.late_disconnects += 1
        elif lease.first_token_s is None:
            self.abandoned_prefill_ms += lease.prefill_ms

    def learn(self, lease: Lease, outcome: Outcome, now_s: float) -> tuple[int, int]:
        """Learn from a lease that ended well: prefill and decode speed, size of requests, duration of leases. Return
        the numbers of computed and of cached tokens of its prompt."""
        usage = outcome.usage
        uncached, cached = lease.uncached_tokens, lease.cached_tokens
        if usage is not None and usage.cached_tokens is not None:
            uncached, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
            lease.recount(max(0, uncached))  # the engine's numbers are not trusted
        speeds = self.speeds
        if lease.loading_ms:
            learn_load(self.links, speeds.loads, lease, cached)
        elif (service_ms := lease.service_ms) is not None:
            if uncached < LEARN_TOKENS_MIN:
                speeds.note_short_prefill(service_ms)
            elif uncached > self.longest_tokens:
                self.longest_tokens = uncached
            speeds.prefill.observe(uncached, cached, service_ms)
            if uncached >= LEARN_TOKENS_MIN:
                self.prefill_factor.observe(service_ms, speeds.prefill.model.ms(uncached, cached), now_s)
        if lease.role == PREFILL:  # the means below are over clients' requests
            speeds.note_prefill(uncached)
            return uncached, cached
        leg = lease.receipt.leg
        prefill_ms = lease.prefill_ms if leg is None else leg.uncached_ms
        if outcome.unobserved:  # lengths and rates are those of observed answers
            speeds.note_unobserved((now_s - lease.placed_s) * 1e3)
            speeds.note_request(lease.prompt_tokens, prefill_ms)
            return uncached, cached
        tokens = usage.completion_tokens if usage is not None else outcome.events
        speeds.note_response((now_s - lease.placed_s) * 1e3, tokens, uncached)
        if lease.first_token_s is not None:
            speeds.note_decode((now_s - lease.first_token_s) * 1e3)
            if lease.streams and lease.decode_stats is not None and tokens >= ANSWER_TOKENS_MIN:
                self._learn_steps(lease.decode_stats, tokens - 1, now_s)
        speeds.note_request(lease.prompt_tokens, prefill_ms)
        return uncached, cached

    def _learn_steps(self, stretch: DecodeInterval, tokens: int, now_s: float) -> None:
        step_ms = stretch.step_ms(tokens, self.prefill_model.pace_ms)
        streams, context, common = stretch.streams, stretch.context_tokens, self.speeds.steps
        if step_ms > 0 and stretch.ms >= GATHERED_MS:
            common.observe(streams, context, step_ms)
            self.step_factor.observe(step_ms, common.model.ms(streams, context), now_s)

    def under_way_tokens(self, now_s: float) -> float:
        """Return the tokens of answers in progress so far, by the decode step model."""
        clock = self.clock
        streams, context_tokens = clock.streams + clock.other_streams, clock.context_tokens + clock.other_tokens
        return clock.running_s(now_s) * 1e3 / self.step_model.ms(streams, context_tokens)

    def observe_load(self, load: Load, now_s: float | None = None) -> None:
        """Take the load of a probe, which shows the use by other senders and our share.

        Counters that move are a sign of life. A good /health is not: it may be served in front of a dead engine.
        """
        before, self.load = self.load, load
        if load.running is None or load.waiting is None:
            self.others_max = None
        else:
            waiting = load.waiting + (load.deferred or 0)
            self.others_max = max(0, load.running) + max(0, waiting) + UNCOUNTED_MAX
        self.in_flight_probed = self.open_leases
        # If the engine counts deferred requests separately, requests that wait for their blocks are among those.
        self.coming_probed = len(self.awaiting_transfer) if load.deferred is None else 0
        if now_s is not None and _has_progress(before, load):
            self.has_moving_counters = True
            self.alive(now_s)
        # Our own count may be ahead of the engine's, so only an excess over our maximum of waiting requests belongs to
        # other senders. The mean of several probes is used, because other senders are not observed between two probes.
        # Engines also count requests with blocks in transfer as waiting (vLLM: WAITING_FOR_REMOTE_KVS).
        coming = self.coming_peak if load.deferred is None else 0
        known = self.queue.restart_peak() + self.others.restart_peak() + coming
        self.coming_peak = len(self.awaiting_transfer)
        self._foreign.append(max(0, (load.waiting or 0) - known))
        self.untracked_waiting = sum(self._foreign) / len(self._foreign)
        old, new = before.prompt_tokens_total, load.prompt_tokens_total
        if old is not None and new is not None and new > old:
            self.decay_count += 1
            self.sent_prompt_tokens *= SHARE_FADE
            self.peer_prompt_tokens *= SHARE_FADE
            self.engine_prompt_tokens = self.engine_prompt_tokens * SHARE_FADE + new - old
        if now_s is not None:  # a measured slowness fades while the replica gets no requests
            self.prefill_factor.fade(now_s)
            self.step_factor.fade(now_s)

    def forget_counters(self) -> None:
        """Discard the engine's counters, which turned out to be those of several processes. They show neither our share
        nor a sign of life."""
        self.has_moving_counters = False
        self.engine_prompt_tokens = 0.0

    def state(self, now_s: float) -> State:
        """Return the admission state, by cooldown and breaker."""
        return State.RESTING if now_s < self.rest_until_s else self.breaker.state(now_s)

    @property
    def share(self) -> float:
        """Part of the replica's prompt tokens that this router sends. Other senders fill its cache too."""
        return self._part(self.sent_prompt_tokens)

    @property
    def known_share(self) -> float:
        """Part of the replica's prompt tokens sent by this router, and by other routers that report their work."""
        return self._part(self.sent_prompt_tokens + self.peer_prompt_tokens)

    def _part(self, prompt_tokens: float) -> float:
        if self.engine_prompt_tokens < SHARE_TOKENS_MIN:
            return 1.0
        share = prompt_tokens / self.engine_prompt_tokens
        return share if share < SHARE_ALL else 1.0

    def _decodes(self, lease: Lease, now_s: float) -> None:
        """Begin the decode of a lease that left the prefill queue."""
        self.decoding += 1
        if lease.id in self.leases:
            model = self.prefill_model
            stall_ms = model.ms(lease.uncached_tokens, lease.cached_tokens) - model.floor_ms
            lease.decode_start = self.clock.join(lease.prompt_tokens, stall_ms / model.pace_ms, now_s)


def _has_progress(before: Load, after: Load) -> bool:
    return (
        _rose(before.prompt_tokens_total, after.prompt_tokens_total)
        or _rose(before.generation_tokens_total, after.generation_tokens_total)
        or _rose(before.computed_tokens_total, after.computed_tokens_total)
    )


def _rose(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > before
