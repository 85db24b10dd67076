"""One simulated replica in virtual time: the engine model of `loadtest engine`, stepped by events instead of a clock.

It corresponds to replica.py for HTTP: a step begins when the one before it ends, and an arrival in the middle of a run
of decodes ends that run at the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from loadtest.fake_engine.calibration import Calibration, StepTimes
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.peers import PeerLimits, Peers
from loadtest.fake_engine.prefill_export import PrefillExports
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Admitted, Limits, Outcome, Step
from loadtest.fake_engine.zoo.member import DENSE
from loadtest.fake_engine.zoo.pages import page_of
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.engine.shared_cache import SharedPool
from router.core.fleet.engine_metrics import parse_load
from router.core.types.replicas import Load

Schedule = Callable[[float, Callable[[int], None], int], None]
"""(time, callback, its argument)"""


@dataclass(slots=True)
class SlowedTimes:
    """A calibration's times, multiplied by a factor, as by a throttled GPU or a noisy neighbour."""

    times: StepTimes
    factor: float = 1.0

    def mixed_s(
        self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int, held_tokens: float = inf
    ) -> float:
        """Return seconds of a step (`StepTimes`), times the current factor."""
        return self.factor * self.times.mixed_s(prefill_tokens, prefill_pairs, decodes, context_tokens, held_tokens)

    def decodes_s(self, decodes: int, context_tokens: int, iterations: int, held_tokens: float = inf) -> float:
        """Return seconds of a step (`StepTimes`), times the current factor."""
        return self.factor * self.times.decodes_s(decodes, context_tokens, iterations, held_tokens)


class VirtualReplica:
    """Drives one `EngineModel`. `deliver(outcome, now_s)` receives the outcome of each step."""

    def __init__(
        self,
        name: str,
        calibration: Calibration,
        kv_tokens: int,
        limits: Limits,
        schedule: Schedule,
        deliver: Callable[[VirtualReplica, Outcome, float], None],
        *,
        record_events: bool = False,
        tier: TierLimits | None = None,
        peers: Peers | None = None,
        legs: PeerLimits | None = None,
        machine: Machine | None = None,
    ) -> None:
        """Create the replica. `limits` are the machine's. With `legs`, a link, it takes stages of disaggregated
        requests."""
        self.legs = PrefillExports(legs) if legs is not None else None  # prefill stages that were sent here
        self.name, self.up, self.kv_tokens = name, True, kv_tokens
        self.down_until_s = self.slow_until_s = 0.0
        self.times = SlowedTimes(calibration.times)
        self.machine = machine or Machine()
        self._factor = self.machine.slowness  # of the steps to come
        self.calibration = calibration
        self._limits, self._record, self._tier, self._peers = limits, record_events, tier, peers
        self._schedule, self._deliver = schedule, deliver
        self._step: Step | None = None
        self._began_s = 0.0
        self._version = 0
        self.computed_before = 0  # prompt tokens computed by earlier processes
        self._shared: set[int] | None = None
        self.preempted_before = 0
        self._scrapes = 0
        self.model = self._fresh()

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Start a request; raises the errors of `EngineModel.submit`."""
        self.model.submit(request)
        if self._step is None:
            self._began_s = now_s
            self._begin()
        else:
            self._cut(now_s)

    def slow(self, factor: float, now_s: float) -> None:
        """Multiply the machine's own time of every iteration after this one."""
        self._factor = factor * self.machine.slowness
        self._cut(now_s)

    def cancel(self, request_id: int) -> None:
        """Drop a request after its client left."""
        self.model.cancel(request_id)

    def computed_elsewhere(self, request_id: int, now_s: float) -> None:
        """Record that the prefill which a request here waits for is over."""
        if self.model.arriving is not None:
            self.model.arriving.computed_elsewhere(request_id, now_s)
            self._cut(now_s)

    def stop(self) -> None:
        """Kill the process: its requests and its cache are lost."""
        self.up, self._step = False, None
        self._version += 1
        self.computed_before += self.model.counters.prompt_tokens - self.model.counters.prompt_cached_tokens
        self.preempted_before += self.model.counters.preemptions
        if self.legs is not None:
            self.legs.end()
            self.legs = PrefillExports(self.legs.limits)
        if self.model.loading is not None:
            self.model.loading.stop()
        self.model = self._fresh()
        if self._peers is not None:
            self._peers.leave(self.name)

    def start(self) -> None:
        """Start a new process at the same address, with an empty cache."""
        self.up = True
        if self._peers is not None:
            self.model = self._fresh()

    @property
    def block_tokens(self) -> int:
        """The engine's own block size."""
        return self._limits.block_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found cached."""
        counters = self.model.counters
        return self.computed_before + counters.prompt_tokens - counters.prompt_cached_tokens

    def under_way(self, now_s: float) -> tuple[float, Admitted]:
        """Return seconds until the step under way is over, and the batch at that time."""
        step = self._step
        left_s = (
            max(0.0, self._began_s + step.duration_s - now_s) if step is not None and step.work is not None else 0.0
        )
        return left_s, self.model.get_admitted_batch(step)

    @property
    def preemptions(self) -> int:
        """Preemptions over all restarts."""
        return self.preempted_before + self.model.counters.preemptions

    def load(self) -> Load:
        """Return the load as on its `/metrics` page."""
        model, member = self.model, self.machine.page or self.machine.member
        if member is not DENSE:
            self._scrapes += 1
            return parse_load(page_of(model, self.machine.model, member, self._scrapes))
        counters = model.counters
        return Load(
            running=model.running_n,
            waiting=model.waiting_n,
            kv_usage=model.kv_usage,
            kv_tokens_max=model.pool.blocks_n * self._limits.block_tokens,
            block_tokens=self._limits.block_tokens,
            prompt_tokens_total=float(counters.prompt_tokens),
            generation_tokens_total=float(counters.generated_tokens),
            cache_query_tokens_total=float(counters.queried_tokens),
            cache_hit_tokens_total=float(counters.hit_tokens),
            prefix_caching=self.machine.prefix_caching,
        )

    def share(self, shared: set[int]) -> None:
        """Find all blocks that any replica computed, without a limit of KV space, from now on: for bounds, before a
        run."""
        self._shared = shared
        self.model = self._fresh()

    def _fresh(self) -> EngineModel:
        model = EngineModel(
            self.times,
            self.kv_tokens,
            self._limits,
            record_events=self._record,
            record_tokens=False,
            tier=None if self._shared is not None else self._tier,  # blocks computed on any replica need no load
            peers=self._peers,
            name=self.name,
            legs=self.legs is not None,
        )
        if self._shared is not None:
            model.pool = SharedPool(model.pool.blocks_n, self._shared)
        return model

    def _cut(self, now_s: float) -> None:
        """End the step under way at its next iteration."""
        step = self._step
        if step is not None and (step.iterations > 1 or step.idle):
            self.model.truncate(step, now_s - self._began_s)
            self._arm(step)

    def _begin(self) -> None:
        self.times.factor = self._factor
        self._step = self.model.begin(now_s=self._began_s)
        if self._step is not None:
            self._arm(self._step)

    def _arm(self, step: Step) -> None:
        self._version += 1
        self._schedule(self._began_s + step.duration_s, self._end, self._version)

    def _end(self, version: int) -> None:
        step = self._step
        if version != self._version or step is None:
            return  # the step was cut short, or its process died
        self._began_s += step.duration_s
        outcome = self.model.complete(step)
        self._begin()
        self._deliver(self, outcome, self._began_s)
