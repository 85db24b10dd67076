"""An engine model that is run by hand, in simulated time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from loadtest.fake_engine.kv_pool import KvEvent
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Step


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
        for request_id, count in outcome.tokens:
            self.tokens[request_id] += count
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
