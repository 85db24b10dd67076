"""What routers share besides the core: tenants' rates, evidence of dead replicas, owners of stored responses.

The hub gives what each of these is about; the link brings and takes the messages.
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

REPLICAS_LOOK_S = 1.0  # between two looks for the replicas by which this router's fleet is known
SERVED_EVERY = 40  # messages to one that has them though none has changed: one may have been lost
LOOK_S = 0.1  # between two looks at the whole fleet for replicas that were found dead


class FoundDead(Protocol):
    """The Router, as far as evidence goes."""

    def found_dead(self) -> list[str]:
        """Replicas that this router has found dead itself."""

    def told_dead(self, id_: str, why: str, now_s: float) -> bool:
        """Others have found a replica dead."""


class ReportedOwners(Protocol):
    """Owners of stored responses (hub/owners.py)."""

    def report(self, response_id: str, replica: str, tenant: str) -> None:
        """Another router has said this."""

    def known(self) -> list[str]:
        """All ids that are remembered."""

    def made(self, response_id: str) -> tuple[str, str] | None:
        """The replica and the tenant of a response; None if it is not remembered."""


class SharedThings:
    """Puts into messages what others are to know, and takes in what they say."""

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
        """`served` is (id, base model) of each replica, with each of its models."""
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
        """Numbers of this router's replicas, each with a model: another fleet may have the same addresses."""
        now_s = self._clock()
        if not self._served or now_s - self._served_s >= REPLICAS_LOOK_S:
            self._served_s = now_s
            served = frozenset(number_of(f"{id_}\n{model}") for id_, model in self._models_of())
            if served != self._served:
                self._served = served
        return self._served

    def add_to(self, frame: Frame, *, everything: bool) -> None:
        """Rates and evidence; owners come from the link, which has them from requests."""
        frame.spent = self.tenants.say(everything=everything)
        frame.dead = sorted(self._found())[:DEAD_MAX]
        self._since_served += 1
        if everything or self._served is not self._served_told or self._since_served >= SERVED_EVERY:
            frame.replicas = numbers_of(self._served)
            self._served_told, self._since_served = self._served, 0

    def hear(self, origin: int, frame: Frame, *, leaving: bool) -> None:
        """Take in what another router says."""
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
        """Take owners that were read from the store."""
        for response_id, replica, tenant in owners:
            self._owners.report(response_id, replica, tenant)

    def known(self) -> list[str]:
        """Ids of all stored responses whose owners are known."""
        return self._owners.known()

    def owner(self, response_id: str) -> Written | None:
        """The entry of one; None if it is not known any more."""
        made = self._owners.made(response_id)
        return None if made is None else (response_id, *made)

    def silent(self, origin: int, *, left: bool) -> None:
        """A router is not heard any more."""
        self._deaths.forget(origin)
        self.tenants.silent(origin, left=left)

    def alone(self) -> None:
        """Nobody is heard."""
        self.tenants.alone()

    def together(self) -> None:
        """The others are heard again."""
        self.tenants.together()

    def tick(self) -> None:
        """A second has passed."""
        self.tenants.tick()
        self._deaths.agreed(self._found(), self._clock())

    def _found(self) -> frozenset[str]:
        """What this router has found dead, a tenth of a second ago at most: the whole fleet is looked at for it."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._dead = now_s, frozenset(self._replicas.found_dead())
        return self._dead
