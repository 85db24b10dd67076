"""A fleet whose engines say how busy they are."""

from __future__ import annotations

from typing import Any

from router.control.local_placement import LocalPlacementService
from router.core.admission.queue import Ticket
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.replicas import Load
from router.core.types.requests import Priority, RequestSpec
from tests.core.admission.overload import placer_of
from tests.core.placement.placing import MODEL, World

OK = Outcome(EndReason.OK, Usage(10, 10))


def want(
    tenant: str = "", priority: Priority = Priority.NORMAL, size: int = 1, model: str | None = MODEL, **more: Any
) -> PlacementRequest:
    """A small request."""
    ask = RequestSpec(model, stream=True)
    return PlacementRequest(
        ask, model, None, "k", body_tokens=10, tenant=tenant, priority=priority, body_bytes=size, **more
    )


def asked(placer: LocalPlacementService, wanted: PlacementRequest, exclude: frozenset[str]) -> list[Any]:
    """A list that holds the answer to a request, or will: a lease, or the error that it was turned away with."""
    answers: list[Any] = []
    try:
        answer = placer.admission.admit(wanted, exclude, answers.append)
    except (Shed, NoReplicaReady) as error:
        answers.append(error)
    else:
        if not isinstance(answer, Ticket):
            answers.append(answer)
    return answers


class Fleet:
    """Requests of one fleet, and what was answered to them."""

    def __init__(self, replicas: str = "a", **limits: Any) -> None:
        self.world = World(replicas)
        self.placer = placer_of(self.world, **limits)
        self.admission = self.placer.admission

    def ask(self, *args: Any, exclude: frozenset[str] = frozenset(), **kwargs: Any) -> list[Any]:
        """A list that holds the answer, or will."""
        return asked(self.placer, want(*args, **kwargs), exclude)

    def load(self, replica: str, waiting: int | None, in_flight: int | None = None) -> None:
        """A probe, and what is made of it."""
        if in_flight is None:
            in_flight = len(self.world.router.fleet.members[replica].leases)
        self.world.router.observations.observe_load(replica, Load(waiting=waiting))
        self.world.router.fleet.members[replica].counters.in_flight_probed = in_flight
        self.admission.tick()

    def finish(self, lease: Lease, outcome: Outcome = OK) -> None:
        """The answer ends."""
        self.placer.finish(lease, outcome, self.world.now_s)
