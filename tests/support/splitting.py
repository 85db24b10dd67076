"""A router that has every request go in two legs which may, over simulated engines: what calls both replicas is under
test, not what chooses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.peers import PeerLimits
from router.config.runtime import resolve
from router.config.schema import Settings
from router.control.control_plane import ControlPlane
from router.control.local_placement import LocalPlacementService
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import ExternalKv, Outcome
from router.core.types.replicas import address_of
from router.http.body_budget import BodyBudget
from router.ingress.context import IngressContext
from router.placement_api import PlacementService
from router.proxy.http_frontend import HttpFrontend
from router.router_server import FrontendGroup, RouterServer
from router.telemetry.request_record import RequestRecord
from tests.support import fakes
from tests.support.waiting import until

PROMPT = "a prompt that fills some blocks of sixteen tokens each " * 8
COMPLETIONS = "/v1/completions"
STOPPED_S = 1e9  # ahead of every engine's own time, by which blocks that have come are let go, too


class SplitPlacer:
    """Places as the control plane does, among the replicas that decode, and adds the first prefilling replica that is
    not excluded. What it does not do itself the control plane's placer does."""

    def __init__(
        self,
        inner: LocalPlacementService,
        handshake: KvConnector,
        prefill: Sequence[str],
        decode: Sequence[str],
        addresses: Mapping[str, str],
    ) -> None:
        self._inner = inner
        self._handshake = handshake
        self._prefill, self._decode = prefill, decode
        self._addresses = addresses
        self.legs: dict[int, str] = {}  # prefill legs that are open: lease -> replica
        self.placed: list[tuple[str, str]] = []  # (prefilling replica or "", decoding replica) of each placement
        self.ended: list[tuple[str, Outcome]] = []  # (prefilling replica, how its leg ended)
        self.failures: list[tuple[str, str]] = []  # (replica, kind)
        self.broken: list[tuple[str, str]] = []  # pairs (prefilling, decoding replica) that failed a request
        self.records: list[RequestRecord] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def place(self, wanted: PlacementRequest, exclude: frozenset[str]) -> Lease:
        """A lease on a decoding replica, with a prefill leg where the request may be split."""
        prefills = [replica for replica in self._prefill if replica not in exclude] if wanted.may_split else []
        wanted.allowed_addresses = frozenset(map(address_of, self._decode))
        lease = await self._inner.place(wanted, exclude)
        if prefills:
            address = self._addresses.get(prefills[0], "")
            leg = PrefillStage(prefills[0], self._handshake, address, 0, 0.0, 0.0, 0.0, lease=lease.id)
            lease.receipt.brought = ExternalKv(leg=leg)
            self.legs[lease.id] = prefills[0]
        self.placed.append((prefills[0] if prefills else "", lease.replica))
        return lease

    def finish_prefill(self, lease: Lease, outcome: Outcome, _now_s: float) -> None:
        """The prefill leg ended."""
        if (replica := self.legs.pop(lease.id, None)) is not None:
            self.ended.append((replica, outcome))

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """The lease ended, and with it a prefill leg that is still open."""
        self.legs.pop(lease.id, None)
        self._inner.finish(lease, outcome, now_s)

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """An attempt failed."""
        self.failures.append((replica, kind))
        self._inner.count_attempt_failure(replica, kind)

    def report_pair_failure(self, prefill: str, decode: str) -> None:
        """The blocks of a request did not come from one replica to the other."""
        self.broken.append((prefill, decode))

    def record_request(self, record: RequestRecord) -> None:
        """A request ended."""
        self.records.append(record)
        self._inner.record_request(record)


@asynccontextmanager
async def frontend(
    settings: Settings, placer: PlacementService, control: ControlPlane, group: FrontendGroup
) -> AsyncIterator[HttpFrontend]:
    """A frontend of this control plane, which places by another service."""
    async with IngressContext(resolve(settings), placer, control.prompts) as ingress:
        bodies = BodyBudget(asyncio.get_running_loop(), settings.limits.total_body_bytes_max)
        async with HttpFrontend(resolve(settings), placer, ingress, bodies) as http:
            group.attach(ingress, [http])
            yield http


@asynccontextmanager
async def splitting(
    handshake: KvConnector,
    prefill: Sequence[str],
    decode: Sequence[str],
    addresses: Mapping[str, str] | None = None,
    **overrides: Any,
) -> AsyncIterator[tuple[HttpFrontend, SplitPlacer, ControlPlane]]:
    """A frontend before these replicas, its placer, and its control plane, which has probed them once and splits
    nothing itself."""
    settings = fakes.settings(*prefill, *decode, disagg__kv_connector=handshake.value, **overrides)
    group = FrontendGroup()
    async with ControlPlane(resolve(fakes.settings(*prefill, *decode, **overrides)), group) as control:
        placer = SplitPlacer(control.placer, handshake, prefill, decode, addresses or {})
        async with frontend(settings, placer, control, group) as http:
            await control.probe_now()
            yield http, placer, control


def idle(http: HttpFrontend, placer: SplitPlacer, control: ControlPlane) -> bool:
    """Whether nothing is left open, anywhere."""
    members = control.router.fleet.members.values()
    open_ = http.proxy.in_flight or http.legs.open or placer.legs
    return not open_ and all(not m.leases and m.work.kv.blocks == m.work.kv.own_tokens == 0 for m in members)


@dataclass
class Fleet:
    """Engines, and a router before them: the first `prefills` of them prefill, the others decode."""

    engines: Engines
    http: HttpFrontend
    placer: SplitPlacer
    control: ControlPlane
    prefills: int
    kills: list[asyncio.Task[None]] = field(default_factory=list)  # deaths of engines that are under way

    @property
    def prefill(self) -> list[str]:
        """Replicas that prefill."""
        return self.engines.urls[: self.prefills]

    @property
    def decode(self) -> list[str]:
        """Replicas that decode."""
        return self.engines.urls[self.prefills :]

    async def idle(self) -> None:
        """Return when nothing is open, at the router or at any engine."""
        await until(lambda: idle(self.http, self.placer, self.control))
        await until(lambda: not any(link.waiting for link in self.engines.links if not link.gone))

    def fetched(self) -> int:
        """How many prompts' blocks were handed over."""
        return sum(link.legs.fetched for link in self.engines.links)


@asynccontextmanager
async def fleet(
    handshake: KvConnector, prefills: int = 1, decodes: int = 1, time_scale: float = 10.0, **overrides: Any
) -> AsyncIterator[Fleet]:
    """So many simulated engines, in whose life `time_scale` seconds take one."""
    settings = EngineSettings(
        replicas=prefills + decodes,
        port=0,
        time_scale=time_scale,
        handshake=handshake,
        prefills=prefills,
        peers=PeerLimits(1e-3, 1e-6) if handshake is KvConnector.OFFLOADING else None,
    )
    async with Engines(settings) as engines:
        addresses = dict(zip(engines.urls, engines.addresses, strict=False))
        if handshake is KvConnector.MOONCAKE:
            ids = [f"#{link.engine_id}" for link in engines.links]
            addresses = {url: addresses[url] + id_ for url, id_ in zip(engines.urls, ids, strict=True)}
        legs = (engines.urls[:prefills], engines.urls[prefills:])
        async with splitting(handshake, *legs, addresses, **overrides) as (http, placer, control):
            yield Fleet(engines, http, placer, control, prefills)


def stop_clocks(engines: Engines) -> None:
    """Engines wait for each other, and keep blocks, however long a busy machine takes; transfers take no time."""
    for link in engines.links:
        link.clock, link.legs.limits = lambda: STOPPED_S, PeerLimits(0.0, 0.0)


async def ask(url: str, **fields: Any) -> tuple[int, str]:
    """(status, body) of a completion."""
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": 5, **fields}
    async with ClientSession() as client, client.post(url + COMPLETIONS, json=body) as response:
        return response.status, await response.text()


@asynccontextmanager
async def hub_fleet(
    handshake: KvConnector, decodes: int = 2, prefills: int = 1, **overrides: Any
) -> AsyncIterator[tuple[Engines, RouterServer]]:
    """So many replicas that prefill and that decode, and a router that may have them do so."""
    settings = EngineSettings(
        replicas=prefills + decodes,
        port=0,
        time_scale=20.0,
        handshake=handshake,
        prefills=prefills,
        peers=PeerLimits(1e-3, 1e-6),
    )
    async with Engines(settings) as engines:
        stop_clocks(engines)
        named = [f"{url}={address}" for url, address in zip(engines.urls, engines.addresses, strict=False)]
        split = {
            "disagg__kv_connector": handshake.value,
            "disagg__prefill": tuple(engines.urls[:prefills]),
            "disagg__decode": tuple(engines.urls[prefills:]),
            "disagg__endpoints": () if handshake is KvConnector.NIXL else tuple(named),
            "p2p__gb_per_s": 1_000.0,
            "events__enabled": False,
        }
        async with RouterServer(resolve(fakes.settings(*engines.urls, **{**split, **overrides}))) as app:
            await app.control.probe_now()
            yield engines, app


def warm_pairs(app: RouterServer) -> int:
    """How many pairs take traffic."""
    return sum(pair.warm for pair in app.router.disaggregator.pairs._pairs.values())
