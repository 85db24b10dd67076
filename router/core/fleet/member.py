"""One replica as the router sees it, its cache apart: open leases, what waits for prefill, load, signs of life.

Pending prefill is a queue per replica, first in first out as engines schedule it. Each open lease waits there with
the modelled time of its prefill until its first token (or its end). The head of the queue decays with the clock;
a head overdue counts as done-any-moment, but what waits behind it still waits. A lease whose first token cannot be
seen (an answer that does not stream) leaves the queue when its modelled time is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.core.facts.placements import Grade
from router.core.facts.replicas import Load, Replica, ServedModel
from router.core.fleet.breaker import Breaker, State
from router.core.fleet.health import Health
from router.core.fleet.kv_room import Live
from router.core.fleet.lease import Batch, Lease, Timed
from router.core.learned.prefill import PrefillFit, PrefillModel
from router.core.learned.speeds import Speeds
from router.core.learned.steps import DecodeClock, StepFit, StepModel

FOREIGN_PROBES = 3
SHARE_FADE = 0.98  # of the counts behind our share of a replica's prompts, per probe that saw prompts
SHARE_ALL = 0.9  # a share above it is all: requests under way are counted by one side and not yet by the other
SHARE_TOKENS_MIN = 50_000  # prompt tokens seen by the engine before the share says anything
PROMPT_TOKENS_MAX = 1 << 24  # believed of what an engine says of one prompt
ON_TIME_FACTOR, ON_TIME_MS = 3.0, 1_500.0  # a first token within its modelled time, so many times, and this is on time
LATE_S = 3.0  # after a first token that was not, others that came with it prove nothing
HIDDEN_FACTOR = 3.0  # of the modelled time of work that is not seen to end
BATCH_MS = 5.0  # between two first tokens of one batch, at most
TIMED_MAX = 8  # first tokens of a replica that are compared with others'
ANSWER_TOKENS_MAX = 32_768  # believed of an answer whose length the client did not limit


@dataclass(slots=True)
class Member:
    """One replica's state. Mutated only by Fleet and Router."""

    replica: Replica
    life: int = 0  # counts the caches that there were, of all replicas: what one held, the next does not
    id: str = field(init=False)
    health: Health = field(default_factory=Health)
    breaker: Breaker = field(default_factory=Breaker)
    grade: Grade = Grade.ESTIMATED
    models: dict[str, ServedModel] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    fit: PrefillFit = field(default_factory=PrefillFit)
    steps: StepFit = field(default_factory=StepFit)
    speeds: Speeds = field(default_factory=Speeds)  # of all replicas that serve the same
    clock: DecodeClock = field(default_factory=DecodeClock)
    leases: dict[int, Lease] = field(default_factory=dict)
    decoding: int = 0  # of them, those whose prefill is over, as far as it was seen
    placed_sum_s: float = 0.0  # of open leases
    context_tokens: int = 0  # prompts of open leases, each in full: attention reads every stream's own
    live: Live = field(default_factory=Live)  # prompts of open leases
    sent_prompt_tokens: float = 0.0  # that we sent, faded
    seen_prompt_tokens: float = 0.0  # that the engine counted, faded alike
    faded: int = 0  # how often
    foreign_waiting: float = 0.0  # requests waiting there that are not ours, on the mean of the last probes
    in_flight_probed: int = 0  # open leases when `load` was heard of
    _foreign: deque[int] = field(default_factory=lambda: deque([0], maxlen=FOREIGN_PROBES))
    _queue_peak: int = 0
    first_token_s: float = 0.0
    _batch: Batch | None = None  # of the last first token
    _queue: dict[int, Lease] = field(default_factory=dict)
    _head: Lease | None = None  # of the queue
    _queue_ms: float = 0.0
    _head_since_s: float = 0.0
    # What requests say of it: see breaker.py, stuck.py, slow.py, fitness.py.
    alive_s: float = 0.0  # last sign of life
    on_time_s: float = float("-inf")  # last first token that was no surprise, or answer without one
    late_s: float = float("-inf")  # last one that was
    unseen_end_s: float = 0.0  # last answer that did not stream
    counts: bool = False  # its counters move when it works
    left_late: int = 0  # clients that left without a token that was late, since the last sign of life
    left_ms: float = 0.0  # modelled prefill of those that left before theirs was: it may have worked on that
    timed: deque[Timed] = field(default_factory=lambda: deque(maxlen=TIMED_MAX))
    longest_tokens: int = 0  # uncached, of prompts from which its speed was learned
    rest_until_s: float = 0.0
    came_back: bool = False  # and nothing was placed since
    held: bool = False  # it gets no requests until its cache is filled: see Fleet.hold
    back_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.id = self.replica.id

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests, as far as its health checks, discovery and its warming say."""
        return self.health.fit and self.replica.ready and not self.held

    @property
    def prefill_model(self) -> PrefillModel:
        """Its own model of prefill, or that of all such replicas until it has one."""
        return self.fit.model if self.fit.observations else self.speeds.prefill.model

    @property
    def step_model(self) -> StepModel:
        """Its own model of a decoding step, or that of all such replicas until it has one."""
        return self.steps.model if self.steps.observations else self.speeds.steps.model

    def take_speeds(self, speeds: Speeds) -> None:
        """It serves other models from now on: what was learned of its speed is of no use."""
        self.speeds, self.fit, self.steps, self.longest_tokens = speeds, PrefillFit(), StepFit(), 0

    def pending_ms(self, now_s: float) -> float:
        """Modelled time until everything we sent there is prefilled."""
        head = self._head
        if head is None:
            return 0.0
        waited_ms = (now_s - self._head_since_s) * 1e3
        if waited_ms >= head.prefill_ms:
            if not head.streams:
                self._decay(now_s)
                return self.pending_ms(now_s)
            waited_ms = head.prefill_ms
        left_ms = self._queue_ms - waited_ms
        return left_ms if left_ms > 0 else 0.0

    def open(self, lease: Lease, now_s: float) -> None:
        """Take a lease on."""
        if self._head is not None:
            self._decay(now_s)
        if self._head is None:
            self._head, self._head_since_s, lease.queued = lease, now_s, False
        self.leases[lease.id] = lease
        self.live.open(lease.id, lease.keys, lease.own_tokens)
        self.placed_sum_s += lease.placed_s
        self.context_tokens += lease.prompt_tokens
        self.sent_prompt_tokens += lease.prompt_tokens  # now, before the engine can count it: never too few
        lease.faded = self.faded
        self._queue[lease.id] = lease
        self._queue_ms += lease.prefill_ms
        if len(self._queue) > self._queue_peak:
            self._queue_peak = len(self._queue)

    def prefilled(self, lease: Lease, now_s: float) -> None:
        """The first token was seen; what it took is the replica's service time."""
        self._decay(now_s)
        lease.first_token_s = now_s
        since_s = max(lease.placed_s, self.first_token_s)
        lease.batch, lease.batch_tokens = self._join(lease, since_s, now_s), lease.uncached_tokens
        self._batch = lease.batch
        if lease is self._head:
            self._time(lease, max(since_s, self.unseen_end_s), now_s)
        self.first_token_s = self.alive_s = now_s
        self.left_late, self.left_ms = 0, 0.0
        self._leave_queue(lease.id, now_s)

    def _join(self, lease: Lease, since_s: float, now_s: float) -> Batch:
        """The batch of the last first token, if this one came with it, else a new one."""
        batch, before_s = self._batch, self.first_token_s
        if batch is None or lease.placed_s >= before_s or (now_s - before_s) * 1e3 > BATCH_MS:
            return Batch(before_s, since_s, now_s, lease.uncached_tokens)
        began_s = max(lease.placed_s, batch.before_s)
        if began_s < batch.since_s:
            batch.since_s = began_s
        batch.until_s = now_s
        batch.tokens += lease.uncached_tokens
        return batch

    def _time(self, lease: Lease, since_s: float, now_s: float) -> None:
        """The first in the queue has its token: how long that took, and whether it was on time."""
        took_ms = (now_s - since_s) * 1e3
        if took_ms > ON_TIME_FACTOR * lease.prefill_ms:  # or it stood behind work whose end is not seen
            hidden_ms = sum(each.prefill_ms for each in self.leases.values() if not each.streams)
            if hidden_ms and not self.fit.observations:
                return  # and nobody knows how long that takes
            took_ms -= HIDDEN_FACTOR * hidden_ms
        if not lease.queued or took_ms > BATCH_MS:
            lease.own_ms = max(0.0, took_ms)
        if took_ms > ON_TIME_FACTOR * lease.prefill_ms + ON_TIME_MS:
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
        """The engine says how long an answered prompt is: so much was sent, not what was believed at placement."""
        more = min(prompt_tokens, PROMPT_TOKENS_MAX) - lease.prompt_tokens
        if more:
            sent = self.sent_prompt_tokens + more * SHARE_FADE ** (self.faded - lease.faded)
            self.sent_prompt_tokens = max(0.0, sent)

    def forget_pace(self) -> None:
        """What was learned of its speed made nobody send anything there: a trial must look worth it."""
        self.timed.clear()
        self.fit = PrefillFit()

    def alive(self, now_s: float) -> None:
        """Something else came of its work."""
        self.alive_s, self.left_late, self.left_ms = now_s, 0, 0.0

    def close(self, lease: Lease, now_s: float, answer_tokens: float = 0.0) -> bool:
        """Give a lease back; False when it was already back. `answer_tokens` is the mean length of answers there."""
        self._decay(now_s)
        if self.leases.pop(lease.id, None) is None:
            return False
        self.decoding -= 1  # or it leaves the queue now, which adds it
        self.context_tokens -= lease.prompt_tokens
        if lease.mark is not None:
            lease.stretch = self.clock.leave(lease.prompt_tokens, lease.mark, now_s, answer_tokens)
        self.live.close(lease.id, lease.keys, lease.own_tokens)
        self.placed_sum_s = self.placed_sum_s - lease.placed_s if self.leases else 0.0
        self._leave_queue(lease.id, now_s)
        return True

    def observe_load(self, load: Load, now_s: float | None = None) -> None:
        """Take a probe's view: who else uses the replica, and how much of it is ours. Counters that move are a sign of
        life, which /health is not: it may be green before a dead engine."""
        before, self.load = self.load, load
        self.in_flight_probed = len(self.leases)
        if now_s is not None and _moved(before, load):
            self.counts = True
            self.alive(now_s)
        # Our own count moves while the engine's is under way, so only an excess over the most we had waiting is
        # somebody else's; of several probes the mean, as between two of them nothing is heard of others.
        self._foreign.append(max(0, (load.waiting or 0) - max(self._queue_peak, len(self._queue))))
        self.foreign_waiting = sum(self._foreign) / len(self._foreign)
        self._queue_peak = len(self._queue)
        old, new = before.prompt_tokens_total, load.prompt_tokens_total
        if old is not None and new is not None and new > old:
            self.faded += 1
            self.sent_prompt_tokens *= SHARE_FADE
            self.seen_prompt_tokens = self.seen_prompt_tokens * SHARE_FADE + new - old

    def state(self, now_s: float) -> State:
        """What it is sent, as far as requests have a say in it."""
        return State.RESTING if now_s < self.rest_until_s else self.breaker.state(now_s)

    @property
    def share(self) -> float:
        """Part of the replica's prompt tokens that come through us: others fill its cache too."""
        if self.seen_prompt_tokens < SHARE_TOKENS_MIN:
            return 1.0
        share = self.sent_prompt_tokens / self.seen_prompt_tokens
        return share if share < SHARE_ALL else 1.0

    def _leave_queue(self, lease_id: int, now_s: float) -> None:
        lease = self._queue.pop(lease_id, None)
        if lease is None:
            return
        self.decoding += 1
        if lease_id in self.leases:
            lease.mark = self.clock.join(lease.prompt_tokens, lease.stall_ms, now_s)
        self._queue_ms -= lease.prefill_ms
        if lease is self._head:
            self._head, self._head_since_s = next(iter(self._queue.values()), None), now_s
            if self._head is None:
                self._queue_ms = 0.0  # sheds rounding errors

    def _decay(self, now_s: float) -> None:
        head = self._head
        while head is not None and not head.streams and (now_s - self._head_since_s) * 1e3 >= head.prefill_ms:
            since_s = self._head_since_s
            self._leave_queue(head.id, now_s)
            self._head_since_s = since_s + head.prefill_ms / 1e3
            head = self._head


def _moved(before: Load, after: Load) -> bool:
    return (
        before.prompt_tokens_total is not None
        and after.prompt_tokens_total is not None
        and after.prompt_tokens_total > before.prompt_tokens_total
    ) or (
        before.generation_tokens_total is not None
        and after.generation_tokens_total is not None
        and after.generation_tokens_total > before.generation_tokens_total
    )
