"""State of one replica as the router knows it, without its cache: open leases, load, speed, signs of life.

Each part of the state has a module of its own:

- restrictions.py: cooldown, warm-up and slow start.
- engine_counters.py: conclusions from the engine's own counters.
- own_speed.py: its speed, relative to that of replicas with the same models.
- core/estimators/decode_step.py (DecodeClock): its decoding streams.
- prefill_queue.py and prefill_batches.py: waiting prefills, and the times of those that ended.
- open_work.py and peer_leases.py: sums over open leases of this router, and over those of others.
- tier_loads.py: loads of blocks from its tiers.
- evidence.py: signs of life.

Learning from ended leases is in lease_learning.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.estimators.decode_step import DecodeClock, StepModel
from router.core.estimators.model_speeds import ModelSpeeds
from router.core.estimators.prefill import LEARN_TOKENS_MIN, PrefillModel
from router.core.fleet.breaker import Breaker, State
from router.core.fleet.engine_counters import EngineCounters, has_progress
from router.core.fleet.evidence import ON_TIME_FACTOR, Evidence
from router.core.fleet.health import Health
from router.core.fleet.lease import DECODE, Lease
from router.core.fleet.open_work import OpenWork
from router.core.fleet.own_speed import OwnSpeed
from router.core.fleet.peer_leases import PeerLoadView
from router.core.fleet.prefill_batches import PrefillBatches, max_gap_ms
from router.core.fleet.prefill_queue import PrefillQueue
from router.core.fleet.restrictions import Restrictions
from router.core.fleet.tier_loads import TierLinks
from router.core.types.peer_load import ZERO_LOAD, PeerLoad
from router.core.types.placements import Confidence
from router.core.types.replicas import Load, Replica, ServedModel

HIDDEN_FACTOR = 3.0  # work with an invisible end may take this multiple of its modelled time
ANSWER_TOKENS_MAX = 32_768  # longest answer assumed if the client set no limit


@dataclass(slots=True)
class ReplicaState:
    """State of one replica. Written only in this package (core/fleet), and at the stages of requests that two replicas
    serve together."""

    replica: Replica
    cache_epoch: int = 0  # cache epoch, numbered over all replicas: cached blocks of one epoch do not exist in the next
    id: str = field(init=False)
    health: Health = field(default_factory=Health)
    breaker: Breaker = field(default_factory=Breaker)
    restrictions: Restrictions = field(default_factory=Restrictions)
    grade: Confidence = Confidence.ESTIMATED
    models: dict[str, ServedModel] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    counters: EngineCounters = field(default_factory=EngineCounters)
    speeds: ModelSpeeds = field(default_factory=ModelSpeeds)  # speeds shared by all replicas that serve the same models
    own_speed: OwnSpeed = field(default_factory=OwnSpeed)
    clock: DecodeClock = field(default_factory=DecodeClock)
    queue: PrefillQueue = field(init=False)
    leases: dict[int, Lease] = field(default_factory=dict)  # open leases
    work: OpenWork = field(default_factory=OpenWork)  # sums over them
    others: PeerLoadView = field(default_factory=PeerLoadView)  # open work that other routers report for this replica
    links: TierLinks = field(default_factory=TierLinks)  # loads from its tiers
    batches: PrefillBatches = field(default_factory=PrefillBatches)  # its first tokens, by batch
    evidence: Evidence = field(default_factory=Evidence)  # observations from requests

    def __post_init__(self) -> None:
        self.id = self.replica.id
        self.queue = PrefillQueue(self.start_decode)

    @property
    def ready(self) -> bool:
        """True if it may be sent requests, by its health checks, discovery and its warm-up."""
        return self.health.fit and self.replica.ready and not self.restrictions.warming_up

    def state(self, now_s: float) -> State:
        """Return the admission state, by cooldown and breaker."""
        return State.RESTING if now_s < self.restrictions.rest_until_s else self.breaker.state(now_s)

    # -- speed and load ------------------------------------------------------------------------------------------

    @property
    def prefill_model(self) -> PrefillModel:
        """Prefill model of all replicas with the same models, scaled to the member's own speed."""
        return self.own_speed.prefill_factor.scale_model(self.speeds.prefill.model)

    @property
    def step_model(self) -> StepModel:
        """Decode step model of all replicas with the same models, scaled to the member's own speed."""
        return self.own_speed.step_factor.scale_model(self.speeds.steps.model)

    @property
    def batch_ms(self) -> float:
        """Longest time between two first tokens of one batch, from the learned step time with the current streams."""
        return max_gap_ms(self.step_model.ms(self.clock.streams, self.clock.context_tokens))

    def take_speeds(self, speeds: ModelSpeeds) -> None:
        """Share the speeds of other models from now on. The learned own speed is no longer valid, and is reset."""
        self.speeds, self.own_speed.longest_tokens = speeds, 0
        self.own_speed.reset()
        self.links.forget_speed()

    def forget_speed(self) -> None:
        """Forget its learned speed, which kept all requests away. A trial must look worthwhile."""
        self.evidence.timed.clear()
        self.own_speed.reset()

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
        since_s = max(placed_s, self.batches.first_token_s, others.first_token_s)
        gone_ms = min(max(0.0, (now_s - since_s) * 1e3), prefill_ms)
        return max(0.0, queue.waiting_ms() + others.waiting_ms - gone_ms)

    @property
    def open_leases(self) -> int:
        """Open leases, including those that other routers report, up to the limit that the engine's counts confirm."""
        others, most = self.others.open, self.counters.others_max
        return len(self.leases) + (others if most is None or others < most else most)

    def observe_load(self, load: Load, now_s: float | None = None) -> None:
        """Take the load of a probe, which shows the use by other senders and our share.

        Counters that move are a sign of life. A good /health is not: it may be served in front of a dead engine.
        """
        before, self.load = self.load, load
        counters, work = self.counters, self.work
        counters.limit_others(load)
        counters.in_flight_probed = self.open_leases
        # If the engine counts deferred requests separately, requests that wait for their blocks are among those.
        counters.coming_probed = len(work.awaiting_transfer) if load.deferred is None else 0
        if now_s is not None and has_progress(before, load):
            counters.are_moving = True
            self.evidence.alive(now_s)
        # Engines also count requests with blocks in transfer as waiting (vLLM: WAITING_FOR_REMOTE_KVS).
        coming = work.restart_transfers_peak()
        known = self.queue.restart_peak() + self.others.restart_peak() + (coming if load.deferred is None else 0)
        counters.count_untracked(load, known)
        counters.count_prompts(before, load)
        if now_s is not None:
            self.own_speed.fade(now_s)

    # -- other routers -------------------------------------------------------------------------------------------

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
            self.counters.peer_prompt_tokens += sent_tokens
        elif before is not None or known:
            before = before or ZERO_LOAD
            self.counters.peer_prompt_tokens += max(0, sums.sent_tokens - before.sent_tokens)
            stall_ms = max(0, sums.stall_ms - before.stall_ms)
        self.clock.set_peer_load(others.decoding, others.decoding_tokens, stall_ms / self.prefill_model.pace_ms, now_s)

    def on_peer_first_token(self, at_s: float, tokens: int) -> None:
        """Record a first token that another router received from here, and the computed tokens of its prompt."""
        self.others.first_token(at_s, tokens)
        self.batches.on_peer_first_token(at_s, self.others, self.batch_ms)
        if at_s > self.evidence.alive_s:
            self.evidence.alive(at_s)

    def forget_peer(self, peer: str, now_s: float) -> None:
        """Drop another router that is no longer there."""
        self.own_speed.forget_peer(peer)
        if self.others.forget(peer):
            self.clock.set_peer_load(self.others.decoding, self.others.decoding_tokens, 0.0, now_s)

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

    # -- leases --------------------------------------------------------------------------------------------------

    def open(self, lease: Lease, now_s: float, kv_wait_ms: float = 0.0) -> None:
        """Add a placed lease. `kv_wait_ms` is the time until the KV pool has capacity for it and for the leases that
        wait before it."""
        if lease.role != DECODE:
            self.queue.join(lease, now_s)
        self.leases[lease.id] = lease
        self.work.open(lease, waits_for_kv=kv_wait_ms > 0)
        counters, measured = self.counters, lease.measurements
        # now, before the engine can count it, so that the sum is never too low
        counters.sent_prompt_tokens += lease.prompt_tokens
        measured.decay_count, measured.others_tokens = counters.decay_count, self.others.computed_tokens
        if lease.to_load is not None:
            self.links.begin(lease, self.speeds.loads, now_s)

    def is_clean_sample(self, lease: Lease) -> bool:
        """True if no long prefill disturbed the measurement of a lease's load.

        It must be called just before the first token of the lease is recorded. No long prefill may have run since its
        placement, nor may its own prefill be long. Its time beyond the prefill is then the time of its load or
        transfer.
        """
        is_long = lease.uncached_tokens >= LEARN_TOKENS_MIN
        return not self.queue.computing and self.batches.long_s < lease.placed_s and not is_long

    def on_first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first token of a lease, and learn the replica's service time from it."""
        queue, batches, measured = self.queue, self.batches, lease.measurements
        queue.decay(now_s)
        within_ms = self.batch_ms
        lease.first_token_s = now_s
        since_s = max(lease.placed_s, batches.first_token_s, self.evidence.unseen_end_s)
        measured.batch = batches.add(lease, self.others, within_ms, now_s)
        measured.batch_tokens = lease.uncached_tokens
        if lease is queue.head:
            self._measure_prefill(lease, since_s, within_ms, now_s)
        waiting_for_kv = self.work.waiting_for_kv
        if lease.id in waiting_for_kv:  # most of the time was waiting, and teaches nothing about prefill speed
            waiting_for_kv.discard(lease.id)
            measured.batch = measured.own_ms = None
        batches.end(lease, self.others, now_s)
        self.evidence.alive(now_s)
        queue.leave(lease, now_s)
        if (load := lease.to_load) is not None:
            self.links.on_load_complete(lease, load, now_s, alone=load.alone and self.is_clean_sample(lease))

    def _measure_prefill(self, lease: Lease, since_s: float, within_ms: float, now_s: float) -> None:
        """Measure the prefill of the queue's head at its first token, and judge if it was on time."""
        took_ms, measured = (now_s - since_s) * 1e3, lease.measurements
        if others := self.others.computed_tokens - max(measured.others_tokens, self.batches.others_tokens):
            # the rest of the time went to the other routers' prompts
            took_ms *= lease.uncached_tokens / (lease.uncached_tokens + others)
        if not measured.queued:
            took_ms = max(0.0, took_ms - self.own_speed.delay.ms)
        expected_ms = lease.prefill_ms + lease.loading_ms
        if took_ms > ON_TIME_FACTOR * expected_ms:  # late, unless it waited for work with an invisible end
            hidden_ms = sum(each.prefill_ms for each in self.leases.values() if not each.streams)
            if hidden_ms and not self.own_speed.prefill_factor.observations:
                return  # the duration of the invisible work is unknown
            took_ms -= HIDDEN_FACTOR * hidden_ms
        # a load teaches nothing about prefill
        if not lease.loading_ms and (not measured.queued or took_ms > within_ms):
            measured.own_ms = max(0.0, took_ms)
        self.evidence.judge_first_token(took_ms, expected_ms, now_s)

    def start_decode(self, lease: Lease, now_s: float) -> None:
        """Begin the decode of a lease that left the prefill queue."""
        self.work.decoding += 1
        if lease.id in self.leases:
            model = self.prefill_model
            stall_ms = model.ms(lease.uncached_tokens, lease.cached_tokens) - model.floor_ms
            lease.measurements.decode_start = self.clock.join(lease.prompt_tokens, stall_ms / model.pace_ms, now_s)

    def close(self, lease: Lease, now_s: float, answer_tokens: float = 0.0) -> bool:
        """Close a lease; return False if it was closed before. `answer_tokens` is the mean length of answers there."""
        self.queue.decay(now_s)
        if self.leases.pop(lease.id, None) is None:
            return False
        measured = lease.measurements
        if lease.role != DECODE or measured.decode_start is not None or self.queue.holds(lease):
            self.work.decoding -= 1  # `start_decode` adds this 1 back if the prefill was still pending
        if measured.decode_start is not None:
            measured.decode_stats = self.clock.leave(lease.prompt_tokens, measured.decode_start, now_s, answer_tokens)
        self.work.close(lease, is_last=not self.leases)
        self.queue.leave(lease, now_s)
        if lease.to_load is not None:
            self.links.leave(lease, now_s)
        return True
