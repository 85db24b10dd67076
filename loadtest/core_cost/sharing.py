"""Cost of updates between routers: `python -m loadtest cost --sharing 8,64,256 --routers 2,4,8`.

Routers share the same replicas, and each conversation's turns arrive at any of them. A replica gets one request per
second in total, of at least 8,000 tokens. A turn adds 500 tokens, and an answer takes 4 s. A conversation that has
reached 13,000 tokens is replaced by a new one of 8,000 to 13,000. Each router requests a message from its core at once
if that has an urgent update, and otherwise every 25 ms. The message reaches the other routers 5 ms later. The
measurement covers the core on this thread, without the channel and the event loop. (`loadtest overhead --cases sharing`
measures all of it, between processes.)

- `share_us`: CPU of all routers for one request at any of them: noting it, publishing it, and receiving it at all
  others. `share_say_us` and `share_hear_us` are the two parts, the latter at one of the receivers.
- `share_ms_per_s`: CPU of one router per second.
- `share_bytes`, `share_kb_per_s`: bytes published for one request, and published by one router per second. Each other
  router receives them.
- `share_slice_ms`: the longest time without a pause, to publish or receive one message.

Goals are for native code. Figures are medians of several runs, a slice is the smallest of them.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count, product
from typing import Any, TypeVar

import router.core.peer_sync.applier
from loadtest.common.in_process_router import warm_router
from loadtest.common.report import Row
from loadtest.core_cost.corpus import MODEL
from router.core.fleet.lease import Lease
from router.core.peer_sync.sync import PeerSyncCore
from router.core.placement.answer_reuse import AnswerCredit
from router.core.placement.lease_listener import LeaseListener
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec

SLICE_GOAL_MS = 1.0
ROUTERS, ROUTERS_MAX = (2, 4, 8), 64
RATE_PER_REPLICA = 1.0  # requests per second
BEGIN_TOKENS, TURN_TOKENS, TURNS = 8_000, 500, 10
CONVERSATIONS_PER_REPLICA = 8
ANSWER_TOKENS, ANSWER_S = 200, 4.0
MS_PER_TOKEN, LEAST_S = 0.1, 0.03  # time to first token: ms per computed token, plus a constant
BYTES_PER_TOKEN = 4
DELAY_S, ASK_S, LOOK_S = 0.005, 0.025, 0.25
WARM_S, LASTS_S = 5.0, 5.0  # before any measurement, answers end and models are learned
KV_TOKENS, BLOCK_TOKENS = 1_000_000, 16

T = TypeVar("T")


class Counted:
    """CPU of one kind of work since the last `restart`."""

    def __init__(self) -> None:
        self.spent_s = self.longest_s = 0.0
        self.calls = 0

    def restart(self) -> None:
        """Reset the counts."""
        self.spent_s, self.longest_s, self.calls = 0.0, 0.0, 0

    def __call__(self, work: Callable[[], T]) -> T:
        """Do the work, and count its CPU time."""
        begun_s = time.thread_time()
        try:
            return work()
        finally:
            took_s = time.thread_time() - begun_s
            self.spent_s += took_s
            self.longest_s = max(self.longest_s, took_s)
            self.calls += 1


class CountingListener:
    """Forwards a router's lease callbacks to its watch, and counts their CPU time."""

    def __init__(self, watch: LeaseListener, noting: Counted) -> None:
        self._watch, self._noting = watch, noting

    def on_opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """A lease was granted."""
        self._noting(partial(self._watch.on_opened, lease, credit, now_s))

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The prefill of a lease ended."""
        self._noting(partial(self._watch.first_token, lease, now_s))

    def on_recount(self, replica: str, stall_ms: float = 0.0) -> None:
        """The load queued at a replica is less than published."""
        self._noting(partial(self._watch.on_recount, replica, stall_ms))

    def on_ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """A lease ended."""
        self._noting(partial(self._watch.on_ended, lease, outcome, answer_blocks, computed=computed))

    def on_orphaned(self, lease: Lease) -> None:
        """A lease ended because its replica has left."""
        self._noting(partial(self._watch.on_orphaned, lease))


class SharedFleet:
    """Routers in front of the same replicas, on a clock that events advance."""

    def __init__(self, replicas: int, routers: int, seed: int) -> None:
        self.now_s, self._rng, self._count = 1_000.0, random.Random(seed), count()
        self._rate = RATE_PER_REPLICA * replicas
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.noting, self.saying, self.hearing = Counted(), Counted(), Counted()
        self.requests = self.said_bytes = 0
        self._conversations: list[list[int]] = [[] for _ in range(CONVERSATIONS_PER_REPLICA * replicas)]
        self._routers = [_fleet_of(replicas, self.now_s) for _ in range(routers)]
        self._urgent = [False] * routers
        self._sharing = [
            PeerSyncCore(each, f"router-{n}", urgent=partial(self._press, n)) for n, each in enumerate(self._routers)
        ]
        for n, sharing in enumerate(self._sharing):
            for other in set(range(routers)) - {n}:
                sharing.begin(f"router-{other}")
        for each in self._routers:
            if each.watch is not None:
                each.watch = CountingListener(each.watch, self.noting)
        for n in range(routers):
            self._call_later(self._rng.uniform(0, ASK_S), self._ask, n)
        self._call_later(LOOK_S, self._look)
        self._call_later(0.0, self._arrive)

    def run(self, lasts_s: float) -> None:
        """Advance the clock by `lasts_s` and run the events of that time."""
        until_s = self.now_s + lasts_s
        while self._heap[0][0] < until_s:
            self.now_s, _, act, arguments = heappop(self._heap)
            act(*arguments)
        self.now_s = until_s

    def restart(self) -> None:
        """Reset all counts."""
        for each in (self.noting, self.saying, self.hearing):
            each.restart()
        self.requests = self.said_bytes = 0

    def _call_later(self, in_s: float, act: Callable[..., None], *arguments: object) -> None:
        heappush(self._heap, (self.now_s + in_s, next(self._count), act, arguments))

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self._call_later(self._rng.expovariate(self._rate), self._arrive)
        number, rng = self._rng.randrange(len(self._conversations)), self._rng
        router, keys = rng.choice(self._routers), self._conversations[number]
        full = (BEGIN_TOKENS + TURNS * TURN_TOKENS) * BYTES_PER_TOKEN // BLOCK_BYTES
        if not keys or len(keys) >= full:
            keys, more = [], rng.randrange(BEGIN_TOKENS, BEGIN_TOKENS + TURNS * TURN_TOKENS)
        else:
            more = TURN_TOKENS
        keys = [*keys, *(rng.getrandbits(64) for _ in range(more * BYTES_PER_TOKEN // BLOCK_BYTES))]
        self._conversations[number] = keys
        tokens = len(keys) * BLOCK_BYTES // BYTES_PER_TOKEN
        prompt = Prompt(text=b"", first_user_end=0, skipped_bytes=BYTES_PER_TOKEN * tokens)
        ask = RequestSpec(MODEL, prompt, stream=True, output_tokens_max=2 * ANSWER_TOKENS)
        lease = router.route(
            PlacementRequest(ask, MODEL, Chain(keys, 7, keys[-1], (), keys[0]), f"{keys[0]:x}"), self.now_s
        )
        self.requests += 1
        self._call_later(LEAST_S + lease.uncached_tokens * MS_PER_TOKEN / 1e3, self._first_token, router, lease)

    def _first_token(self, router: Router, lease: Lease) -> None:
        router.first_token(lease, self.now_s)
        self._call_later(ANSWER_S, self._finish, router, lease)

    def _finish(self, router: Router, lease: Lease) -> None:
        usage = Usage(lease.prompt_tokens, ANSWER_TOKENS, lease.cached_tokens)
        router.finish(lease, Outcome(EndReason.OK, usage), self.now_s)

    # -- messages ------------------------------------------------------------------------------------------------

    def _press(self, number: int) -> None:
        if not self._urgent[number]:
            self._urgent[number] = True
            self._call_later(0.0, self._send_urgent, number)

    def _send_urgent(self, number: int) -> None:
        if self._say(number):
            self._urgent[number] = False
        else:
            self._call_later(DELAY_S, self._send_urgent, number)

    def _ask(self, number: int) -> None:
        self._say(number)
        self._call_later(ASK_S, self._ask, number)

    def _say(self, number: int) -> bool:
        message = self.saying(partial(self._sharing[number].say, self.now_s))
        if message is None:
            return False
        self.said_bytes += len(message)
        for other in range(len(self._sharing)):
            if other != number:
                self._call_later(DELAY_S, self._hear, other, number, message)
        return True

    def _hear(self, number: int, sender: int, message: bytes) -> None:
        self.hearing(partial(self._sharing[number].hear, f"router-{sender}", message, 0.0, self.now_s))

    def _look(self) -> None:
        for each in self._sharing:
            each.tick(self.now_s)
        self._call_later(LOOK_S, self._look)


def _fleet_of(replicas: int, now_s: float) -> Router:
    router = warm_router()
    ids = [f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(replicas)]
    router.replace([Replica(id_) for id_ in ids])
    for id_ in ids:
        router.observations.observe_models(id_, [ServedModel(MODEL, owned_by="vllm")])
        router.observations.observe_load(id_, Load(0, 0, 0.1, KV_TOKENS, BLOCK_TOKENS, 0.0, 0.0), now_s)
        router.fleet.observe_health(id_, ok=True)
    return router


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one run."""

    share_us: float
    share_say_us: float
    share_hear_us: float
    share_ms_per_s: float
    share_bytes: float
    share_kb_per_s: float
    share_slice_ms: float


def figures(replicas: int, routers: int, seed: int) -> Figures:
    """Run once and return the results."""
    fleet = SharedFleet(replicas, routers, seed)
    fleet.run(WARM_S)
    fleet.restart()
    gc.collect()
    gc.disable()  # a collection over all these routers would otherwise count for one message
    try:
        fleet.run(LASTS_S)
    finally:
        gc.enable()
    requests = max(1, fleet.requests)
    said_s, heard_s = fleet.noting.spent_s + fleet.saying.spent_s, fleet.hearing.spent_s
    return Figures(
        share_us=(said_s + heard_s) * 1e6 / requests,
        share_say_us=said_s * 1e6 / requests,
        share_hear_us=heard_s * 1e6 / requests / (routers - 1),
        share_ms_per_s=(said_s + heard_s) * 1e3 / routers / LASTS_S,
        share_bytes=fleet.said_bytes / requests,
        share_kb_per_s=fleet.said_bytes / 1e3 / routers / LASTS_S,
        share_slice_ms=max(fleet.saying.longest_s, fleet.hearing.longest_s) * 1e3,
    )


def sharing_rows(sizes: Sequence[int], routers: Sequence[int], runs: int, told: Callable[[int], None]) -> list[Row]:
    """Return rows of all sizes of fleet and numbers of routers; `told` is called with the number of finished pairs."""
    native = not (router.core.peer_sync.applier.__file__ or "").endswith(".py")
    note, rows = None if native else "without native code", list[Row]()
    for done, (replicas, number) in enumerate(product(sizes, routers)):
        found = [figures(replicas, number, run) for run in range(runs)]
        for name in Figures.__slots__:
            got = [getattr(each, name) for each in found]
            row = Row(case=name, router=f"{number} routers", replicas=replicas, got=statistics.median(got), note=note)
            if name == "share_slice_ms":
                row.got, row.expected, row.goal = min(got), SLICE_GOAL_MS, f"<= {SLICE_GOAL_MS:g}"
                row.ok, row.timed = row.got <= SLICE_GOAL_MS, True
            rows.append(row)
        told(done + 1)
    return rows
