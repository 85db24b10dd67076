"""Control plane: index, probes, events, metrics and admin pages, for all frontends (placement_api.py).

`_build` makes its parts, with the help of `wiring`; `replica_lifecycle` handles replicas that join and leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from router.admin.added_replicas import RuntimeReplicas
from router.admin.drain import DrainPage
from router.admin.listener import AdminListener
from router.admin.pages import Pages
from router.admin.prewarm_endpoint import PrewarmPage
from router.config import tls
from router.config.allowed_networks import parse_networks
from router.config.api_keys import Keys
from router.config.runtime import RuntimeConfig
from router.control import wiring
from router.control.local_placement import LocalPlacementService
from router.control.peer_routers import PeerSync
from router.control.readiness import Readiness
from router.control.replica_lifecycle import ReplicaLifecycle
from router.control.response_owners import ResponseOwners
from router.control.unshared import UnsharedRouters, router_name
from router.core.admission.hold_back import TICK_S
from router.engines.disagg_probes.kv_connectors import KvConnectorProber
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.metrics_page import MetricsPages
from router.engines.p2p_prober import P2pProber
from router.engines.ranks import RankExpander
from router.engines.replay_trigger import EventReplayTrigger
from router.eventloop import close_on_error, start_task
from router.peering.validation import is_shared
from router.placement_api import Frontends
from router.prewarm.sender import PromptSender
from router.telemetry.metrics import MetricSources
from router.telemetry.process_totals import ProcessTotals
from router.telemetry.request_record import RequestRecord
from router.tokenization.encoder import PromptEncoder, make_prompts
from router.tokenization.request_tokens import EngineTokenizer
from router.tokenization.verifier import TokenizerVerifier

log = logging.getLogger(__name__)

LOOK_S = 0.25  # interval of the checks for stalled replicas
LOOKS_A_CHECK = 4  # checks for stalled replicas per comparison of events with engines' counters
TOKENIZERS_S = 20.0  # longest wait for tokenizers to load; serving then begins without them


class ControlPlane:
    """Finds and probes replicas, and reports on `/readyz` if it can place requests. Use as `async with
    ControlPlane(config) as control`."""

    def __init__(self, config: RuntimeConfig, frontends: Frontends) -> None:
        """`frontends` place requests here, are notified of replica changes, and report their counters."""
        self._config = config
        self.settings = config.settings  # the settings in force
        self.frontends = frontends
        self.link: PeerSync | None = None  # None: no store is configured
        self.totals = ProcessTotals(frontends.counters)
        self.prompts: PromptEncoder | None = None  # None if events are off
        self.tls = config.replica_tls  # of all sessions for probes and pages; its certificates are renewed in place
        self.admin_url = ""
        self._sources = MetricSources(totals=self.totals)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with close_on_error(self._stack):
            self._build()
            if self.state is not None:
                self.state.events = self.events
                await self.state.load()
            if self.events is not None:
                await self._follow(self.events)
            self._stack.push_async_callback(self.lifecycle.close)
            self._task(self.lifecycle.follow(self.discoveries.watch()))
            await self._listen()
            self._share()
            if self.state is not None:
                self._stack.push_async_callback(self.state.close)
                self._task(self.state.watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _build(self) -> None:
        """Make all parts, in the order of their dependencies."""
        s = self.settings
        self.lifecycle = ReplicaLifecycle(self.frontends)
        self.router = wiring.make_router(s, self.lifecycle)
        parts = wiring.PartFactory(s, self.router, self.tls)
        self.metrics = parts.metrics(self._sources)
        self.replicas = wiring.make_replicas(s, self.router.fleet)  # named in the settings or added
        self.discoveries = wiring.make_discoveries(s, self.replicas)
        self._owners = ResponseOwners(s.limits.response_ids_max, private=bool(s.auth.keys_file))
        self.admission = parts.admission(self._owners, self.metrics.requests.count_shed)
        self.history = wiring.make_history(s, self._count_load)
        self._stack.push_async_callback(self.history.close)
        self.history.start()
        self.unshared = UnsharedRouters(s.peering, share=self._known_share, peers=self._peer_names)
        about, falls = self.unshared.status, self.lifecycle.count_grade_falls
        self.observatory = parts.observatory(self.metrics, self.history, self.admission, self._is_warming, falls, about)
        self._watch_replicas(parts)
        scale_from_zero = s.discovery.scale_from_zero
        self._readiness = Readiness(
            self.router.fleet, self.lifecycle.discovered, self.state, scale_from_zero=scale_from_zero
        )
        self.pages = self._make_pages()
        self.placer = self._make_placer()
        self._apply_keys(self._config)
        wiring.warn_if_unauthenticated(s)
        self._connect_sources()
        if self.observatory is not None:
            self._task(self.observatory.watch(self.frontends.templates))
        self._task(self.totals.stalls.watch())
        self._task(self.history.watch())
        self._task(self._check())
        self._task(self._admit())

    def _watch_replicas(self, parts: wiring.PartFactory) -> None:
        """Make the parts that watch replicas: probes, event streams, and what fills and restores caches."""
        s, router, tls_ = self.settings, self.router, self.tls
        sender = PromptSender(router, self.admission, clock=time.monotonic, api_key=self._engine_key, tls=tls_)
        released, requests = self.frontends.on_replica_ready, self.metrics.requests
        self.warmer = parts.warmer(sender, self.observatory, requests, released)
        self._stack.push_async_callback(self.warmer.close)
        self.metrics_pages = MetricsPages(s.probe, tls_)
        self._stack.push_async_callback(self.metrics_pages.close)
        self.prober = parts.prober(self.lifecycle, self.metrics_pages)
        self._stack.push_async_callback(self.prober.close)
        ranks = RankExpander(s.probe, self.metrics_pages, tls_)
        self._stack.push_async_callback(ranks.close)
        self.state = parts.snapshot_manager()
        self.events = parts.subscriber(self.state)
        self.lifecycle.connect(
            router,
            requests,
            prober=self.prober,
            ranks=ranks,
            warmer=self.warmer,
            events=self.events,
            peers=P2pProber(router.set_p2p_address, s.p2p) if s.events.enabled and s.tiers.enabled else None,
            hands=self._watch_pairs(parts),
        )

    def _watch_pairs(self, parts: wiring.PartFactory) -> KvConnectorProber | None:
        """Make the prober of KV connectors, and warm up pairs of replicas; None if disaggregated prefill is off."""
        disagg = self.settings.disagg
        if not disagg.kv_connector:
            return None
        prober = KvConnectorProber(self.router.disaggregator.set_connector, disagg, self.tls)
        self._stack.push_async_callback(prober.close)
        pairs = parts.pair_warmer(prober, self._engine_key)
        self._stack.push_async_callback(pairs.close)
        self._task(pairs.watch())
        return prober

    def _make_pages(self) -> Pages:
        """Make the pages that any client or operator may read."""
        return Pages(
            self.router,
            self.metrics,
            ready=self.ready,
            clock=time.monotonic,
            history=self.history,
            streams=partial(wiring.describe_event_stream, self.events),
            window=self.admission.window,
            added=self.replicas.is_added,
            warming=self.warmer.is_warming,
            engine_version=self.lifecycle.engine_version,
            discoveries=partial(wiring.describe_discoveries, self.discoveries),
            sharing=self._describe_link,
            unshared=self.unshared.explain,
            state=self._describe_state,
            look=self.prober.look,
        )

    def _make_placer(self) -> LocalPlacementService:
        """Make the placer for the frontends."""
        s = self.settings
        return LocalPlacementService(
            self.router,
            self.admission,
            self._owners,
            clock=time.monotonic,
            event_wait_s=s.events.pending_wait_s,
            observe=self.observe,
            failed=self.count_attempt_failure,
            refused=self.lifecycle.on_connection_refused,
            page=self.pages.page,
            pull_rest_s=s.p2p.cooldown_s,
            look=self.prober.look,
            reread=self.prober.reread,
        )

    def _connect_sources(self) -> None:
        """Connect the parts that exist to the metrics page. Others follow when they are made."""
        sources, admission = self._sources, self.admission
        sources.in_flight, sources.held = self._count_in_flight, admission.held_back
        sources.queued, sources.waiting = admission.count_queued, admission.count_waiting
        sources.tenants, sources.engine_version = admission.count_by_tenant, self.lifecycle.engine_version
        sources.discoveries = partial(wiring.describe_discoveries, self.discoveries)
        sources.history, sources.unshared = partial(wiring.count_history, self.history), self.unshared.explain
        if self.observatory is not None:
            sources.ledger = self.observatory.flush
        if self.events is not None:
            sources.streams = partial(wiring.count_event_streams, self.events)
        if self.state is not None:
            sources.state = self.state.figures

    async def _follow(self, events: EventStreamManager) -> None:
        """Load the tokenizers, for which the rest of the start waits. Then prepare to follow the events of replicas."""
        s = self.settings
        self.prompts = make_prompts(s)
        self._stack.callback(self.prompts.close)
        self._sources.prompts = self.prompts.counts
        asker = EngineTokenizer(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=self.tls)
        self._stack.push_async_callback(asker.close)
        self._task(TokenizerVerifier(self.router.models, self.prompts, asker, s.tokens).watch())
        try:  # a model hub may be slow, or behind a firewall that drops packets without an answer
            async with asyncio.timeout(TOKENIZERS_S):
                await self.prompts.prepare_all()
        except TimeoutError:
            log.warning(
                "tokenizers are still loading: until then prompts are placed by estimate",
                extra={"event": "tokenizers_late"},
            )
        await events.start()
        self._stack.push_async_callback(events.close)
        if s.events.request_full_reports:
            announcer = EventReplayTrigger(self.router.outcomes.unannounced, api_key=s.probe.api_key, tls=self.tls)
            self._stack.push_async_callback(announcer.close)
            self._task(announcer.watch())

    async def _listen(self) -> None:
        self.prewarm_page = PrewarmPage(self.router.fleet, self.warmer)
        self._additions = RuntimeReplicas(self.replicas, parse_networks(self.settings.admin.replicas_allowed))
        drains = DrainPage(self.discoveries)
        routes = [*self.pages.routes(), *self._additions.routes(), *drains.routes(), *self.prewarm_page.routes()]
        if self.observatory is not None:
            routes += self.observatory.routes()
        limits = wiring.admin_limits(self.settings)
        self.admin = AdminListener(routes, limits, token=self.admin_token, host=self.settings.listen.admin_host)
        self._sources.admin = self._count_admin_connections
        self._stack.push_async_callback(self.admin.close)
        self.admin_url = await self.admin.listen(self.settings.listen.admin_port)

    def _share(self) -> None:
        """Open the link to other routers, if a store is named. The name of this router has the admin listener's
        port."""
        port = urlsplit(self.admin_url).port or 0
        self.unshared.name = router_name(self.settings.peering, port)
        if is_shared(self.settings.peering):
            self.link = PeerSync(self, port)
            self.placer.share_responses(self.link)
            self._sources.sharing = self.link.figures
            self.link.start()
            self._stack.push_async_callback(self.link.close)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        self._stack.push_async_callback(start_task(work))

    async def _check(self) -> None:
        """Check for stalled replicas until cancelled. Every LOOKS_A_CHECK rounds, compare events and responses with
        engines' counters, and notify the frontends of replicas at work."""
        look, since_s = 0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            for found in self.router.scan_for_stalls(time.monotonic()):
                for replica in found:
                    self.frontends.on_replica_stalled(replica)
                await asyncio.sleep(0)  # replicas are checked a few at a time, so that requests are served in between
            look += 1
            if not look % LOOKS_A_CHECK:
                self.router.observations.check(time.monotonic())
                self.unshared.check(time.monotonic())
                self.metrics.check()
                self.lifecycle.check(time.monotonic())
                moving, uncounted = self.router.list_active(since_s)
                since_s = time.monotonic()
                if moving or uncounted:
                    self.frontends.on_replicas_progress(moving, uncounted)

    async def _admit(self) -> None:
        """Serve the queue until cancelled, for capacity that did not come from the end of a response."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.admission.tick()
            except Exception:  # a bug must not end the loop: requests would wait forever
                log.exception("bug: admission failed", extra={"event": "bug"})

    # -- notifications -------------------------------------------------------------------------------------------

    async def probe_now(self) -> None:
        """Probe every replica once, without waiting for the next round."""
        await self.lifecycle.probe_now()

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended. The frontend writes its log line."""
        self.metrics.observe(record)
        self.history.observe(record)
        if self.observatory is not None:
            self.observatory.observe(record)

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Count an attempt that failed. A replica that has left in the meantime no longer has a series."""
        there = self.router.fleet.member(replica) is not None
        self.metrics.requests.count_attempt_failure(replica if there else None, kind)

    def ready(self) -> bool:
        """True if requests should be sent to this router."""
        return self._readiness.is_ready()

    def drain(self) -> None:
        """Report on `/readyz` that the router accepts no further requests, and stop deferring requests."""
        self._readiness.drain()
        self.admission.release()

    @property
    def keys(self) -> Keys | None:
        """API keys, which identify tenants; None if the router requires no keys. Always replaced as one object."""
        return self._config.keys

    def admin_token(self) -> str:
        """Return the token of the admin pages; "": none."""
        return self._config.admin_token

    def _engine_key(self) -> str:
        """Return the API key for requests of the router's own to replicas."""
        return self._config.upstream_key or self.settings.probe.api_key

    def _is_warming(self, replica: str) -> bool:
        return self.warmer.is_warming(replica)

    def _describe_link(self) -> dict[str, Any] | None:
        return self.link.status() if self.link is not None else None

    def _known_share(self) -> float:
        return self.router.fleet.share

    def _peer_names(self) -> list[str]:
        return [name for name, _ in self.link.link.peers()] if self.link is not None else []

    def _describe_state(self) -> dict[str, Any] | None:
        return self.state.status() if self.state is not None else None

    def _count_in_flight(self) -> int:
        return self.frontends.in_flight

    def _count_load(self) -> tuple[int, int]:
        waiting, _ = self.admission.count_queued()
        return self.frontends.in_flight, sum(waiting.values())

    def _count_admin_connections(self) -> tuple[int, dict[str, int]]:
        return self.admin.server.connections, self.admin.server.closed

    def _apply_keys(self, config: RuntimeConfig) -> None:
        tenants = config.keys.tenants if config.keys is not None else {}
        self.metrics.requests.set_tenants(tenants, config.settings.auth.tenants_max)
        self.admission.set_tenants(tenants)
        if self.link is not None:
            self.link.take_keys(config.keys)

    def renew_tls(self, config: RuntimeConfig) -> None:
        """Use other certificates for new connections of probes. Raises OSError if no file descriptor is left, before
        anything has changed."""
        tls.renew(self.tls, config.settings.upstream)

    def apply(self, config: RuntimeConfig) -> None:
        """Apply settings that may change at run time, and the contents of their files. Replicas join and leave as in
        any other discovery."""
        self._config, self.settings = config, config.settings
        self._apply_keys(config)
        settings, upstream = config.settings, config.settings.upstream
        self.router.configure(slow_start_s=upstream.slow_start_s, stall_timeout_s=upstream.stall_timeout_s)
        self.admission.configure(settings.admission)
        self.warmer.configure(settings.prewarm)
        self._additions.allowed = parse_networks(settings.admin.replicas_allowed)
        self.admin.server.configure(wiring.admin_limits(settings))
        self.replicas.replace(settings.replicas)
        if self.link is not None:
            self.link.reload()

    def count_reload(self, result: str) -> None:
        """Count a reload: `ok` if the new settings are in force, `refused` if the old ones stay."""
        self.metrics.requests.count_reload(result, time.time())
