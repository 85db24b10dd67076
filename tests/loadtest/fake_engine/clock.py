"""Engine models that are run by hand, and engines that run by themselves, in simulated time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from loadtest.fake_engine.kv_pool import KvEvent
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Outcome, Step
from loadtest.simulate.engine.replicas import VirtualReplica


@dataclass
class Clock:
    """Runs a model in simulated time and notes what came when."""

    model: EngineModel
    horizon_s: float = math.inf
    now_s: float = 0.0
    step: Step | None = None
    first_s: dict[int, float] = field(default_factory=dict)
    finished_s: dict[int, float] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    events: list[KvEvent] = field(default_factory=list)

    def begin(self) -> None:
        """Plan a step unless one is under way."""
        if self.step is None:
            self.step = self.model.begin(self.horizon_s, self.now_s)

    def finish_step(self) -> None:
        """Let the step's time pass."""
        assert self.step is not None
        self.now_s += self.step.duration_s
        outcome = self.model.complete(self.step)
        self.step = None
        for request_id, cached in outcome.first:
            self.first_s[request_id] = self.now_s
            self.cached[request_id] = cached
        for request_id, tokens in outcome.tokens:
            self.tokens[request_id] += tokens
        for request_id in outcome.finished:
            self.finished_s[request_id] = self.now_s
        self.events += outcome.events

    def submit_at(self, at_s: float, new: EngineRequest) -> None:
        """Let time pass until then; a step under way is cut short at its next iteration, as a driver would."""
        self.begin()
        while self.step is not None and self.now_s + self.step.duration_s <= at_s:
            self.finish_step()
            self.begin()
        if self.step is None:
            self.now_s = max(self.now_s, at_s)
        self.model.submit(new)
        if self.step is not None:
            self.model.truncate(self.step, at_s - self.now_s)

    def drain(self) -> None:
        """Until nothing is left to do."""
        self.begin()
        while self.step is not None:
            self.finish_step()
            self.begin()


class Engines:
    """What engines do when its time has come, in the order of time; and the requests that have begun and ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.first_s: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.finished_s: dict[int, float] = {}
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._count = count()

    def call_at(self, when_s: float, act: Callable[[int], None], argument: int) -> None:
        """Have that done then."""
        heappush(self._heap, (when_s, next(self._count), act, argument))

    def note(self, _: VirtualReplica, outcome: Outcome, now_s: float) -> None:
        """Remember what came of a step."""
        for number, cached in outcome.first:
            self.first_s[number], self.cached[number] = now_s, cached
        self.finished_s |= dict.fromkeys(outcome.finished, now_s)

    def run(self, until_s: float = 1_000.0) -> None:
        """Until then, or until nothing is left to do."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act, argument = heappop(self._heap)
            act(argument)
