"""CPU cost of replicas that report nothing new: `python -m loadtest cost --replicas 8,64,256,1000`.

For each size of fleet, it is the CPU of the core alone, without parsing, hashing and network, on this thread.

- `place_estimated`, `place_exact`: a request is placed and its answer ends. Prompts have 8,000 tokens and are held by
  one replica each, by our own estimate or by events. Each replica has a stream open.
- `place_blip`: the same by estimate, three seconds after the health checks of all replicas failed and came back.
- `join`: a replica replaces another one: the new set, its models and first health check, and the first placement.
- `look_slice`: the longest time without a pause of a check for stalled replicas, while no replica sends anything.
- `open_request`: bytes that are free again when a request for 1,000 tokens ends, as the mean of many.

Goals are for native code. Each figure in milliseconds is the median of several runs.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import router.core.placement.router
from loadtest.common.in_process_router import warm_router
from loadtest.common.report import Row
from loadtest.core_cost.corpus import MODEL
from loadtest.core_cost.world import BLOCK_TOKENS, CostError, batch, follow, make_stored_event, token_ids
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain, chain_of, token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec

PLACE_GOAL_MS = {8: 0.08, 64: 0.12, 256: 0.3, 1_000: 1.0}  # goals for other numbers of replicas are in proportion
EXACT_TIMES, BLIP_TIMES = 2.0, 2.0  # factors over a placement by estimate: over its goal, and over its measured time
JOIN_GOAL_MS, SLICE_GOAL_MS, OPEN_GOAL_BYTES = 5.0, 1.0, 2_048.0
PROMPT_TOKENS, OPEN_TOKENS, BYTES_PER_TOKEN = 8_000, 1_000, 4
PROMPTS, OPEN, JOINS = 64, 256, 9
SLOW_START_S = 10.0
KV_TOKENS = 1_000_000


def place_goal_ms(replicas: int) -> float:
    """Return the goal in milliseconds for placing and closing by estimate, interpolated between the given ones."""
    known = sorted(PLACE_GOAL_MS.items())
    for (fewer, least), (more, most) in pairwise(known):
        if replicas <= more:
            return least + (most - least) * max(0, replicas - fewer) / (more - fewer)
    return known[-1][1] * replicas / known[-1][0]


class Fleet:
    """A router with `replicas` replicas, each with an open stream, and a clock that is advanced by hand."""

    def __init__(self, replicas: int, *, exact: bool = False) -> None:
        self.now_s, self._rng, self._exact = 1_000.0, random.Random(1), exact
        self.router = warm_router(slow_start_s=SLOW_START_S)
        self.ids = [_url(n) for n in range(replicas)]
        self.router.replace([Replica(id_) for id_ in self.ids])
        for id_ in self.ids:
            self.observe(id_)
        if exact:
            self.router.models.observe_tokens(MODEL, "")
        for id_ in self.ids:
            self.stream(only=id_)

    def observe(self, id_: str) -> None:
        """Report the replica as healthy after a first round of probes, and begin its events."""
        self.router.observations.observe_models(id_, [ServedModel(MODEL, owned_by="vllm")])
        self.router.observations.observe_load(id_, Load(0, 0, 0.1, KV_TOKENS, BLOCK_TOKENS, 0.0, 0.0), self.now_s)
        self.router.fleet.observe_health(id_, ok=True)
        if self._exact:
            self.router.knowledge.grade(id_, Confidence.EXACT, "joined at batch 0", self.now_s)
            self._hold(id_, token_ids(self._rng, 4))

    def prompt(self, tokens: int) -> tuple[RequestSpec, Chain, TokenPrompt | None]:
        """Return the prompt of a new conversation."""
        text = self._rng.randbytes(tokens * BYTES_PER_TOKEN // 2).hex().encode()
        ask = RequestSpec(MODEL, Prompt(text, len(text)), stream=True, output_tokens_max=200)
        chain, counted = chain_of(ask, MODEL), None
        if chain is None:
            raise CostError("a prompt has no chain")
        if self._exact:
            ids = token_ids(self._rng, tokens // BLOCK_TOKENS)
            counted = TokenPrompt(ids, "", b"")
            counted.keys[BLOCK_TOKENS] = token_chain(ids, BLOCK_TOKENS, token_root("", b"", BLOCK_TOKENS))
        if ask.prompt is not None:
            ask.prompt.release()
        return ask, chain, counted

    def place(self, prompt: tuple[RequestSpec, Chain, TokenPrompt | None], *, only: str | None = None) -> Lease:
        """Place a prompt."""
        ask, chain, counted = prompt
        key = str(chain.first_user_key)
        return self.router.route(PlacementRequest(ask, MODEL, chain, key, counted), self.now_s, only=only)

    def finish(self, lease: Lease) -> None:
        """End the answer of a lease."""
        usage = Usage(lease.prompt_tokens, 200, lease.cached_tokens)
        self.router.finish(lease, Outcome(EndReason.OK, usage), self.now_s)

    def stream(self, *, only: str) -> None:
        """Begin an answer at this replica that does not end."""
        lease = self.place(self.prompt(100), only=only)
        self.now_s += 0.05
        self.router.first_token(lease, self.now_s)

    def serve_prompts(self, tokens: int, count: int) -> list[tuple[RequestSpec, Chain, TokenPrompt | None]]:
        """Return prompts that were answered before and are cached."""
        prompts = [self.prompt(tokens) for _ in range(count)]
        for prompt in prompts:
            lease = self.place(prompt)
            self.now_s += 0.2
            self.router.first_token(lease, self.now_s)
            if prompt[2] is not None:
                self._hold(lease.replica, prompt[2].ids)
            self.finish(lease)
        return prompts

    def blip(self) -> None:
        """Let all health checks fail twice in a row and recover, three seconds ago."""
        for ok in (False, False, True):
            for id_ in self.ids:
                self.router.fleet.observe_health(id_, ok, "no answer in time", silent=not ok)
        self.finish(self.place(self.prompt(100)))
        self.now_s += 3.0

    def _hold(self, id_: str, ids: bytes) -> None:
        keys = token_chain(ids, BLOCK_TOKENS, 0)
        follow(self.router.knowledge, id_, batch([make_stored_event(ids, keys, 0, len(keys), as_map=True)]), self.now_s)


def _url(number: int) -> str:
    return f"http://10.0.{number // 250}.{number % 250}:8000"


def place_ms(fleet: Fleet, runs: int, *, blips: bool = False) -> float:
    """Return the CPU of placing and closing, as the median of all runs and prompts.

    With `blips`, a blip comes before each run.
    """
    prompts, spent = fleet.serve_prompts(PROMPT_TOKENS, PROMPTS), list[float]()
    for _ in range(runs):
        if blips:
            fleet.blip()
        for prompt in prompts:
            fleet.now_s += 0.01
            with _measure_cpu(spent):
                lease = fleet.place(prompt)
            if lease.cached_tokens < PROMPT_TOKENS // 2:
                raise CostError(f"{lease.cached_tokens} tokens held of a prompt that was answered before")
            fleet.now_s += 0.01
            fleet.router.first_token(lease, fleet.now_s)
            closing = list[float]()
            with _measure_cpu(closing):
                fleet.finish(lease)
            spent[-1] += closing[0]
        if blips and len(fleet.router.fleet.restricted) < len(fleet.ids):
            raise CostError("the blip was over before all was measured")
    return statistics.median(spent)


def join_ms(fleet: Fleet) -> float:
    """Return the time for which a join blocks the event loop, the first placement on the new replica included."""
    spent = list[float]()
    for n in range(JOINS):
        # No replica holds this prompt, so the ring decides, and includes the new replica.
        prompt = fleet.prompt(OPEN_TOKENS)
        fleet.ids = [*fleet.ids[1:], _url(50_000 + n)]
        fleet.now_s += 1.0
        found = [Replica(id_) for id_ in fleet.ids]
        with _measure_cpu(spent):
            fleet.router.replace(found)
            fleet.observe(fleet.ids[-1])
            lease = fleet.place(prompt)
        fleet.finish(lease)
    return statistics.median(spent)


def look_slice_ms(fleet: Fleet) -> float:
    """Return the longest slice of a check, as the smallest of several checks.

    A check runs ten seconds after the last activity of any replica.
    """
    found = []
    for _ in range(JOINS):
        fleet.now_s += 0.01
        look, slices = fleet.router.scan_for_stalls(fleet.now_s + 10.0), list[float]()
        while True:
            with _measure_cpu(slices):
                last = next(look, None)
            if last is None:
                break
        found.append(max(slices))
    return min(found)


def open_bytes(fleet: Fleet) -> float:
    """Return the bytes that an open request keeps, apart from its blocks in the index, which has a budget."""
    prompts = [fleet.prompt(OPEN_TOKENS) for _ in range(OPEN)]
    tracemalloc.start()
    try:
        leases = [fleet.place(prompt) for prompt in prompts]
        for lease in leases:
            fleet.router.first_token(lease, fleet.now_s)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        while leases:  # the router learns nothing if the client has left; computed blocks stay in the index
            fleet.router.finish(leases.pop(), Outcome(EndReason.CLIENT_LEFT), fleet.now_s)
        del lease
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (before - after) / OPEN


@contextmanager
def _measure_cpu(spent_ms: list[float]) -> Iterator[None]:
    gc.disable()  # a collection over the whole fleet would otherwise count for one replica
    begun_s = time.process_time()
    try:
        yield
    finally:
        spent_ms.append((time.process_time() - begun_s) * 1e3)
        gc.enable()


def growth_rows(sizes: Sequence[int], runs: int, told: Callable[[int], None]) -> list[Row]:
    """Return rows of all sizes of fleet; `told` is called with the number of finished sizes."""
    rows: list[Row] = []
    for done, replicas in enumerate(sizes):
        goal_ms, fleet = place_goal_ms(replicas), Fleet(replicas)
        usual_ms = place_ms(fleet, runs)
        rows.append(_row("place_estimated_ms", replicas, usual_ms, goal_ms))
        rows.append(_row("open_request_bytes", replicas, open_bytes(fleet), OPEN_GOAL_BYTES))
        rows.append(_row("join_ms", replicas, join_ms(fleet), JOIN_GOAL_MS))
        rows.append(_row("look_slice_ms", replicas, look_slice_ms(fleet), SLICE_GOAL_MS))
        exact_ms = place_ms(Fleet(replicas, exact=True), runs)
        rows.append(_row("place_exact_ms", replicas, exact_ms, EXACT_TIMES * goal_ms))
        blip_ms = place_ms(Fleet(replicas), runs, blips=True)
        rows.append(_row("place_blip_ms", replicas, blip_ms, BLIP_TIMES * usual_ms))
        told(done + 1)
    return rows


def _row(case: str, replicas: int, got: float, limit: float) -> Row:
    native = not (router.core.placement.router.__file__ or "").endswith(".py")
    return Row(
        case=case,
        replicas=replicas,
        goal=f"<= {limit:,.4g}",
        expected=limit,
        got=got,
        ok=got <= limit,
        timed=case.endswith("_ms"),
        note=None if native else "without native code",
    )
