"""Builds the parts of a control plane from its settings.

Each function makes one part for the given context, from the settings and from parts that exist already. A part that is
made later is looked up at call time."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.admin.history.request_history import RouterHistory
from router.admin.history.writer import HistoryWriter
from router.admin.insights_pages import InsightsService
from router.admin.listener import BODIES_MAX, BODY_BYTES_MAX, AdminListener
from router.admin.page_table import AdminRoute
from router.admin.pages import Pages
from router.config.allowed_networks import is_loopback
from router.config.schema import P2pSettings, Settings, TierSettings
from router.config.url_maps import event_endpoints, event_topics
from router.control.control_context import ControlPlaneContext
from router.control.local_placement import LocalPlacementService
from router.control.peer_routers import PeerSync
from router.control.snapshot import SnapshotManager
from router.core.estimators.tier_load import FLOOR_MS, LoadModel, guess
from router.core.fleet.expected_models import ExpectedModels
from router.core.insights.breakdown import Explainer
from router.core.kv_events.stream import StreamLimits
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica
from router.core.types.tiers import CPU, EXTERNAL, LEG, PEER, SHARED, STORAGE
from router.engines.discovery.combined_source import MergedDiscovery
from router.engines.discovery.factory import source_of
from router.engines.discovery.static import StaticDiscovery
from router.engines.kv_connectors import KvConnectorProber
from router.engines.kv_events.subscriber import EventStreamManager
from router.engines.p2p_prober import P2pProber
from router.engines.pair_warmup import PairWarmer
from router.engines.probe import Prober
from router.engines.ranks import RankExpander
from router.http.client_timeouts import ClientLimits
from router.peering.validation import is_shared
from router.prewarm.sender import PromptSender
from router.prewarm.warmer import Warmer
from router.telemetry.metrics import Metrics, MetricSources
from router.tokenization.encoder import PromptEncoder
from router.tokenization.request_tokens import EngineTokenizer
from router.tokenization.verifier import TokenizerVerifier

log = logging.getLogger(__name__)

STALE_PROBES = 3  # probe intervals after which an engine's reported load no longer counts


def router_of(context: ControlPlaneContext) -> Router:
    """Make the Router. Its events about replicas go to the lifecycle, the event streams and the warmer."""
    s = context.settings
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
        graded=lambda id_, grade, why: context.lifecycle.on_grade_changed(id_, grade, why),
        resync=lambda id_: context.events.resync(id_) if context.events else None,
        slow_start_s=s.upstream.slow_start_s,
        stall_timeout_s=s.upstream.stall_timeout_s,
        breaker_changed=lambda id_, state, why: context.lifecycle.on_breaker_changed(id_, state, why),
        cleared=lambda id_: context.warmer.on_cache_cleared(id_),
        several=lambda id_: context.lifecycle.on_shared_metrics_page(id_),
        suspect=lambda id_: context.events.suspect(id_, "connection refused") if context.events else None,
        explainer=Explainer(s.insights.blocks_max, replay_window_s=window_s) if s.insights.enabled else None,
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


def metrics_of(context: ControlPlaneContext) -> Metrics:
    """Make the metrics of this process and of all frontends."""

    def streams() -> dict[str, dict[str, float | None]]:
        rows = context.events.stats().items() if context.events is not None else ()
        return {id_: {**msgspec.to_builtins(row.counts), "blocks": row.blocks, "lag_s": row.lag_s} for id_, row in rows}

    def history() -> tuple[bool, int, int]:
        status = context.history.status()
        return (status.failing, status.bytes, context.history.count_dropped()) if status is not None else (False, 0, 0)

    figures = MetricSources(
        in_flight=lambda: context.frontends.in_flight,
        streams=streams,
        prompts=lambda: context.prompts.counts() if context.prompts is not None else {},
        queued=lambda: context.admission.count_queued(),
        waiting=lambda: context.admission.count_waiting(),
        held=lambda: context.admission.held_back(),
        engine_version=lambda replica: context.lifecycle.engine_version(replica),
        discoveries=lambda: msgspec.to_builtins(context.discoveries.statuses()),
        ledger=lambda: context.observatory.flush() if context.observatory is not None else None,
        history=history,
        sharing=lambda: context.link.figures() if context.link is not None else None,
        state=lambda: context.state.figures() if context.state is not None else None,
        admin=lambda: (context.admin.server.connections, context.admin.server.closed),
        totals=context.totals,
    )
    return Metrics(
        context.router,
        time.monotonic,
        figures,
        process=True,
        splits=bool(context.settings.disagg.kv_connector),
        former_names=context.settings.metrics.former_names,
    )


def replicas_of(context: ControlPlaneContext) -> StaticDiscovery:
    """Make the source of configured replicas. Replicas that a reload removes are kept for at most the time of two
    probes."""
    kept_s = 2 * context.settings.probe.timeout_s
    return StaticDiscovery(context.settings.replicas, alone=context.router.serving_alone, kept_s=kept_s)


def discoveries_of(context: ControlPlaneContext) -> MergedDiscovery:
    """Join all sources of replicas: replicas of the settings, replicas added at run time, and the configured
    discovery."""
    s = context.settings
    if not s.replicas and s.discovery.source == StaticDiscovery.source:
        log.warning(
            "no replicas are configured: set --replica URL, `replicas` or `discovery`",
            extra={"event": "no_replicas"},
        )
    source = source_of(s.discovery, split=bool(s.disagg.kv_connector))
    return MergedDiscovery(context.replicas, source, replicas_max=s.discovery.replicas_max)


def history_of(context: ControlPlaneContext) -> RouterHistory:
    """Make the history: in memory, and also in a file if a path is configured."""
    admin = context.settings.admin
    keeper = None
    if admin.history_path:
        path, days = admin.history_path, admin.history_days_max
        keeper = HistoryWriter(path, bytes_max=admin.history_bytes_max, days_max=days)

    def load() -> tuple[int, int]:
        waiting, _ = context.admission.count_queued()
        return context.frontends.in_flight, sum(waiting.values())

    return RouterHistory(
        decisions_max=context.settings.limits.recent_decisions_max,
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


def pages_of(context: ControlPlaneContext) -> Pages:
    """Make the pages that any client or operator may read."""

    def stream(replica: str) -> dict[str, Any] | None:
        stats = context.events.stat(replica) if context.events is not None else None
        return msgspec.to_builtins(stats) if stats is not None else None

    return Pages(
        context.router,
        context.metrics,
        ready=context.ready,
        clock=time.monotonic,
        history=context.history,
        streams=stream,
        window=lambda id_: context.admission.window(id_),
        added=lambda id_: Replica(id_).url in context.replicas.added,
        warming=lambda id_: context.warmer.is_warming(id_),
        engine_version=lambda id_: context.lifecycle.engine_version(id_),
        discoveries=lambda: msgspec.to_builtins(context.discoveries.statuses()),
        sharing=lambda: context.link.status() if context.link is not None else None,
        unshared=lambda: hub.unshared.why if hub.unshared is not None else "",
        state=lambda: context.state.status() if context.state is not None else None,
        look=lambda: context.prober.look(),
    )


def observatory_of(context: ControlPlaneContext) -> InsightsService | None:
    """Make the observatory; None if it is switched off."""
    settings = context.settings.insights
    if not settings.enabled:
        return None
    return InsightsService(
        context.router,
        settings,
        tenant=context.metrics.tenant,
        clock=time.monotonic,
        decisions=context.history.newest,
        window=lambda id_: context.admission.window(id_),
        warming=lambda id_: context.warmer.is_warming(id_),
        models=context.metrics.models,
        counted=context.metrics.sum_engine_counts,
        about_router=lambda: hub.unshared.status() if hub.unshared is not None else {},
    )


def placer_of(context: ControlPlaneContext) -> LocalPlacementService:
    """Make the placer for the frontends."""
    s = context.settings
    return LocalPlacementService(
        context.router,
        clock=time.monotonic,
        event_wait_s=s.events.pending_wait_s,
        response_ids_max=s.limits.response_ids_max,
        private_responses=bool(s.auth.keys_file),
        observe=context.observe,
        failed=context.count_attempt_failure,
        refused=lambda replica: context.lifecycle.on_connection_refused(replica),
        page=context.pages.page,
        limits=s.admission,
        load_stale_s=STALE_PROBES * max(s.probe.interval_s, s.probe.metrics_interval_s),
        shed=context.metrics.shed,
        made=lambda *made: context.link.link.publish_response_owner(*made) if context.link is not None else None,
        told_within_s=lambda: context.link.owner_wait_s() if context.link is not None else 0.0,
        pull_rest_s=s.p2p.cooldown_s,
        look=lambda: context.prober.look(),
        reread=lambda replica: context.prober.reread(replica),
    )


def make_snapshot_manager(context: ControlPlaneContext) -> SnapshotManager | None:
    """Make the warm start, which restores and saves knowledge; None if neither a file nor siblings are configured."""
    s = context.settings
    if not s.snapshot.path and not (s.snapshot.from_peers and is_shared(s.peering)):
        return None
    return SnapshotManager(context.router, s.snapshot, name=s.peering.router_id or socket.gethostname())


def make_peer_sync(context: ControlPlaneContext) -> PeerSync:
    """Make the link to other routers. The admin listener must have its port first, because the port is part of this
    router's name."""
    return PeerSync(context, urlsplit(context.admin_url).port or 0)


def warmer_of(context: ControlPlaneContext) -> Warmer:
    """Make the warmer, which fills caches before traffic comes."""
    s = context.settings
    sender = PromptSender(
        context.router,
        context.admission,
        clock=time.monotonic,
        api_key=lambda: context.upstream_key or s.probe.api_key,
        tls=context.tls,
    )
    return Warmer(
        context.router,
        sender,
        s.prewarm,
        clock=time.monotonic,
        hottest=context.observatory.hottest if context.observatory is not None else lambda _: (),
        counted=context.metrics.prewarmed,
        released=lambda id_: context.frontends.on_replica_ready(id_),
    )


def prober_of(context: ControlPlaneContext) -> Prober:
    """Make the prober, which requests health, models and load from replicas."""
    return Prober(
        context.router,
        lambda id_: context.lifecycle.on_unreachable(id_),
        on_ready=lambda id_: context.lifecycle.on_ready(id_),
        settings=context.settings.probe,
        pages=context.metrics_pages,
        kv_tokens_max=context.settings.routing.kv_tokens_max,
        tls=context.tls,
    )


def make_p2p_prober(context: ControlPlaneContext) -> P2pProber:
    """Make the prober of the addresses at which engines accept commands of their peers."""
    return P2pProber(context.router.set_p2p_address, context.settings.p2p)


def make_kv_connector_prober(context: ControlPlaneContext) -> KvConnectorProber | None:
    """Make the prober of KV connectors; None if disaggregated prefill is off."""
    settings = context.settings.disagg
    return KvConnectorProber(context.router.set_kv_connector, settings, context.tls) if settings.kv_connector else None


def make_pair_warmer(context: ControlPlaneContext, hands: KvConnectorProber) -> PairWarmer:
    """Make the warmer of replica pairs. It makes each new pair transfer KV blocks once, before requests use the
    pair."""
    return PairWarmer(
        context.router,
        hands.handshake,
        hands.addresses,
        api_key=lambda: context.upstream_key or context.settings.probe.api_key,
        clock=time.monotonic,
        tls=context.tls,
        hosts=context.settings.disagg.hosts,
    )


def ranks_of(context: ControlPlaneContext) -> RankExpander:
    """Make the discovery of data-parallel ranks, which requests their number from servers."""
    return RankExpander(context.settings.probe, context.metrics_pages, context.tls)


def subscriber_of(context: ControlPlaneContext) -> EventStreamManager:
    """Make the subscriber to the KV events of replicas."""
    s = context.settings
    return EventStreamManager(
        context.router.knowledge,
        endpoints=event_endpoints(s.events.endpoints),
        bind=s.events.bind,
        topics=event_topics(s.events.topics),
        api_key=s.probe.api_key,
        tls=context.tls,
        poll_s=s.events.poll_s,
        limits=StreamLimits(
            silence_s=s.events.replay_timeout_s,
            suspended_max_s=s.events.fallback_delay_s,
            queue_bytes_max=s.events.queue_bytes_max,
        ),
        handover=context.state.handover if context.state is not None else None,
    )


def make_tokenizer_verifier(
    context: ControlPlaneContext, prompts: PromptEncoder, asker: EngineTokenizer
) -> TokenizerVerifier:
    """Make the check that compares this router's token ids with those of replicas."""
    return TokenizerVerifier(context.router, prompts, asker, context.settings.tokens)


def admin_of(context: ControlPlaneContext, routes: Iterable[AdminRoute]) -> AdminListener:
    """Make the admin listener with these pages, before it listens."""
    s = context.settings
    return AdminListener(routes, admin_limits(s), token=lambda: context.admin_token, host=s.listen.admin_host)


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
