"""Shared data that is not the core's: tenants' rates, evidence of dead replicas, owners of stored responses.

The hub provides the objects with this data; the link transports the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from router.core.admission.rates import Quotas
from router.core.sharing.engines import number_of
from router.sharing.deaths import DeathNotices
from router.sharing.frames import DEAD_MAX, Frame
from router.sharing.peers import numbers_of
from router.sharing.session import Written
from router.sharing.tenants import TenantsTogether

REPLICAS_LOOK_S = 1.0  # between two reads of the replicas by which this router's fleet is known
SERVED_EVERY = 40  # a message repeats unchanged replicas after this number of messages: one may have been lost
LOOK_S = 0.1  # between two scans of the whole fleet for replicas that were found dead


class FoundDead(Protocol):
    """The Router's interface for evidence."""

    def found_dead(self) -> list[str]:
        """Return the replicas that this router has found dead by its own requests."""

    def told_dead(self, id_: str, why: str, now_s: float) -> bool:
        """Record that other routers have found a replica dead."""


class ReportedOwners(Protocol):
    """Owners of stored responses (hub/owners.py)."""

    def report(self, response_id: str, replica: str, tenant: str) -> None:
        """Store another router's report of an owner."""

    def known(self) -> list[str]:
        """Return all known ids."""

    def made(self, response_id: str) -> tuple[str, str] | None:
        """Return the replica and the tenant of a response; None if it is not known."""


class SharedThings:
    """Adds shared data to messages, and processes it from messages of other routers."""

    def __init__(
        self,
        quotas: Quotas,
        replicas: FoundDead,
        owners: ReportedOwners,
        *,
        routers_assumed: int,
        served: Callable[[], Iterable[tuple[str, str]]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`served` returns (id, base model) for each replica and each of its models."""
        self._models_of = served
        self._replicas, self._owners, self._clock = replicas, owners, clock
        self.tenants = TenantsTogether(quotas, routers_assumed=routers_assumed, clock=clock)
        self._deaths = DeathNotices()
        self._dead: frozenset[str] = frozenset()  # found by this router
        self._looked_s = float("-inf")
        self._served: frozenset[int] = frozenset()
        self._served_s = float("-inf")
        self._served_told: frozenset[int] = frozenset()
        self._since_served = 0  # messages since the last one that had them

    def replicas(self) -> frozenset[int]:
        """Return the numbers of this router's replicas, each with a model: another fleet may have the same
        addresses."""
        now_s = self._clock()
        if not self._served or now_s - self._served_s >= REPLICAS_LOOK_S:
            self._served_s = now_s
            served = frozenset(number_of(f"{id_}\n{model}") for id_, model in self._models_of())
            if served != self._served:
                self._served = served
        return self._served

    def add_to(self, frame: Frame, *, everything: bool) -> None:
        """Add rates and evidence. Owners come from the link, which has them from requests."""
        frame.spent = self.tenants.say(everything=everything)
        frame.dead = sorted(self._found())[:DEAD_MAX]
        self._since_served += 1
        if everything or self._served is not self._served_told or self._since_served >= SERVED_EVERY:
            frame.replicas = numbers_of(self._served)
            self._served_told, self._since_served = self._served, 0

    def hear(self, origin: int, frame: Frame, *, leaving: bool) -> None:
        """Process a message of another router."""
        now_s = self._clock()
        for response_id, replica, tenant in frame.owners:
            self._owners.report(response_id, replica, tenant)
        if leaving:
            return
        self.tenants.hear(origin, frame.spent)
        self._deaths.hear(origin, frame.dead, now_s)
        if frame.dead:
            for replica, count in self._deaths.agreed(self._found(), now_s):
                self._replicas.told_dead(replica, f"{count} other routers found it dead", now_s)

    def own(self, owners: Sequence[Written]) -> None:
        """Store owners that were read from the store."""
        for response_id, replica, tenant in owners:
            self._owners.report(response_id, replica, tenant)

    def known(self) -> list[str]:
        """Return the ids of all stored responses with known owners."""
        return self._owners.known()

    def owner(self, response_id: str) -> Written | None:
        """Return the entry of a response; None if it is no longer known."""
        made = self._owners.made(response_id)
        return None if made is None else (response_id, *made)

    def silent(self, origin: int, *, left: bool) -> None:
        """Forget a router that is silent."""
        self._deaths.forget(origin)
        self.tenants.silent(origin, left=left)

    def alone(self) -> None:
        """Handle a link that is no longer whole."""
        self.tenants.alone()

    def together(self) -> None:
        """Handle a link that is whole again."""
        self.tenants.together()

    def tick(self) -> None:
        """Run the work of each second."""
        self.tenants.tick()
        self._deaths.agreed(self._found(), self._clock())

    def _found(self) -> frozenset[str]:
        """Return the replicas that this router has found dead. The result is at most a tenth of a second old, because
        it needs a scan of the whole fleet."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._dead = now_s, frozenset(self._replicas.found_dead())
        return self._dead
