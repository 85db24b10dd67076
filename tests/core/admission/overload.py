"""Replicas with so many places, a router before them, and clients that come at random: in simulated seconds.

A replica works on `SLOTS` requests at once and lets the others wait, first in first out; a first token takes FIRST_S
from the moment of its slot, an answer about ANSWER_S. Its counts are read every second, as from a metrics page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from router.config.schema import AdmissionSettings
from router.control.admission_controller import AdmissionController
from router.control.local_placement import LocalPlacementService
from router.control.response_owners import ResponseOwners
from router.core.admission.hold_back import TICK_S
from router.core.admission.queue import Ticket
from router.core.admission.rate_limits import Rates
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.replicas import Load
from router.core.types.requests import Priority, RequestSpec
from router.placement_api import HttpPage
from tests.core.placement.paired import PairedFleet
from tests.core.placement.placing import MODEL, World

SLOTS = 64
FIRST_S = 0.1
ANSWER_S = 1.0
TOKENS = 100  # of a prompt, and of its answer


@dataclass
class Served:
    """What one kind of client saw."""

    ttft_s: list[float] = field(default_factory=list)
    shed_after_s: list[float] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)
    retry_after_s: list[float] = field(default_factory=list)
    errors: int = 0  # of any other kind
    finished: int = 0

    def ttft_p(self, part: float) -> float:
        """A quantile of times to first token."""
        return sorted(self.ttft_s)[int(part * (len(self.ttft_s) - 1))]


async def _no_page(*_: object) -> HttpPage | None:
    return None


def placer_of(world: World | PairedFleet, **limits: Any) -> LocalPlacementService:
    """Places in that world."""
    settings, owners = AdmissionSettings(**limits), ResponseOwners(10)

    def clock() -> float:
        return world.now_s

    admission = AdmissionController(world.router, owners, settings, stale_s=3.0, clock=clock, shed=lambda *_: None)
    return LocalPlacementService(
        world.router,
        admission,
        owners,
        clock=clock,
        event_wait_s=0.0,
        observe=lambda _: None,
        failed=lambda *_: None,
        refused=lambda _: None,
        page=_no_page,
    )


class Overload:
    """Everything happens inside `run`."""

    def __init__(self, replicas: str = "ab", *, rates: Mapping[str, Rates] | None = None, **limits: Any) -> None:
        self.world = World(replicas)
        self.random = Random(7)
        self.placer = placer_of(self.world, **limits)
        self.placer.admission.set_tenants(rates or {})
        self.clients: dict[str, Served] = {}
        self.queued_max = 0
        self.metrics = True  # replicas have a metrics page
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._running = dict.fromkeys(replicas, 0)
        self._waiting: dict[str, deque[Callable[[], None]]] = {id_: deque() for id_ in replicas}

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        """It happens then."""
        heappush(self._agenda, (at_s, next(self._numbers), do))

    def clients_come(
        self, kind: str, per_s: float, from_s: float, until_s: float, *, tenant: str = "", priority: int = 1
    ) -> None:
        """At random moments, so many a second, between two times from now."""
        now_s = self.world.now_s
        self.clients.setdefault(kind, Served())
        at_s = now_s + from_s
        while (at_s := at_s + self.random.expovariate(per_s)) < now_s + until_s:
            self.at(at_s, lambda: self._come(kind, tenant, Priority(priority)))

    def run(self, for_s: float) -> None:
        """Let that time go by."""
        world, until_s = self.world, self.world.now_s + for_s
        self._probe()
        self.placer.admission.tick()
        self._every(1.0, self._probe)
        self._every(TICK_S, self.placer.admission.tick)
        while self._agenda and self._agenda[0][0] <= until_s:
            world.now_s, _, do = heappop(self._agenda)
            do()
        world.now_s = until_s

    def _every(self, period_s: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.at(self.world.now_s + period_s, again)

        self.at(self.world.now_s + period_s, again)

    def _probe(self) -> None:
        for id_, running in self._running.items():
            known = Load(running=running, waiting=len(self._waiting[id_])) if self.metrics else Load()
            self.world.router.observations.observe_load(id_, known)

    def _come(self, kind: str, tenant: str, priority: Priority) -> None:
        came_s, seen = self.world.now_s, self.clients[kind]
        wanted = PlacementRequest(
            RequestSpec(MODEL, stream=True), MODEL, None, str(next(self._numbers)), body_tokens=TOKENS
        )
        wanted.tenant, wanted.priority, wanted.body_bytes = tenant, priority, 400

        def answered(answer: Lease | Exception) -> None:
            if isinstance(answer, Lease):
                self._send(answer, seen, came_s)
            elif isinstance(answer, Shed):
                seen.shed_after_s.append(self.world.now_s - came_s)
                seen.codes.add(answer.code)
                seen.retry_after_s.append(answer.retry_after_s)
            else:
                seen.errors += 1

        try:
            answer = self.placer.admission.admit(wanted, frozenset(), answered)
        except Exception as error:
            answered(error)
        else:
            if not isinstance(answer, Ticket):
                answered(answer)
        queued, _ = self.placer.admission.count_queued()
        self.queued_max = max(self.queued_max, sum(queued.values()))

    def _send(self, lease: Lease, seen: Served, came_s: float) -> None:
        id_ = lease.replica

        def first() -> None:
            seen.ttft_s.append(self.world.now_s - came_s)
            self.placer.first_token(lease, self.world.now_s)

        def end() -> None:
            seen.finished += 1
            self._running[id_] -= 1
            if self._waiting[id_]:
                self._waiting[id_].popleft()()
            self.placer.finish(lease, Outcome(EndReason.OK, Usage(TOKENS, TOKENS)), self.world.now_s)

        def begin() -> None:
            self._running[id_] += 1
            self.at(self.world.now_s + FIRST_S, first)
            self.at(self.world.now_s + ANSWER_S * self.random.uniform(0.5, 1.5), end)

        if self._running[id_] < SLOTS:
            begin()
        else:
            self._waiting[id_].append(begin)
