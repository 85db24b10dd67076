"""Shared data that is not the core's: tenants' rates, evidence of dead replicas, owners of stored responses.

The control plane provides the objects with this data; the link transports the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from router.core.admission.rate_limits import TenantRateLimits
from router.core.peer_sync.cache_epochs import number_of
from router.peering.dead_replicas import DeadReplicaConsensus
from router.peering.frames import DEAD_MAX, PeerFrame
from router.peering.peers import numbers_of
from router.peering.session import ResponseOwnerEntry
from router.peering.tenant_rates import DistributedRateLimiter

REPLICAS_LOOK_S = 1.0  # between two reads of the replicas by which this router's fleet is known
SERVED_EVERY = 40  # a message repeats unchanged replicas after this number of messages
LOOK_S = 0.1  # between two scans of the whole fleet for replicas that were found dead


class DeathEvidenceSource(Protocol):
    """Evidence of dead replicas (core/fleet/eligibility.py)."""

    def found_dead(self) -> list[str]:
        """Return the replicas that this router has found dead by its own requests."""

    def apply_peer_evidence(self, id_: str, why: str, now_s: float) -> bool:
        """Record that other routers have found a replica dead."""


class ReportedOwners(Protocol):
    """Owners of stored responses (control/response_owners.py)."""

    def report(self, response_id: str, replica: str, tenant: str) -> None:
        """Store another router's report of an owner."""

    def ids(self) -> list[str]:
        """Return all known ids."""

    def owner_entry(self, response_id: str) -> tuple[str, str] | None:
        """Return the replica and the tenant of a response; None if it is not known."""


class SharedState:
    """Adds shared data to messages, and processes it from messages of other routers."""

    def __init__(
        self,
        quotas: TenantRateLimits,
        replicas: DeathEvidenceSource,
        owners: ReportedOwners,
        *,
        routers_assumed: int,
        served: Callable[[], Iterable[tuple[str, str]]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`served` returns (id, base model) for each replica and each of its models."""
        self._models_of = served
        self._replicas, self._owners, self._clock = replicas, owners, clock
        self.tenants = DistributedRateLimiter(quotas, routers_assumed=routers_assumed, clock=clock)
        self._deaths = DeadReplicaConsensus()
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

    def fill_frame(self, frame: PeerFrame, *, everything: bool) -> None:
        """Add rates and evidence."""
        frame.spent = self.tenants.say(everything=everything)
        frame.dead = sorted(self._find_dead_replicas())[:DEAD_MAX]
        self._since_served += 1
        if everything or self._served is not self._served_told or self._since_served >= SERVED_EVERY:
            frame.replicas = numbers_of(self._served)
            self._served_told, self._since_served = self._served, 0

    def hear(self, origin: int, frame: PeerFrame) -> None:
        """Process a message or the state of another router."""
        now_s = self._clock()
        self.tenants.hear(origin, frame.spent)
        self._deaths.hear(origin, frame.dead, now_s)
        if frame.dead:
            for replica, count in self._deaths.confirmed(self._find_dead_replicas(), now_s):
                self._replicas.apply_peer_evidence(replica, f"{count} other routers reported it as unreachable", now_s)

    def load_owners(self, owners: Sequence[ResponseOwnerEntry]) -> None:
        """Store owners that were read from the store."""
        for response_id, replica, tenant in owners:
            self._owners.report(response_id, replica, tenant)

    def list_response_ids(self) -> list[str]:
        """Return the ids of all stored responses with known owners."""
        return self._owners.ids()

    def owner(self, response_id: str) -> ResponseOwnerEntry | None:
        """Return the entry of a response; None if it is no longer known."""
        made = self._owners.owner_entry(response_id)
        return None if made is None else (response_id, *made)

    def on_peer_lost(self, origin: int, *, left: bool) -> None:
        """Forget a router that is silent."""
        self._deaths.forget(origin)
        self.tenants.silent(origin, left=left)

    def on_disconnected(self) -> None:
        """Handle a link that is no longer whole."""
        self.tenants.on_disconnected()

    def on_connected(self) -> None:
        """Handle a link that is whole again."""
        self.tenants.on_connected()

    def tick(self) -> None:
        """Run the work of each second."""
        self.tenants.tick()
        self._deaths.confirmed(self._find_dead_replicas(), self._clock())

    def _find_dead_replicas(self) -> frozenset[str]:
        """Return the replicas that this router has found dead. The result is at most a tenth of a second old, because
        it needs a scan of the whole fleet."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._dead = now_s, frozenset(self._replicas.found_dead())
        return self._dead
