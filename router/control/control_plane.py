"""Control plane: index, probes, events, metrics and admin pages. It serves all frontends (placement_api.py).

Parts are made in `wiring`. `replica_lifecycle` handles replicas that join and leave. This module has the lifecycle of
the control plane and its notifications.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from router.admin.added_replicas import RuntimeReplicas
from router.admin.drain import DrainPage
from router.admin.prewarm_endpoint import PrewarmPage
from router.config import tls
from router.config.allowed_networks import parse_networks
from router.config.api_keys import Keys
from router.config.runtime import RuntimeConfig
from router.control import wiring
from router.control.peer_routers import PeerSync
from router.control.replica_lifecycle import ReplicaLifecycle
from router.control.unshared import UnsharedRouters, router_name
from router.core.admission.hold_back import TICK_S
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.metrics_page import MetricsPages
from router.engines.replay_trigger import EventReplayTrigger
from router.eventloop import close_on_error, start_task
from router.peering.validation import is_shared
from router.placement_api import Frontends, NullFrontends
from router.telemetry.process_totals import ProcessTotals
from router.telemetry.request_record import RequestRecord
from router.tokenization.encoder import PromptEncoder, make_prompts
from router.tokenization.request_tokens import EngineTokenizer

log = logging.getLogger(__name__)

LOOK_S = 0.25  # interval of the checks for stalled replicas
LOOKS_A_CHECK = 4  # checks for stalled replicas per comparison of events with engines' counters
TOKENIZERS_S = 20.0  # longest wait for tokenizers to load; serving then begins without them


class ControlPlane:
    """Finds and probes replicas, and reports on `/readyz` if it can place requests. Use as `async with
    ControlPlane(config) as control`."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self.settings = config.settings  # the settings in force
        self.frontends: Frontends = NullFrontends()
        self.link: PeerSync | None = None  # None: no store is configured
        self.unshared: UnsharedRouters | None = None  # None: the admin listener has no port yet
        self.totals = ProcessTotals(lambda: self.frontends.counters())
        self.prompts: PromptEncoder | None = None  # None if events are off
        self.tls = config.replica_tls  # of all sessions for probes and pages; its certificates are renewed in place
        self.admin_url = ""
        self._stack = AsyncExitStack()
        self._draining = False
        self._looked = False  # the replicas of the first list were probed

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
        self.admin_token, self.upstream_key = self._config.admin_token, self._config.upstream_key
        self.router = wiring.router_of(self)
        self.metrics = wiring.metrics_of(self)
        self.replicas = wiring.replicas_of(self)  # replicas named in the settings or added at run time
        self.discoveries = wiring.discoveries_of(self)
        self.history = wiring.history_of(self)
        self._stack.push_async_callback(self.history.close)
        self.history.start()
        self.pages = wiring.pages_of(self)
        self.observatory = wiring.observatory_of(self)
        self.placer = wiring.placer_of(self)
        self.admission = self.placer.admission
        self.warmer = wiring.warmer_of(self)
        self._stack.push_async_callback(self.warmer.close)
        self.metrics_pages = MetricsPages(self.settings.probe, self.tls)
        self._stack.push_async_callback(self.metrics_pages.close)
        self.prober = wiring.prober_of(self)
        self._stack.push_async_callback(self.prober.close)
        ranks = wiring.ranks_of(self)
        self._stack.push_async_callback(ranks.close)
        self.state = wiring.make_snapshot_manager(self)
        self.events = wiring.subscriber_of(self) if s.events.enabled else None
        hands = wiring.make_kv_connector_prober(self)
        if hands is not None:
            self._stack.push_async_callback(hands.close)
            pairs = wiring.make_pair_warmer(self, hands)
            self._stack.push_async_callback(pairs.close)
            self._task(pairs.watch())
        self.lifecycle = ReplicaLifecycle(
            self.router,
            prober=self.prober,
            ranks=ranks,
            events=self.events,
            peers=wiring.make_p2p_prober(self) if s.events.enabled and s.tiers.enabled else None,
            hands=hands,
            warmer=self.warmer,
            metrics=self.metrics,
            frontends=lambda: self.frontends,
        )
        self.discovered, self.probe_now = self.lifecycle.discovered, self.lifecycle.probe_now
        self.keys = self._config.keys
        wiring.warn_if_unauthenticated(s)
        if self.observatory is not None:
            self._task(self.observatory.watch(lambda: self.frontends.templates()))
        self._task(self.totals.stalls.watch())
        self._task(self.history.watch())
        self._task(self._check())
        self._task(self._admit())

    async def _follow(self, events: EventStreamManager) -> None:
        """Load the tokenizers, for which the rest of the start waits. Then prepare to follow the events of replicas."""
        s = self.settings
        self.prompts = make_prompts(s)
        self._stack.callback(self.prompts.close)
        asker = EngineTokenizer(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=self.tls)
        self._stack.push_async_callback(asker.close)
        self._task(wiring.make_tokenizer_verifier(self, self.prompts, asker).watch())
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
            announcer = EventReplayTrigger(self.router, api_key=s.probe.api_key, tls=self.tls)
            self._stack.push_async_callback(announcer.close)
            self._task(announcer.watch())

    async def _listen(self) -> None:
        self.prewarm_page = PrewarmPage(self.router, self.warmer)
        self._additions = RuntimeReplicas(self.replicas, parse_networks(self.settings.admin.replicas_allowed))
        drains = DrainPage(self.discoveries)
        routes = [*self.pages.routes(), *self._additions.routes(), *drains.routes(), *self.prewarm_page.routes()]
        if self.observatory is not None:
            routes += self.observatory.routes()
        self.admin = wiring.admin_of(self, routes)
        self._stack.push_async_callback(self.admin.close)
        self.admin_url = await self.admin.listen(self.settings.listen.admin_port)

    def _share(self) -> None:
        """Open the link to other routers, if a store is named, and watch for others that share nothing."""
        if is_shared(self.settings.peering):
            self.link = wiring.make_peer_sync(self)
            self.link.start()
            self._stack.push_async_callback(self.link.close)
        peering = self.settings.peering
        self.unshared = UnsharedRouters(
            router_name(peering, urlsplit(self.admin_url).port or 0),
            routers_expected=peering.expected_routers,
            has_store=is_shared(peering),
            share=lambda: self.router.fleet.share,
            peers=lambda: [name for name, _ in self.link.link.peers()] if self.link is not None else [],
        )

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
                self.router.check(time.monotonic())
                if self.unshared is not None:
                    self.unshared.check(time.monotonic())
                self.metrics.check()
                self.lifecycle.look_for_lost_events(time.monotonic())
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

    def attach_frontends(self, frontends: Frontends) -> None:
        """Serve these frontends. They place requests here, are notified of replica changes, and report their
        counters."""
        self.frontends = frontends

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended. The frontend writes its log line."""
        self.metrics.observe(record)
        self.history.observe(record)
        if self.observatory is not None:
            self.observatory.observe(record)

    def count_attempt_failure(self, replica: str, kind: str) -> None:
        """Count an attempt that failed. A replica that has left in the meantime no longer has a series."""
        self.metrics.failed(replica if self.router.member(replica) is not None else None, kind)

    def ready(self) -> bool:
        """True if requests should be sent to this router. A replica must accept requests, the earlier state must be
        restored or have taken too long, and the router must not be draining. Under `discovery.scale_from_zero` no
        replica is needed."""
        holding = self.state is not None and self.state.blocks_readiness
        if self._draining or holding:
            return False
        return bool(self.router.usable()) or (self.settings.discovery.scale_from_zero and self._has_looked())

    def _has_looked(self) -> bool:
        """True if the first list of replicas has arrived and each of them was probed. Only then is it certain that none
        is ready."""
        if not self._looked and self.discovered.is_set():
            self._looked = all(member.health.asked for member in self.router.members)
        return self._looked

    def drain(self) -> None:
        """Report on `/readyz` that the router accepts no further requests, and stop deferring requests."""
        self._draining = True
        self.admission.release()

    @property
    def keys(self) -> Keys | None:
        """API keys, which identify tenants; None if the router requires no keys. Always replaced as one object."""
        return self._keys

    @keys.setter
    def keys(self, keys: Keys | None) -> None:
        self._keys = keys
        tenants = keys.tenants if keys is not None else {}
        self.metrics.know_tenants(tenants, self.settings.auth.tenants_max)
        self.admission.set_tenants(tenants)
        if self.link is not None:
            self.link.take_keys(keys)

    def renew_tls(self, config: RuntimeConfig) -> None:
        """Use other certificates for new connections of probes. Raises OSError if no file descriptor is left, before
        anything has changed."""
        tls.renew(self.tls, config.settings.upstream)

    def apply(self, config: RuntimeConfig) -> None:
        """Apply settings that may change at run time, and the contents of their files. Replicas join and leave as in
        any other discovery."""
        self.settings = settings = config.settings
        self.keys = config.keys
        self.admin_token, self.upstream_key = config.admin_token, config.upstream_key
        upstream = settings.upstream
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
        self.metrics.reloaded(result, time.time())
