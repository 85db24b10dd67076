"""Engine model: continuous batching over a paged KV cache, as vLLM V1 schedules it, in simulated seconds.

The model is pure: no clock, no I/O, no randomness. The caller controls time. `begin` plans a step and returns its
duration. `complete` applies the step at its end, and the next `begin` follows at once.

Every step gives one token to each decoding sequence. The rest of the token budget goes to prefill chunks, first come
first served. A waiting request is admitted if its whole prompt fits, minus the cached prefix. If decodes run out of
blocks, the youngest sequence loses its blocks and recomputes them later (preemption by recompute).

If no sequence is in prefill and no request can be admitted, only lengths change. Then one planned step covers many
decode iterations: until the next finish, or to the limit of the blocks or of the caller's horizon. An arrival during
such a step calls `truncate`. It ends the step at the next iteration, at which a real engine would notice the arrival.

With a tier (`host_tier.py`), blocks that are only in the tier are loaded. Such a request gets its blocks at once, but
joins the batch only after the load. Later requests overtake it. `tier_load.py` handles the request until then. Requests
with a prompt that another engine computes wait in the same way (`kv_receive.py`).

Without chunked prefill (`Limits.chunked`) whole prompts are computed in separate steps, before any decode.
"""

from __future__ import annotations

import math
from collections import deque

from loadtest.fake_engine.calibration import StepTimes
from loadtest.fake_engine.decode_batch import DecodeBatch, EngineSequence
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.kv_pool import KvPool
from loadtest.fake_engine.kv_receive import KvReceiver
from loadtest.fake_engine.peers import Peers
from loadtest.fake_engine.request import EngineRequest, RequestRefused
from loadtest.fake_engine.step import Admitted, Counters, Limits, Outcome, Step, iterations_within, mixed_s
from loadtest.fake_engine.tier_load import TierLoader


class EngineModel:
    """One replica. Call `step = begin()`, wait `step.duration_s`, call `complete(step)`, and repeat while there is
    work."""

    def __init__(
        self,
        times: StepTimes,
        kv_tokens: int,
        limits: Limits,
        *,
        record_events: bool = False,
        record_tokens: bool = True,
        tier: TierLimits | None = None,
        peers: Peers | None = None,
        name: str = "",
        legs: bool = False,
    ) -> None:
        """Create an engine. With a tier and `peers`, it has this `name` among the peers.

        With `legs` it takes part in disaggregated prefill, and cannot have a tier.
        """
        if legs and tier is not None:
            raise ValueError("an engine has a tier, or takes legs")
        if not limits.chunked and (legs or tier is not None):
            raise ValueError("an engine without chunked prefill has no tier and takes no legs")
        self.limits = limits
        self.counters = Counters()
        self.pool = KvPool(kv_tokens // limits.block_tokens, record_events=record_events)
        self.context_tokens_max = min(limits.context_tokens_max, self.pool.blocks_n * limits.block_tokens)
        self._times = times
        self._waiting: deque[EngineSequence] = deque()
        # In order of admission. Those that decode come first. A sequence with an incomplete prompt got the rest of a
        # step's budget, so no sequence is admitted after it.
        self._running: list[EngineSequence] = []
        self._decoding = DecodeBatch(limits.block_tokens)
        # vLLM refuses more sequences than a step has tokens for.
        self._sequences_max = min(limits.sequences_max, limits.batched_tokens_max)
        self._record_tokens = record_tokens
        self._by_id: dict[int, EngineSequence] = {}
        self._admitted = 0
        self._blocked = False  # the head of the queue cannot be admitted until blocks are freed
        self.arriving = KvReceiver(self.pool, limits.block_tokens) if legs else None
        self.loading = None if tier is None else TierLoader(self.pool, tier, limits.block_tokens, peers, name)
        self._aside: TierLoader | KvReceiver | None = self.arriving if legs else self.loading

    @property
    def running_n(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting_n(self) -> int:
        """Queued requests, including preempted ones and those that wait for a load."""
        return len(self._waiting) + self.aside_n

    @property
    def aside_n(self) -> int:
        """Queued requests that wait for blocks from a tier or another engine (vLLM: deferred)."""
        return len(self._aside) if self._aside is not None else 0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live requests use, 0 to 1."""
        return 1 - self.pool.free_n / self.pool.blocks_n

    @property
    def held_tokens(self) -> int:
        """Tokens of the blocks that live requests use; a shared block counts once."""
        return self.pool.held_n * self.limits.block_tokens

    def get_admitted_batch(self, step: Step | None) -> Admitted:
        """Return the batch at the end of `step`, the current step."""
        under_way = {id(sequence): count for sequence, count in step.work or ()} if step is not None else {}
        decoding = self._decoding
        batch = Admitted([], decoding.count, decoding.context_tokens, self.held_tokens)
        for sequence in self._running[decoding.count :]:
            if sequence.generated:
                batch.decodes += 1
                batch.context_tokens += sequence.computed
            else:
                done = under_way.get(id(sequence), 0)
                left, computed = sequence.behind - done, sequence.computed + done
                batch.prefilling.append((sequence.request.tag, left, computed))
        return batch

    def check(self, prompt_tokens: int, output_tokens: int) -> None:
        """Raise `RequestRefused` if such a request could never finish on this engine."""
        if prompt_tokens < 1 or output_tokens < 1:
            raise RequestRefused("a request has at least one prompt token and one output token")
        limit = self.context_tokens_max
        if prompt_tokens + output_tokens > limit:
            total = prompt_tokens + output_tokens
            raise RequestRefused(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{output_tokens} output tokens and your prompt contains at least {prompt_tokens} input "
                f"tokens, for a total of at least {total} tokens. Please reduce the length of the input "
                "prompt or the number of requested output tokens."
            )

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestRefused`. Ids must not repeat while a request lives."""
        self.check(request.prompt_tokens, request.output_tokens)
        if request.request_id in self._by_id:
            raise ValueError(f"request {request.request_id} is already here")
        sequence = self._by_id[request.request_id] = EngineSequence(request)
        self._waiting.append(sequence)

    def cancel(self, request_id: int) -> bool:
        """Free the blocks of a request after its client has disconnected, also in the middle of a step. Returns False
        if the request is no longer here."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        sequence.live = False
        if sequence.ends >= 0:
            self._decoding.leave(sequence)
        if self._aside is None or not self._aside.cancel(sequence):
            (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._drop_blocks(sequence)
        self.counters.cancelled += 1
        return True

    def release(self, request_id: int) -> None:
        """Free blocks that were kept for another engine, which has fetched them or let the lease expire."""
        if self.arriving is not None:
            self.arriving.release(request_id)
            self._blocked = False

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Returns False, and drops none, while requests use any. Its event is published with
        the next step, as measured on vLLM 0.32."""
        return self.pool.clear()

    def begin(self, horizon_s: float = math.inf, now_s: float = 0.0) -> Step | None:
        """Plan the next step, or return None if there is no work. A step has several iterations only within the
        horizon.

        `now_s`: current time, for a model with a tier.
        """
        loading = self._aside
        if loading is not None:
            self._waiting.extendleft(reversed(loading.due(now_s)))
            horizon_s = min(horizon_s, loading.get_remaining_s(now_s))
        if not self._running and not self._waiting and not (loading is not None and len(loading)):
            return None
        if self._running and (self._blocked or not self._waiting) and not (loading is not None and loading.ready):
            step = self._plan_decode(horizon_s)
            if step is not None:
                return step
        return self._plan_mixed(now_s)

    def truncate(self, step: Step, elapsed_s: float) -> None:
        """End a step at the next iteration boundary, because of an arrival `elapsed_s` after its start."""
        if step.idle:
            step.duration_s = min(step.duration_s, elapsed_s)
            return
        if step.iterations == 1 or elapsed_s >= step.duration_s:
            return
        low, high = 1, step.iterations
        while low < high:
            middle = (low + high) // 2
            if self._times.decodes_s(step.decodes, step.context_tokens, middle, step.held_tokens) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        step.iterations = low
        step.duration_s = self._times.decodes_s(step.decodes, step.context_tokens, low, step.held_tokens)

    def complete(self, step: Step) -> Outcome:
        """Apply a step at its end."""
        outcome = Outcome([], [], [], [])
        self.counters.iterations += step.iterations
        if step.work is None:
            self._fill(step.iterations)
        if not step.paused:
            self._advance(step.iterations, outcome)
        for sequence, count in step.work or ():
            if not sequence.live:
                continue
            sequence.computed += count
            if not sequence.behind:
                self._sample_token(sequence, outcome)
        if outcome.finished:
            self._running = [sequence for sequence in self._running if sequence.live]
        if self._aside is not None:
            self._aside.offload()
        outcome.events = self.pool.drain_events()
        return outcome

    # --- planning

    def _plan_decode(self, horizon_s: float) -> Step | None:
        """Return a step with as many iterations as stay pure decode; None if not even one would."""
        decoding, size = self._decoding, self.limits.block_tokens
        decodes, context = decoding.count, decoding.context_tokens + decoding.count
        if decodes < len(self._running):
            return None  # a first token has its own time
        longest, held = min(self.limits.context_tokens_max, decoding.count_iterations_left()), self.held_tokens
        iterations = iterations_within(self._times, horizon_s, decodes, context, longest, held)
        # An iteration takes at most one block a sequence; exact counting is only needed near the end of the pool.
        while decodes * (iterations // size + 1) > self.pool.free_n:
            if decoding.blocks_for(iterations) <= self.pool.free_n:
                break
            if iterations == 1:
                return None
            iterations //= 2
        duration_s = self._times.decodes_s(decodes, context, iterations, held)
        return Step(duration_s, iterations, decodes, context, held_tokens=held)

    def _plan_mixed(self, now_s: float) -> Step:
        """Plan one iteration: running sequences first, in order of admission, then requests that can be admitted."""
        preemptions = self.counters.preemptions
        work: list[tuple[EngineSequence, int]] = []
        chunked = self.limits.chunked
        if not chunked:
            self._admit(work, self.limits.batched_tokens_max, now_s)
            if work:
                return Step(mixed_s(self._times, work, 0, 0, self.held_tokens), 1, 0, 0, work, paused=True)
        self._grow_decoding()
        decodes = self._decoding.count
        context = self._decoding.context_tokens + decodes
        budget, index = self.limits.batched_tokens_max - decodes, decodes
        while index < len(self._running) and budget:
            sequence = self._running[index]
            count = min(sequence.behind, budget)
            if not self._grow(sequence, sequence.computed + count):
                break
            self._schedule(work, sequence, count)
            budget -= count
            index += 1
        if chunked and preemptions == self.counters.preemptions:
            self._admit(work, budget, now_s)
        if self._aside is not None and not work and not decodes:
            return Step(self._aside.get_remaining_s(now_s, self._times.mixed_s(0, 0, 0, 0)), 1, 0, 0, [], idle=True)
        held = self.held_tokens
        return Step(mixed_s(self._times, work, decodes, context, held), 1, decodes, context, work, held_tokens=held)

    def _grow_decoding(self) -> None:
        """Allocate blocks for one more token of each decoding sequence; a block that becomes full is shared."""
        for sequence in self._decoding.find_bordering(1):
            if sequence.ends < 0:
                continue  # just preempted
            computed = self._decoding.count_computed(sequence) + 1
            if not self._grow(sequence, computed):
                return
            self._store(sequence, computed)

    def _admit(self, work: list[tuple[EngineSequence, int]], budget: int, now_s: float) -> None:
        """Admit requests first come, first served: one that cannot be admitted blocks all later ones."""
        size, loading, chunked = self.limits.block_tokens, self._aside, self.limits.chunked
        while loading is not None and loading.ready and budget and len(self._running) < self._sequences_max:
            budget -= self._join(loading.ready.popleft(), work, budget)
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            tokens = sequence.request.prompt_tokens + sequence.generated
            # The last token is always computed, because its logits are needed (vLLM: num_tokens - 1).
            keys, blocks_max = sequence.request.keys, (tokens - 1) // size
            matched = self.pool.match(keys, blocks_max)
            if self.limits.drops_last_block and matched:
                matched.pop()
            if loading is not None and loading.put_off(sequence, len(matched), blocks_max):
                self._waiting.popleft()
                continue
            missing = -(-tokens // size) - len(matched)
            if len(self._running) >= self._sequences_max or not self.pool.fits(matched, missing):
                self._blocked = True
                return
            if not chunked and work and tokens - len(matched) * size > budget:
                return  # a prompt is not split; one that is longer than the budget has its own step
            self._waiting.popleft()
            self._blocked = False
            sequence.number = self._admitted = self._admitted + 1
            self.pool.share(matched)
            sequence.blocks = matched + self.pool.take(missing)
            sequence.stored = len(matched)
            sequence.computed = self.pool.reach(keys, blocks_max, len(matched)) * size
            to_load, aside = (0, False) if loading is None else loading.begin(sequence, blocks_max, now_s)
            to_load *= size
            if sequence.cached < 0:
                sequence.cached = sequence.computed + to_load
                self.counters.queried_tokens += tokens if self.limits.prefix_caching else 0
                self.counters.hit_tokens += sequence.computed
                if loading is not None:
                    self.counters.tier_queried_tokens += tokens - sequence.computed
                    self.counters.tier_hit_tokens += to_load
            if not aside:
                budget -= self._join(sequence, work, budget)

    def _join(self, sequence: EngineSequence, work: list[tuple[EngineSequence, int]], budget: int) -> int:
        """Add a sequence that has all its blocks to the batch. Returns the used part of the budget."""
        self._running.append(sequence)
        count = min(sequence.behind, budget) if self.limits.chunked else sequence.behind
        self._schedule(work, sequence, count)
        return count

    def _schedule(self, work: list[tuple[EngineSequence, int]], sequence: EngineSequence, count: int) -> None:
        self._store(sequence, sequence.computed + count)
        work.append((sequence, count))

    def _store(self, sequence: EngineSequence, computed: int) -> None:
        """Share full blocks when they are scheduled: later requests of the same step may use them."""
        if not self.limits.prefix_caching:
            return
        keys = sequence.request.keys
        full = min(computed // self.limits.block_tokens, len(keys))
        if full > sequence.stored:
            self.pool.store(sequence.request.tag, keys, sequence.blocks, sequence.stored, full)
            if self._aside is not None:
                self._aside.on_blocks_full(sequence, full)
            sequence.stored = full

    def _grow(self, sequence: EngineSequence, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens, if necessary from the youngest sequence. Returns False if that is the
        sequence itself."""
        missing = -(-tokens // self.limits.block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.free_n:
            youngest = self._running.pop()
            if youngest.ends >= 0:
                self._decoding.leave(youngest)
            self._drop_blocks(youngest)
            youngest.computed = youngest.stored = 0
            self._waiting.appendleft(youngest)
            self.counters.preemptions += 1
            if youngest is sequence:
                return False
        sequence.blocks += self.pool.take(missing)
        return True

    # --- applying

    def _fill(self, iterations: int) -> None:
        """Allocate blocks for the decoded tokens; full blocks are shared."""
        size = self.limits.block_tokens
        for sequence in self._decoding.find_bordering(iterations):
            computed = self._decoding.count_computed(sequence) + iterations
            missing = -(-computed // size) - len(sequence.blocks)
            if missing > 0:
                sequence.blocks += self.pool.take(missing)
            self._store(sequence, computed)

    def _advance(self, iterations: int, outcome: Outcome) -> None:
        decodes = self._decoding.count
        if self._record_tokens:
            outcome.tokens += [(sequence.request.request_id, iterations) for sequence in self._running[:decodes]]
        self.counters.generated_tokens += decodes * iterations
        for sequence in self._decoding.advance(iterations):
            self._finish(sequence, outcome)

    def _sample_token(self, sequence: EngineSequence, outcome: Outcome) -> None:
        """Generate the next token of a sequence without pending computation. After that it decodes or finishes."""
        request = sequence.request
        if not sequence.generated:
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prompt_cached_tokens += sequence.cached
            outcome.first.append((request.request_id, sequence.cached))
        sequence.generated += 1
        self.counters.generated_tokens += 1
        if self._record_tokens:
            outcome.tokens.append((request.request_id, 1))
        if sequence.generated == request.output_tokens:
            self._finish(sequence, outcome)
        else:
            self._decoding.join(sequence)

    def _finish(self, sequence: EngineSequence, outcome: Outcome) -> None:
        sequence.live = False
        request_id = sequence.request.request_id
        del self._by_id[request_id]
        if sequence.request.hold and self.arriving is not None:
            self.arriving.hold(sequence)
        self._drop_blocks(sequence)
        self.counters.finished += 1
        outcome.finished.append(request_id)

    def _drop_blocks(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._blocked = False
