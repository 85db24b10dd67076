"""Replay of a trace to an OpenAI-compatible URL, and the row of its results.

Open loop sends each request at its recorded time, independent of earlier answers, and measures from that moment. So a
slow server cannot hide by slowing its client down. Closed loop keeps a fixed number of sessions active: each waits for
its answer, thinks, and sends its next request. A session that ends is replaced by the next.

Against engines that run S times faster than real time (`--time-scale S`), waits are divided and measured times
multiplied by S: every time reported is in simulated seconds. Hit rates come from the engines' own counters over the run
if the replicas are known. A router's own figures are not used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtest.common.answer_limits import COMMON, AnswerLimits, answer_limit
from loadtest.common.client import (
    Answer,
    Client,
    Endpoint,
    ReplayError,
    first_model,
    open_unlimited_session,
    read_counters,
)
from loadtest.common.report import Row, percentile, quantiles
from loadtest.common.traces import REQUESTS_MAX, Request, Session, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of a run. Seconds are simulated seconds."""

    url: str
    more_urls: tuple[str, ...] = ()
    """Further routers: requests go to all of them in rotation."""
    model: str | None = None
    """Name of the model. None: the first that `/v1/models` lists."""
    endpoint: Endpoint = "chat"
    mode: Literal["auto", "open", "closed"] = "auto"
    speed: float = 1.0
    """Open loop: requests arrive faster than recorded by this factor."""
    spread_s: float = 0.0
    """Open loop: each request is delayed by a random part of this recorded time.

    If a trace's clock has whole multiples of a few seconds (Mooncake's: 3 s), all requests of one such time would
    arrive at one moment.
    """
    time_scale: float = 1.0
    requests_max: int = REQUESTS_MAX
    warm_up: int = 0
    """The first `warm_up` requests are sent but do not count, except for their effect on the caches."""
    sessions_active: int = 16
    think_max_s: float = 60.0
    ramp_s: float = 0.0
    """Closed loop: the first sessions start at random within this time, not all at once."""
    output_tokens_max: int = 1_000_000
    answer_limits: AnswerLimits = COMMON
    """Values of `max_tokens` that clients send, in equal parts."""
    foreknowledge: bool = False
    """True if `max_tokens` is the length of the answer, which no client knows: an upper bound."""
    timeout_s: float = 300.0
    ttft_limit_s: float | None = None
    ignore_eos: bool = False
    """True if a real engine must generate up to the recorded length, which then is `max_tokens`."""
    replicas: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    session_header: str | None = None
    """Header that carries the session's name; None sends no hint."""
    seed: int = 1
    workload: str | None = None
    policy: str | None = None
    router: str | None = None

    def answer_tokens(self, request: Request) -> int:
        """Return the length of the request's answer: as recorded, but cut at `output_tokens_max`."""
        return max(1, min(request.output_tokens, self.output_tokens_max))

    def longest_answer_tokens(self, trace: Trace) -> int:
        """Return the length of the trace's longest answer."""
        return max(self.answer_tokens(request) for session in trace.sessions for request in session.requests)

    def limit_of(self, session: str, request: Request, longest_tokens: int) -> int | None:
        """Return a request's `max_tokens`, or None for no limit. `longest_tokens` is the trace's longest answer."""
        if self.foreknowledge or self.ignore_eos:
            return self.answer_tokens(request)
        return answer_limit(self.answer_limits, session, longest_tokens)


Progress = Callable[[int], None]
"""Called with the number of requests finished."""


async def run_replay(trace: Trace, settings: ReplaySettings, progress: Progress | None = None) -> Row:
    """Replay the trace and return its row. Raises ReplayError if it cannot start or read the counters."""
    row, _ = await replay_trace(trace, settings, progress)
    return row


async def replay_trace(
    trace: Trace, settings: ReplaySettings, progress: Progress | None = None
) -> tuple[Row, list[Sent]]:
    """Replay the trace. Returns its row, and all requests with their answers in the order in which answers ended."""
    mode = settings.mode if settings.mode != "auto" else ("open" if trace.kind == "open" else "closed")
    if mode == "open" and trace.kind != "open":
        raise ReplayError("sessions have no common clock: use the closed loop")
    async with open_unlimited_session() as session:
        client = Client(
            session,
            settings.url,
            *settings.more_urls,
            model=settings.model or await first_model(session, settings.url, settings.headers),
            endpoint=settings.endpoint,
            timeout_wall_s=settings.timeout_s / settings.time_scale,
            ignore_eos=settings.ignore_eos,
        )
        before = await read_counters(session, settings.replicas)
        run = _Run(client, settings, settings.longest_answer_tokens(trace), progress)
        await (run.open_loop(trace) if mode == "open" else run.closed_loop(trace))
        after = await read_counters(session, settings.replicas)
    counted = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
    row = row_of(trace.name, settings, run.sent, run.duration_wall_s, counted)
    row.load, row.load_unit = _load(trace, settings, mode, run)
    return row, run.sent


# The run


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and its answer."""

    session: str
    request: Request
    answer: Answer
    replay: bool
    """True if the same prompt, byte for byte, was sent earlier in the run."""
    counts: bool = True
    """False for a request of the warm-up."""


class _Run:
    """Paces the requests of one run and collects their answers."""

    def __init__(
        self, client: Client, settings: ReplaySettings, longest_tokens: int, progress: Progress | None
    ) -> None:
        """Create a run; `longest_tokens` is the length of the trace's longest answer."""
        self.sent: list[Sent] = []
        self.duration_wall_s = 0.0
        self.last_at_s = 0.0
        self._client = client
        self._settings = settings
        self._longest_tokens = longest_tokens
        self._progress = progress
        self._prompts: set[object] = set()
        self._number = 0
        self._counted_from: float | None = None

    async def open_loop(self, trace: Trace) -> None:
        settings = self._settings
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for at_s, session in arrivals(trace.sessions[: settings.requests_max], settings):
                request = session.requests[0]
                body = self._body(session, request)
                self.last_at_s = at_s / settings.speed
                due = start + self.last_at_s / settings.time_scale
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(self._send(session, request, body, due))
        self._set_duration(start)

    async def closed_loop(self, trace: Trace) -> None:
        settings = self._settings
        start = time.perf_counter()
        sessions = iter(trace.sessions)
        budget = iter(range(settings.requests_max))
        rng = random.Random(settings.seed)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(settings.sessions_active):
                wait_s = rng.uniform(0, settings.ramp_s) / settings.time_scale
                tasks.create_task(self._user(sessions, budget, wait_s))
        self._set_duration(start)

    def _set_duration(self, start: float) -> None:
        """Store the run's duration, from its first request that counts with a warm-up, otherwise from its start."""
        self.duration_wall_s = time.perf_counter() - (self._counted_from or start)

    async def _user(self, sessions: Iterator[Session], budget: Iterator[int], wait_s: float) -> None:
        """Send sessions one after the other, until they or the run's requests are used up."""
        settings = self._settings
        await asyncio.sleep(wait_s)
        for session in sessions:
            answered = time.perf_counter()
            for request in session.requests:
                if next(budget, None) is None:
                    return
                body = self._body(session, request)
                due = answered + min(request.think_s, settings.think_max_s) / settings.time_scale
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await self._send(session, request, body, time.perf_counter())
                answered = time.perf_counter()

    def _body(self, session: Session, request: Request) -> bytes:
        limit = self._settings.limit_of(session.name, request, self._longest_tokens)
        return self._client.body(request, self._settings.answer_tokens(request), limit)

    async def _send(self, session: Session, request: Request, body: bytes, due: float) -> None:
        key = request.prompt_key()
        replay = key in self._prompts
        self._prompts.add(key)
        counts, self._number = self._number >= self._settings.warm_up, self._number + 1
        if counts and self._settings.warm_up and self._counted_from is None:
            self._counted_from = due
        headers = {"Content-Type": "application/json", **self._settings.headers}
        if self._settings.session_header:
            headers[self._settings.session_header] = session.name
        answer = await self._client.send(body, due, headers)
        self.sent.append(Sent(session.name, request, answer, replay, counts))
        if self._progress:
            self._progress(len(self.sent))


def arrivals(sessions: Sequence[Session], settings: ReplaySettings) -> list[tuple[float, Session]]:
    """Return (arrival by the trace's clock, session) in order of arrival. Each session has one request."""
    rng = random.Random(f"spread:{settings.seed}")
    spread = [(each.requests[0].at_s + rng.uniform(0.0, settings.spread_s), each) for each in sessions]
    return sorted(spread, key=lambda pair: pair[0])


# The row


def row_of(
    trace: str,
    settings: ReplaySettings,
    requests: Sequence[Sent],
    duration_wall_s: float,
    counted: Sequence[tuple[float, float]],
) -> Row:
    """Return the row of a run; `counted` are each engine's tokens looked up and found.

    Percentiles are over all requests that count; a failed one counts with the whole timeout. The engines' counters
    include the warm-up. So with a warm-up, hits come from the answers' usage.
    """
    if not all(sent.counts for sent in requests):
        requests, counted = [sent for sent in requests if sent.counts], []
    answers = [sent.answer for sent in requests]
    scale, duration_s = settings.time_scale, duration_wall_s * settings.time_scale
    good = [a for a in answers if not a.failure]
    ttfts = [a.ttft_s * scale if a.ttft_s is not None else settings.timeout_s for a in answers]
    e2es = [settings.timeout_s if a.failure else a.e2e_s * scale for a in answers]
    failures = Counter(a.failure for a in answers if a.failure)
    rejected = sum(a.rejected for a in answers)
    by_replica = Counter(a.replica for a in good if a.replica)
    within = [t for t in ttfts if settings.ttft_limit_s is not None and t <= settings.ttft_limit_s]
    row = Row(
        workload=settings.workload or trace,
        policy=settings.policy,
        router=settings.router or ("warmroute" if by_replica else None),
        replicas=len(settings.replicas) or None,
        seed=settings.seed,
        requests=len(answers),
        errors=sum(failures.values()) - rejected,
        rejected=rejected,
        **quantiles("ttft", ttfts),
        **quantiles("e2e", e2es),
        output_tokens_per_s=sum(a.completion_tokens for a in good) / duration_s if duration_s else None,
        goodput=len(within) / duration_s if settings.ttft_limit_s is not None and duration_s else None,
        duration_s=duration_s,
        errors_by_kind=dict(failures),
        requests_by_replica=dict(by_replica),
    )
    _hit_rates(row, requests, counted)
    _set_engine_ttft(row, answers, settings)
    return row


def _set_engine_ttft(row: Row, answers: Sequence[Answer], settings: ReplaySettings) -> None:
    """Set the p90 times to first token without real time, and at a time scale of 1, if engines report their own."""
    if not any(answer.engine_ttft_s is not None for answer in answers):
        return
    scale, meant_s, life_s = settings.time_scale, [], []
    for answer in answers:
        if answer.ttft_s is None:
            meant_s.append(settings.timeout_s)
            life_s.append(settings.timeout_s)
            continue
        meant_s.append((answer.engine_ttft_s or 0.0) + scale * answer.waited_s)
        life_s.append(meant_s[-1] + max(0.0, answer.ttft_s - meant_s[-1] / scale))
    row.ttft_engine_p90_s, row.ttft_life_p90_s = percentile(meant_s, 90), percentile(life_s, 90)


def _hit_rates(row: Row, sent: Sequence[Sent], counted: Sequence[tuple[float, float]]) -> None:
    """Set the hit rates from the engines' counters if available, split by the cached tokens of each answer."""
    reported = [s for s in sent if s.answer.cached_tokens is not None]
    cached = sum(s.answer.cached_tokens or 0 for s in reported)
    if counted:
        row.hit_rate_source = "engines"
        looked_up, found = (sum(pair[i] for pair in counted) for i in (0, 1))
        computed = [pair[0] - pair[1] for pair in counted]
        row.imbalance = max(computed) * len(computed) / sum(computed) if sum(computed) > 0 else None
    else:
        row.hit_rate_source = "usage"
        looked_up, found = sum(s.answer.prompt_tokens for s in reported), cached
    if looked_up > 0:
        row.token_hit_rate = found / looked_up
    if row.token_hit_rate is not None and (cached > 0 or found == 0):
        replayed = sum(s.answer.cached_tokens or 0 for s in reported if s.replay)
        row.replay_hit_rate = row.token_hit_rate * replayed / cached if cached else 0.0
        row.genuine_hit_rate = row.token_hit_rate - row.replay_hit_rate


def _load(trace: Trace, settings: ReplaySettings, mode: str, run: _Run) -> tuple[float, str]:
    if mode == "closed":
        return min(settings.sessions_active, len(trace.sessions)), "sessions"
    return (len(run.sent) / run.last_at_s if run.last_at_s else 0.0), "requests/s"
