"""Builds the parts of a control plane from its settings.

Each function makes one part for the given context, from the settings and from parts that exist already. A part that is
made later is looked up at call time."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from router.admin.history.breakdowns import count_now
from router.admin.history.request_history import RouterHistory
from router.admin.history.writer import HistoryWriter
from router.admin.insights_pages import InsightsService
from router.admin.listener import BODIES_MAX, BODY_BYTES_MAX
from router.config.allowed_networks import is_loopback
from router.config.schema import P2pSettings, Settings, TierSettings
from router.config.url_maps import event_endpoints, event_topics
from router.control.admission_controller import AdmissionController
from router.control.replica_lifecycle import ReplicaLifecycle
from router.control.response_owners import ResponseOwners
from router.control.snapshot import SnapshotManager
from router.core.disagg.pair_disaggregator import PairDisaggregator
from router.core.estimators.tier_load import FLOOR_MS, LoadModel, guess
from router.core.fleet.expected_models import ExpectedModels
from router.core.fleet.registry import Fleet
from router.core.insights.breakdown import Explainer
from router.core.kv_events.stream import StreamLimits
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.cache_misses import Template
from router.core.types.requests import Priority
from router.core.types.tiers import CPU, EXTERNAL, LEG, PEER, SHARED, STORAGE
from router.engines.disagg_probes.kv_connectors import KvConnectorProber
from router.engines.disagg_probes.pair_warmup import PairWarmer
from router.engines.discovery.combined_source import MergedDiscovery
from router.engines.discovery.factory import source_of
from router.engines.discovery.static import StaticDiscovery
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.metrics_page import MetricsPages
from router.engines.probe import Prober
from router.http.client_timeouts import ClientLimits
from router.peering.validation import is_shared
from router.prewarm.sender import PromptSender
from router.prewarm.warmer import Warmer
from router.telemetry.counters import RequestMetrics
from router.telemetry.metrics import Metrics, MetricSources

log = logging.getLogger(__name__)

MODELS_READ_MAX = 1_000  # models with sums over time
STALE_PROBES = 3  # probe intervals after which an engine's reported load no longer counts


def make_router(s: Settings, lifecycle: ReplicaLifecycle) -> Router:
    """Make the Router. It reports events of replicas to their lifecycle."""
    window_s = s.insights.replay_window_s
    return Router(
        POLICIES[s.routing.policy](),
        index_bytes_max=s.routing.index_bytes_max,
        remembered_prompts_max=s.routing.remembered_prompts_max,
        default_cache_blocks=s.routing.default_cache_blocks,
        stored_blocks_max=s.events.blocks_max,
        stored_bytes_max=s.events.index_bytes_max,
        repeats=s.events.request_full_reports,
        tiers=s.tiers.enabled,
        load_guesses=load_guesses(s.tiers, s.p2p),
        graded=lifecycle.on_grade_changed,
        resync=lifecycle.replay_events,
        slow_start_s=s.upstream.slow_start_s,
        stall_timeout_s=s.upstream.stall_timeout_s,
        breaker_changed=lifecycle.on_breaker_changed,
        cleared=lifecycle.on_cache_cleared,
        several=lifecycle.on_shared_metrics_page,
        suspect=lifecycle.verify_event_stream,
        explainer=Explainer(s.insights.blocks_max, replay_window_s=window_s) if s.insights.enabled else None,
        disaggregation=PairDisaggregator if s.disagg.kv_connector else None,
        expected=ExpectedModels(s.discovery.models, keeps=s.discovery.scale_from_zero),
    )


def load_guesses(s: TierSettings, pulls: P2pSettings) -> dict[str, LoadModel]:
    """Initial estimates of load time: from each cache tier, over P2P KV transfer, and to a decode stage. They serve
    until measurements exist."""
    gb_per_s = {
        CPU: s.cpu_gb_per_s,
        **dict.fromkeys((PEER, LEG), pulls.gb_per_s),
        SHARED: s.shared_gb_per_s,
        **dict.fromkeys((STORAGE, EXTERNAL), s.storage_gb_per_s),
    }
    return {tier: guess(FLOOR_MS[tier], s.kv_bytes_per_token, speed) for tier, speed in gb_per_s.items()}


class PartFactory:
    """Makes the parts that use the whole Router."""

    def __init__(self, settings: Settings, router: Router, tls: ssl.SSLContext | None) -> None:
        """`tls`: for connections to replicas."""
        self._settings = settings
        self._router = router
        self._tls = tls

    def metrics(self, sources: MetricSources) -> Metrics:
        """Make the metrics of this process and of all frontends."""
        return Metrics(
            self._router,
            time.monotonic,
            sources,
            process=True,
            splits=bool(self._settings.disagg.kv_connector),
            former_names=self._settings.metrics.former_names,
        )

    def admission(self, owners: ResponseOwners, shed: Callable[[str, Priority, str], None]) -> AdmissionController:
        """Make the admission of requests. `shed(code, priority, model)` is called for each request that is refused."""
        limits, probe = self._settings.admission, self._settings.probe
        stale_s = STALE_PROBES * max(probe.interval_s, probe.metrics_interval_s)
        return AdmissionController(self._router, owners, limits, stale_s=stale_s, clock=time.monotonic, shed=shed)

    def observatory(
        self,
        metrics: Metrics,
        history: RouterHistory,
        admission: AdmissionController,
        warming: Callable[[str], bool],
        grade_falls: Callable[[str], int],
        about_router: Callable[[], dict[str, Any]],
    ) -> InsightsService | None:
        """Make the observatory; None if it is switched off.

        - `warming(replica)`: True if its cache is being filled.
        - `grade_falls(replica)`: number of times that its grade fell in the last minutes.
        - `about_router()`: this router's name, its peers and whether it shares with them.
        """
        settings = self._settings.insights
        if not settings.enabled:
            return None
        service = InsightsService(
            self._router,
            settings,
            tenant=metrics.requests.tenant,
            clock=time.monotonic,
            decisions=history.newest,
            window=admission.window,
            warming=warming,
            grade_falls=grade_falls,
            models=metrics.models,
            tenants=metrics.tenants,
            unready_at_s=metrics.requests.unready_at_s,
            counted=metrics.sum_engine_counts,
            about_router=about_router,
        )
        history.break_down(lambda: count_now(metrics.models(MODELS_READ_MAX), service.flush().groups.all))
        return service

    def warmer(
        self,
        sender: PromptSender,
        observatory: InsightsService | None,
        requests: RequestMetrics,
        released: Callable[[str], None],
    ) -> Warmer:
        """Make the warmer, which fills caches before traffic comes. `released(replica)`: called when a replica that was
        held back for that may receive requests."""
        return Warmer(
            self._router.fleet,
            sender,
            self._settings.prewarm,
            clock=time.monotonic,
            hottest=observatory.hottest if observatory is not None else _no_templates,
            counted=requests.count_prewarm,
            released=released,
        )

    def prober(self, lifecycle: ReplicaLifecycle, pages: MetricsPages) -> Prober:
        """Make the prober, which requests health, models and load from replicas."""
        return Prober(
            self._router,
            lifecycle.on_unreachable,
            on_ready=lifecycle.on_ready,
            settings=self._settings.probe,
            pages=pages,
            kv_tokens_max=self._settings.routing.kv_tokens_max,
            tls=self._tls,
        )

    def pair_warmer(self, prober: KvConnectorProber, api_key: Callable[[], str]) -> PairWarmer:
        """Make the warmer of replica pairs. It makes each new pair transfer KV blocks once, before requests use the
        pair."""
        return PairWarmer(
            self._router,
            prober.connector,
            prober.addresses,
            api_key=api_key,
            clock=time.monotonic,
            tls=self._tls,
            hosts=self._settings.disagg.hosts,
        )

    def snapshot_manager(self) -> SnapshotManager | None:
        """Make the warm start, which restores and saves knowledge; None if neither a file nor siblings are
        configured."""
        s = self._settings
        if not s.snapshot.path and not (s.snapshot.from_peers and is_shared(s.peering)):
            return None
        return SnapshotManager(self._router, s.snapshot, name=s.peering.router_id or socket.gethostname())

    def subscriber(self, state: SnapshotManager | None) -> EventStreamManager | None:
        """Make the subscriber to the KV events of replicas; None if events are off."""
        events = self._settings.events
        if not events.enabled:
            return None
        return EventStreamManager(
            self._router.knowledge,
            endpoints=event_endpoints(events.endpoints),
            bind=events.bind,
            topics=event_topics(events.topics),
            api_key=self._settings.probe.api_key,
            tls=self._tls,
            poll_s=events.poll_s,
            limits=StreamLimits(
                silence_s=events.replay_timeout_s,
                suspended_max_s=events.fallback_delay_s,
                queue_bytes_max=events.queue_bytes_max,
            ),
            handover=state.handover if state is not None else None,
        )


def make_replicas(s: Settings, fleet: Fleet) -> StaticDiscovery:
    """Make the source of configured replicas. Replicas that a reload removes are kept for at most the time of two
    probes."""
    return StaticDiscovery(s.replicas, alone=fleet.serving_alone, kept_s=2 * s.probe.timeout_s)


def make_discoveries(s: Settings, replicas: StaticDiscovery) -> MergedDiscovery:
    """Join all sources of replicas: replicas of the settings, replicas added at run time, and the configured
    discovery."""
    if not s.replicas and s.discovery.source == StaticDiscovery.source:
        log.warning(
            "no replicas are configured: set --replica URL, `replicas` or `discovery`",
            extra={"event": "no_replicas"},
        )
    source = source_of(s.discovery, split=bool(s.disagg.kv_connector))
    return MergedDiscovery(replicas, source, replicas_max=s.discovery.replicas_max)


def make_history(s: Settings, load: Callable[[], tuple[int, int]]) -> RouterHistory:
    """Make the history: in memory, and also in a file if a path is configured. `load()`: the number of requests being
    answered, and how many of them wait in the router."""
    admin = s.admin
    keeper = None
    if admin.history_path:
        path, days = admin.history_path, admin.history_days_max
        keeper = HistoryWriter(path, bytes_max=admin.history_bytes_max, days_max=days)
    return RouterHistory(
        decisions_max=s.limits.recent_decisions_max,
        keeper=keeper,
        load=load,
        days_max=admin.history_days_max,
        bytes_max=admin.history_bytes_max,
    )


def warn_if_unauthenticated(settings: Settings) -> None:
    """Warn if every client that reaches the main listener may use it: it is not on loopback alone, and requires no
    key."""
    listen = settings.listen
    if settings.auth.keys_file or listen.tls_client_ca or is_loopback(listen.host):
        return
    fields = {"host": listen.host, "next": "set auth.keys_file (warmroute make-key), or limit access by a firewall"}
    log.warning(
        "the router is open to every client that can reach it: no API keys are required",
        extra={"event": "open_to_all", "fields": fields},
    )


def _no_templates(_count: int) -> Sequence[Template]:
    """Return no learned template: the observatory is off."""
    return ()


def count_event_streams(events: EventStreamManager) -> dict[str, dict[str, float | None]]:
    """Return the counts of event streams, by replica (MetricSources.streams)."""
    rows = events.stats().items()
    return {id_: {**msgspec.to_builtins(row.counts), "blocks": row.blocks, "lag_s": row.lag_s} for id_, row in rows}


def describe_event_stream(events: EventStreamManager | None, replica: str) -> dict[str, Any] | None:
    """Return the state of a replica's event stream for pages; None if it has none."""
    stats = events.stat(replica) if events is not None else None
    return msgspec.to_builtins(stats) if stats is not None else None


def describe_discoveries(discoveries: MergedDiscovery) -> dict[str, Any]:
    """Return the freshness of each source's list of replicas, for pages and metrics."""
    found: dict[str, Any] = msgspec.to_builtins(discoveries.statuses())
    return found


def count_history(history: RouterHistory) -> tuple[bool, int, int]:
    """Return the state of the history file (MetricSources.history)."""
    status = history.status()
    return (status.failing, status.bytes, history.count_dropped()) if status is not None else (False, 0, 0)


def admin_limits(settings: Settings) -> ClientLimits:
    """Return the main listener's deadlines with the admin listener's own limits."""
    listen, admin = settings.listen, settings.admin
    return ClientLimits(
        body_bytes_max=BODY_BYTES_MAX,
        bodies_bytes_max=BODIES_MAX * BODY_BYTES_MAX,
        bodies_wait_s=settings.limits.body_budget_timeout_s,
        keepalive_s=listen.keepalive_s,
        head_timeout_s=listen.head_timeout_s,
        body_bytes_per_s_min=listen.body_bytes_per_s_min,
        body_timeout_s=listen.body_timeout_s,
        send_timeout_s=listen.send_timeout_s,
        connections_max=admin.connections_max,
        connections_per_client_max=admin.connections_per_client_max,
    )
