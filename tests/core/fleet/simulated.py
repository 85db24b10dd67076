"""Replicas that prefill one prompt after the other in virtual time, then decode; clients that may lose patience."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from router.core.fleet.breaker import State
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load
from router.core.types.requests import RequestSpec
from tests.core.ready import ready

STEP_S = 0.05
LOOK_S, PIECES_S, PROBE_S = 0.25, 0.5, 1.0


@dataclass
class Request:
    """One request, wherever it is."""

    lease: Lease
    tokens: int
    stream: bool
    patience_s: float
    since_s: float
    work: float = 0.0  # tokens left to prefill
    decode_s: float = 0.0
    tried: frozenset[str] = frozenset()


@dataclass
class Engine:
    """First in, first out; decoding costs nothing but time."""

    speed: float = 10_000.0  # tokens/s of prefill
    decode_s: float = 1.0
    floor_s: float = 0.0
    hung: bool = False  # accepts everything, does nothing
    counters: bool = False  # whether it has a metrics page
    seats: int = 1_000
    waiting: deque[Request] = field(default_factory=deque)
    decoding: list[Request] = field(default_factory=list)
    tokens: float = 0.0  # its counter


class World:
    """A router before such engines."""

    def __init__(self, engines: dict[str, Engine], *, slow_start_s: float = 0.0, policy: str = "warm") -> None:
        self.engines = engines
        self.told: list[tuple[str, State, str]] = []
        self.router = Router(
            POLICIES[policy](),
            index_bytes_max=1 << 20,
            remembered_prompts_max=1_000,
            default_cache_blocks=1_000,
            slow_start_s=slow_start_s,
            breaker_changed=lambda *what: self.told.append(what),
        )
        ready(self.router, engines)
        self.now_s = 1_000.0
        self.steps = 0
        self.sent: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.moved = 0  # requests that were tried elsewhere
        self.number = 0

    @property
    def opened(self) -> list[str]:
        """Replicas whose breakers opened, in order."""
        return [id_ for id_, state, _ in self.told if state is State.OPEN]

    def send(
        self, tokens: int = 1_000, *, stream: bool = True, patience_s: float = 1e9, only: str | None = None
    ) -> None:
        """A request comes in."""
        self.number += 1
        self._place(tokens, stream, patience_s, self.now_s, frozenset(), only)

    def _place(
        self, tokens: int, stream: bool, patience_s: float, since_s: float, tried: frozenset[str], only: str | None
    ) -> None:
        try:
            lease = self.router.route(
                PlacementRequest(RequestSpec("m", stream=stream), "m", None, str(self.number), body_tokens=tokens),
                self.now_s,
                exclude=tried,
                only=only,
            )
        except NoReplicaReady:
            self.ended["nowhere"] += 1
            return
        self.sent[lease.replica] += 1
        engine = self.engines[lease.replica]
        work = tokens + engine.floor_s * engine.speed
        engine.waiting.append(Request(lease, tokens, stream, patience_s, since_s, work, engine.decode_s, tried))

    def run(self, for_s: float, *, every_s: float = 0.0, tokens: int = 1_000, **how: float | bool) -> None:
        """Let time pass, with a request every so often."""
        due_s = self.now_s
        end_s = self.now_s + for_s
        while self.now_s < end_s - 1e-9:
            while every_s and due_s <= self.now_s:
                self.send(tokens, **how)  # type: ignore[arg-type]
                due_s += every_s
            self._step()

    def _step(self) -> None:
        self.now_s += STEP_S
        self.steps += 1
        for id_, engine in self.engines.items():
            self._work(engine)
            self._leave(engine)
            if self._each(PIECES_S) and not engine.hung and any(r.stream for r in engine.decoding):
                self.router.observations.alive(id_, self.now_s)
            if self._each(PROBE_S) and engine.counters:
                self.router.observations.observe_load(id_, Load(generation_tokens_total=engine.tokens), self.now_s)
        if self._each(LOOK_S):
            for id_ in [id_ for found in self.router.scan_for_stalls(self.now_s) for id_ in found]:
                self._move(id_)

    def _each(self, every_s: float) -> bool:
        return self.steps % round(every_s / STEP_S) == 0

    def _work(self, engine: Engine) -> None:
        if engine.hung:
            return
        budget = engine.speed * STEP_S
        while engine.waiting and budget > 0 and len(engine.decoding) < engine.seats:
            head = engine.waiting[0]
            done = min(budget, head.work)
            head.work -= done
            budget -= done
            if head.work > 1e-6:
                break
            engine.waiting.popleft()
            engine.decoding.append(head)
            if head.stream:
                self.router.first_token(head.lease, self.now_s)
        engine.tokens += len(engine.decoding)
        for request in list(engine.decoding):
            request.decode_s -= STEP_S
            if request.decode_s <= 0:
                engine.decoding.remove(request)
                self._end(request, Outcome(EndReason.OK, Usage(request.tokens, 20, 0)))

    def _end(self, request: Request, outcome: Outcome) -> None:
        self.router.finish(request.lease, outcome, self.now_s)
        self.ended[outcome.ending.value] += 1

    def _leave(self, engine: Engine) -> None:
        for request in [r for r in engine.waiting if self.now_s - r.since_s > r.patience_s]:
            engine.waiting.remove(request)
            self._end(request, Outcome(EndReason.CLIENT_LEFT))

    def _move(self, id_: str) -> None:
        engine = self.engines[id_]
        begun = [r for r in engine.decoding if r.stream]
        silent = [*engine.waiting, *(r for r in engine.decoding if not r.stream)]
        engine.waiting.clear()
        engine.decoding = begun
        for request in silent:
            self.router.finish(request.lease, Outcome(EndReason.FAILED), self.now_s)
            self.moved += 1
            if request.tried:
                self.ended["failed twice"] += 1
                continue
            self._place(request.tokens, request.stream, request.patience_s, request.since_s, frozenset({id_}), None)
