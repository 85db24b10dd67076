"""Links of several routers to one store, without routers: what each hears is kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from router.core.admission.rate_limits import Rates, TenantRateLimits
from router.peering.clients import TlsFiles
from router.peering.message_auth import Seals
from router.peering.message_receiver import PeerReceiver
from router.peering.peer_link import LinkLimits, PeerChannel
from router.peering.peers import PeerRegistry
from router.peering.redis_store import open_session
from router.peering.shared_state import SharedState
from router.peering.store_clock import StoreClock
from router.peering.store_url import parse_address

_origins = count(1_000)


@dataclass
class CoreStandIn:
    """The core's side: says what it is given, keeps what it hears."""

    to_say: list[bytes | None] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)
    restored: list[bytes] = field(default_factory=list)  # states of others
    begun: list[str] = field(default_factory=list)  # routers of which the first message was read
    forgotten: list[str] = field(default_factory=list)
    own_state: bytes = b"state"
    was_alone: int = 0
    asked: int = 0
    left: Callable[[], None] = lambda: None  # called within `say` where something is left to say

    def say(self, now_s: float) -> bytes | None:
        """The next of what it was given."""
        self.asked += 1
        said = self.to_say.pop(0) if self.to_say else None
        if said is not None and self.to_say:
            self.left()
        return said

    def state(self, now_s: float) -> bytes:
        """Its state."""
        return self.own_state

    def begin(self, name: str) -> None:
        """Keep who begins."""
        self.begun.append(name)

    def restore(self, name: str, state: bytes, clock_s: float, now_s: float) -> Iterator[None]:
        """Keep it, in two steps. Raises ValueError for one that says `bad`."""
        yield
        if state == b"bad":
            raise ValueError("a bad state")
        self.restored.append(state)

    def forget(self, name: str, now_s: float) -> None:
        """Keep who is forgotten."""
        self.forgotten.append(name)

    def hear(self, name: str, message: bytes, clock_s: float, now_s: float) -> None:
        """Keep it. Raises ValueError for one that says `bad`."""
        if message == b"bad":
            raise ValueError("a bad message")
        self.heard.append(message)

    def tick(self, now_s: float) -> None:
        """Nothing is left to do."""

    def on_disconnected(self, now_s: float) -> None:
        """Count it."""
        self.was_alone += 1


@dataclass
class FleetStandIn:
    """A router as far as evidence goes."""

    dead: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def found_dead(self) -> list[str]:
        """Replicas that it has found dead itself."""
        return self.dead

    def apply_peer_evidence(self, id_: str, why: str, now_s: float) -> bool:
        """Keep which it was told of."""
        self.told.append(id_)
        return True


class OneRouter:
    """A router's link, and what is behind it."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        fleet: str,
        timeout_s: float,
        tls: TlsFiles,
        owners_max: int,
        peers_max: int,
        secrets: Sequence[bytes],
    ) -> None:
        self.core, self.fleet, self.quotas = CoreStandIn(), FleetStandIn(), TenantRateLimits()
        self.owners: dict[str, tuple[str, str]] = {}
        self.served: list[tuple[str, str]] = []  # id and base model of each replica
        self.wall_s = 0.0  # how much its wall clock is late
        self.seals = Seals(fleet, secrets, time.monotonic)
        self.things = SharedState(self.quotas, self.fleet, self, routers_assumed=2, served=lambda: self.served)
        self.link = PeerChannel(
            lambda: open_session(parse_address(url), fleet, timeout_s, tls),
            self.core,
            self.things,
            name=name,
            origin=next(_origins),
            limits=LinkLimits(owners_max, peers_max),
            seals=self.seals,
            wall=lambda: time.time() - self.wall_s,
        )

    def report(self, response_id: str, replica: str, tenant: str) -> None:
        """Another router has said this."""
        self.owners[response_id] = (replica, tenant)

    def ids(self) -> list[str]:
        """Ids of all that is known, but for what this router itself has made."""
        return list(self.owners)

    def owner_entry(self, response_id: str) -> tuple[str, str] | None:
        """The replica and the tenant of a response."""
        return self.owners.get(response_id)


@asynccontextmanager
async def linked(
    url: str,
    name: str,
    *,
    fleet: str = "f",
    timeout_s: float = 5.0,
    tls: TlsFiles = TlsFiles(),  # noqa: B008 - frozen
    tenants: dict[str, Rates] | None = None,
    owners_max: int = 1_000,
    peers_max: int = 64,
    secrets: Sequence[bytes] = (),
    before: Callable[[OneRouter], None] = lambda _: None,
) -> AsyncIterator[OneRouter]:
    """A router's link, until the block ends."""
    one = OneRouter(
        url,
        name,
        fleet=fleet,
        timeout_s=timeout_s,
        tls=tls,
        owners_max=owners_max,
        peers_max=peers_max,
        secrets=secrets,
    )
    one.quotas.configure(tenants or {})
    before(one)
    one.link.start()
    try:
        yield one
    finally:
        await one.link.close()


def receiver(seals: Seals, counts: Counter[str], *, peers: PeerRegistry | None = None, origin: int = 1) -> PeerReceiver:
    """What receives the messages of a router `a`, without a store; other data than the core's is not expected."""
    registry = peers or PeerRegistry("a", origin, 8)
    return PeerReceiver(registry, CoreStandIn(), None, counts, origin, seals, StoreClock(), time.time)  # type: ignore[arg-type]  # not asked
