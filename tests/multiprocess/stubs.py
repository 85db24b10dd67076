"""A hub of few parts: the real Router behind the real server, with replicas that are ready because we say so."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.config.schema import AuthSettings, ListenSettings, Settings
from router.control.local_placement import LocalPlacementService
from router.core.admission.concurrency_windows import AdmissionLimits
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.misses import Template
from router.core.types.replicas import Replica, ServedModel
from router.multiprocess.control_server import ControlServer
from router.multiprocess.remote_placement import RemotePlacementService
from router.placement_api import Frontends, HttpPage, NullFrontends, RequestPrincipal
from router.telemetry.record import RequestRecord
from tests.compiled import COMPILED


class StubPlacer(LocalPlacementService):
    """Waits for an event as long as the test says."""

    slow = False

    def events_pending(self, _: PlacementRequest) -> bool:
        """Whatever is wanted."""
        return self.slow


class StubHub:
    """Everything ControlServer needs; what it heard is in its fields."""

    def __init__(
        self,
        *replicas: str,
        models: tuple[str, ...] = ("m",),
        policy: str = "warm",
        limits: AdmissionLimits | None = None,
        private: bool = False,
        response_ids_max: int = 100,
    ) -> None:
        self.router = Router(POLICIES[policy](), index_bytes_max=1 << 20, memory_max=1_000, blocks_max_default=1_000)
        self.records: list[RequestRecord] = []
        self.failures: list[tuple[str, str]] = []
        self.edges: Frontends = NullFrontends()
        self._told: list[tuple[str, Template]] = []
        kind = LocalPlacementService if COMPILED else StubPlacer
        self.placer = self.stub = kind(
            self.router,
            clock=time.monotonic,
            event_wait_s=1e9,
            response_ids_max=response_ids_max,
            private_responses=private,
            observe=self.observe,
            failed=lambda replica, kind: self.failures.append((replica, kind)),
            refused=lambda replica: self.ready(replica, ok=False),
            page=self.page,
            limits=limits,
        )
        self.router.replace(Replica(id_) for id_ in replicas)
        for id_ in replicas:
            self.router.observe_models(id_, [ServedModel(name, owned_by=f"kind of {id_}") for name in models])
            self.ready(id_)

    def ready(self, id_: str, ok: bool = True) -> None:
        """Its health, by proof."""
        self.router.observe_health(id_, ok, "said so", proof=True)
        self.router.observe_health(id_, ok, "said so", proof=True)

    @property
    def open(self) -> int:
        """Leases, all replicas together."""
        return sum(len(member.leases) for member in self.router.fleet.members.values())

    def observe(self, record: RequestRecord) -> None:
        """Remember it."""
        self.records.append(record)

    @property
    def counts(self) -> Mapping[str, int]:
        """What workers have counted."""
        return self.edges.counters()

    @property
    def told(self) -> list[tuple[str, Template]]:
        """Templates that workers have told of so far, by who said so."""
        heard = self.edges.templates().items()
        self._told.extend((source, template) for source, templates in heard for template in templates)
        return self._told

    async def page(self, path: str, owner: RequestPrincipal | None = None, accept: str = "") -> HttpPage | None:
        """One page, which says its own path, of the type that is asked for."""
        return HttpPage(200, accept or "text/plain", path.encode()) if path == "/readyz" else None


def bound(path: Path) -> socket.socket:
    """A unix socket that listens, as the supervisor hands it down."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(16)
    listening.setblocking(False)
    return listening


@asynccontextmanager
async def serving(hub: StubHub, path: Path, **more: Any) -> AsyncIterator[ControlServer]:
    """The hub's server on this path, until the block ends."""
    with bound(path) as listening:
        async with ControlServer(hub, listening, ids=False, **more) as server:
            hub.edges = server
            yield server


class StubEdge:
    """Counts and tells what the test says, and remembers what it hears as (what, replica)."""

    def __init__(self, changed: Callable[[], list[Template]] = list) -> None:
        self.heard: list[tuple[str, str]] = []
        self.in_flight = 0
        self._changed = changed

    def counters(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def templates(self) -> Mapping[str, list[Template]]:
        """What has changed, by the test."""
        return {"": self._changed()}

    def on_replica_unreachable(self, replica: str) -> None:
        """Remember it."""
        self.heard.append(("lost", replica))

    def on_replica_removed(self, replica: str) -> None:
        """Remember it."""
        self.heard.append(("left", replica))

    def on_replica_stalled(self, replica: str) -> None:
        """Remember it."""
        self.heard.append(("stuck", replica))

    def on_replicas_progress(self, moving: Sequence[str], uncounted: Sequence[str]) -> None:
        """Remember them."""
        self.heard += [("moving", replica) for replica in moving]
        self.heard += [("uncounted", replica) for replica in uncounted]

    def on_replica_ready(self, replica: str) -> None:
        """Remember it."""
        self.heard.append(("ready", replica))


def worker(
    path: Path,
    number: int = 0,
    *,
    timeout_s: float = 60.0,
    private: bool = False,
    workers: int = 1,
    edge: Frontends | None = None,
    **more: Any,
) -> RemotePlacementService:
    """A worker's placer."""
    auth = AuthSettings(keys_file="keys" if private else "")
    settings = Settings(listen=ListenSettings(hub_timeout_s=timeout_s, workers=workers), auth=auth)
    placer = RemotePlacementService(str(path), number, settings, **{"figures": dict} | more)
    placer.serve(edge or StubEdge())
    return placer


async def until(true: Callable[[], object]) -> None:
    """Return when it is true; a test that waits for ever fails by its own time limit."""
    while not true():
        await asyncio.sleep(0.001)
