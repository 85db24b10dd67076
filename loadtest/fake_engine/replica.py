"""One simulated replica in real time: steps the engine model by the clock and delivers tokens.

Simulated seconds pass `time_scale` times faster than wall seconds; the scale may be changed. A step begins at the end
of the step before it, not at the wake-up of the event loop, so late wake-ups do not add up. `lag_max_s` is the largest
such delay.

First and last tokens are delivered at once. Tokens between them are delivered if a tick has passed since the last
delivery, or before a step that takes longer than a tick. At real speed that is one event a token, as in vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.fake_engine.kv_pool import KvEvent
from loadtest.fake_engine.metrics import E2E_BUCKETS_S, TTFT_BUCKETS_S, Histogram
from loadtest.fake_engine.model import EngineModel
from loadtest.fake_engine.request import EngineRequest
from loadtest.fake_engine.step import Outcome, Step


@dataclass(slots=True)
class Choice:
    """One answer of an HTTP request that is being sent to the client."""

    ready: int = 0
    """Tokens delivered so far."""
    cached_tokens: int = 0
    ttft_s: float = 0.0
    """Time from submission to the first token, by the model's clock."""
    finished: bool = False
    aborted: bool = False
    """True if an operator ended it before its last token."""


class Choices:
    """All choices of one HTTP request, with a way to wait for further tokens of any."""

    __slots__ = ("_fresh", "_waiter", "choices", "flushed_s")

    def __init__(self, choices_n: int) -> None:
        self.choices = [Choice() for _ in range(choices_n)]
        self.flushed_s = 0.0
        self._fresh = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """True if every choice has all its tokens."""
        return all(choice.finished for choice in self.choices)

    async def more(self) -> None:
        """Wait until tokens were delivered since the last call; one caller at a time."""
        while not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._fresh = False

    def flush(self, now_s: float) -> None:
        """Wake the waiting caller."""
        self.flushed_s = now_s
        self._fresh = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _Open:
    answer: Choices
    choice: Choice
    submitted_s: float


class SimulatedReplica:
    """Drives one `EngineModel`; all methods run on the event loop."""

    def __init__(
        self,
        model: EngineModel,
        *,
        time_scale: float = 1.0,
        tick_s: float = 0.005,
        on_events: Callable[[Sequence[KvEvent]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.e2e = Histogram(E2E_BUCKETS_S)
        self.lag_max_s = 0.0
        self.started_s = time.time()
        self.time_scale = time_scale
        self._tick_s = tick_s
        self._on_events = on_events
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._held: set[Choices] = set()
        self._step: Step | None = None
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, request: EngineRequest, answer: Choices, choice_n: int) -> None:
        """Start a request. Raises the exceptions of `EngineModel.submit`."""
        now_s = self._clock()
        self.model.submit(request)
        self._open[request.request_id] = _Open(answer, answer.choices[choice_n], now_s)
        if self._step is None:
            self._began_s = now_s
            self._begin()
        elif self._step.iterations > 1 or self._step.idle:
            self.model.truncate(self._step, (now_s - self._began_s) * self.time_scale)
            self._arm(self._step)

    def cancel(self, request_id: int) -> None:
        """Cancel a request after its client has disconnected; a finished request is unaffected."""
        if self._open.pop(request_id, None) is not None:
            self.model.cancel(request_id)

    def abort(self) -> None:
        """End every open request with its tokens so far (vLLM's sleep mode, `abort`)."""
        answers = {opened.answer for opened in self._open.values()}
        for request_id, opened in self._open.items():
            self.model.cancel(request_id)
            opened.choice.finished = opened.choice.aborted = True
        self._open.clear()
        self._held -= answers
        for answer in answers:
            answer.flush(self._clock())

    def stop(self) -> None:
        """Stop stepping; open requests remain unanswered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._step = self.model.begin(self._tick_s * self.time_scale, self._began_s * self.time_scale)
        if self._step is not None:
            self._arm(self._step)

    def _arm(self, step: Step) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = self._began_s + step.duration_s / self.time_scale - self._clock()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._due, step)

    def _due(self, step: Step) -> None:
        self._timer = None
        self._began_s += step.duration_s / self.time_scale
        self.lag_max_s = max(self.lag_max_s, self._clock() - self._began_s)
        outcome = self.model.complete(step)
        self._begin()
        if outcome.events and self._on_events is not None:
            self._on_events(outcome.events)
        self._hand_out(outcome)

    def _hand_out(self, outcome: Outcome) -> None:
        now_s = self._clock()
        urgent: set[Choices] = set()
        for request_id, cached_tokens in outcome.first:
            opened = self._open.get(request_id)
            if opened is not None:
                opened.choice.cached_tokens = cached_tokens
                opened.choice.ttft_s = self._compute_elapsed_s(opened.submitted_s)
                urgent.add(opened.answer)
                self.ttft.observe(opened.choice.ttft_s)
        for request_id, count in outcome.tokens:
            opened = self._open.get(request_id)
            if opened is not None:
                opened.choice.ready += count
                self._held.add(opened.answer)
        for request_id in outcome.finished:
            opened = self._open.pop(request_id, None)
            if opened is not None:
                opened.choice.finished = True
                urgent.add(opened.answer)
                self.e2e.observe(self._compute_elapsed_s(opened.submitted_s))
        self._flush(now_s, urgent)

    def _flush(self, now_s: float, urgent: set[Choices]) -> None:
        step = self._step
        everything = step is None or step.duration_s / self.time_scale > self._tick_s
        # Half a tick of tolerance: a delivery that is almost due must not wait for the next step.
        due_s = now_s - self._tick_s / 2
        sent = [a for a in self._held if everything or a.flushed_s <= due_s or a in urgent]
        for answer in sent:
            answer.flush(now_s)
        self._held.difference_update(sent)

    def _compute_elapsed_s(self, wall_s: float) -> float:
        # Simulated, by the model's clock: the engine's times exclude late wake-ups of the event loop.
        return max(0.0, self._began_s - wall_s) * self.time_scale
