"""Former names of the outer surface, which are still read or emitted until version 0.3.

One table for each kind of name. A former setting is read from every source, with one warning. Former metrics, headers
and log events are emitted beside the new ones. Former label values are emitted by former metrics only, since sums over
a metric with both values would be doubled; in logs and files of earlier versions they are read. The page
docs/reference/former-names.md is rendered from these tables.
"""

from __future__ import annotations

from typing import NamedTuple

UNTIL = "0.3"
"""The first version without the former names."""

SETTINGS: dict[str, str] = {
    "admission.hold_s": "admission.defer_max_s",
    "admission.wait_s": "admission.queue_timeout_s",
    "admission.waiting_max": "admission.engine_waiting_max",
    "events.announce": "events.request_full_reports",
    "events.suspend_s": "events.fallback_delay_s",
    "events.wait_s": "events.pending_wait_s",
    "gateway.conformance": "extproc.conformance",
    "gateway.fallbacks_max": "extproc.fallbacks_max",
    "gateway.health_port": "extproc.health_port",
    "gateway.host": "extproc.host",
    "gateway.keepalive_s": "extproc.keepalive_s",
    "gateway.objectives": "extproc.objectives",
    "gateway.port": "extproc.port",
    "gateway.sampled_ratio": "extproc.response_sample_ratio",
    "gateway.stream_s_max": "extproc.stream_s_max",
    "gateway.streams_max": "extproc.streams_max",
    "gateway.tls_certificate": "extproc.tls_certificate",
    "gateway.tls_client_ca": "extproc.tls_client_ca",
    "gateway.tls_key": "extproc.tls_key",
    "limits.bodies_bytes_max": "limits.total_body_bytes_max",
    "limits.bodies_wait_s": "limits.body_budget_timeout_s",
    "limits.decisions_max": "limits.recent_decisions_max",
    "limits.held_answer_bytes_max": "limits.buffered_response_bytes_max",
    "limits.reading_bytes_max": "limits.parse_queue_bytes_max",
    "limits.reading_wait_s": "limits.parse_queue_timeout_s",
    "listen.face": "listen.mode",
    "listen.files_interval_s": "listen.file_watch_interval_s",
    "observatory.append_only": "insights.history_policy",
    "observatory.blocks_max": "insights.blocks_max",
    "observatory.compare_ms_per_s_max": "insights.diff_budget_ms_per_s",
    "observatory.enabled": "insights.enabled",
    "observatory.excerpts": "insights.excerpts",
    "observatory.grafana_url": "insights.grafana_url",
    "observatory.groups_max": "insights.groups_max",
    "observatory.looks_per_s_max": "insights.inspections_per_s_max",
    "observatory.memory_bytes_max": "insights.memory_bytes_max",
    "observatory.prompt_bytes_max": "insights.prompt_bytes_max",
    "observatory.repairs": "insights.normalize_tools",
    "observatory.replay_window_s": "insights.replay_window_s",
    "observatory.step_field": "insights.step_field",
    "observatory.step_header": "insights.step_header",
    "observatory.steps_max": "insights.steps_max",
    "observatory.templates_max": "insights.templates_max",
    "prewarm.hold_ready": "prewarm.block_readiness",
    "pulls.endpoints": "p2p.endpoints",
    "pulls.gb_per_s": "p2p.gb_per_s",
    "pulls.port": "p2p.port",
    "pulls.probe_interval_s": "p2p.probe_interval_s",
    "pulls.rest_s": "p2p.cooldown_s",
    "pulls.stall_s": "p2p.timeout_s",
    "routing.blocks_max_default": "routing.default_cache_blocks",
    "routing.memory_max": "routing.remembered_prompts_max",
    "shared.name": "peering.fleet",
    "shared.password": "peering.password",
    "shared.password_file": "peering.password_file",
    "shared.replicas_in_common": "peering.replicas_in_common",
    "shared.router": "peering.router_id",
    "shared.routers_assumed": "peering.expected_routers",
    "shared.timeout_s": "peering.timeout_s",
    "shared.tls_ca": "peering.tls_ca",
    "shared.tls_certificate": "peering.tls_certificate",
    "shared.tls_key": "peering.tls_key",
    "shared.url": "peering.redis_url",
    "shared.url_file": "peering.redis_url_file",
    "split.decode": "disagg.decode",
    "split.endpoints": "disagg.endpoints",
    "split.handshake": "disagg.kv_connector",
    "split.hosts": "disagg.hosts",
    "split.linger_s": "disagg.prefill_grace_s",
    "split.port": "disagg.port",
    "split.prefill": "disagg.prefill",
    "split.probe_interval_s": "disagg.probe_interval_s",
    "state.age_max_s": "snapshot.age_max_s",
    "state.bytes_max": "snapshot.bytes_max",
    "state.every_s": "snapshot.interval_s",
    "state.file": "snapshot.path",
    "state.ready_within_s": "snapshot.readiness_wait_s",
    "state.siblings": "snapshot.from_peers",
    "upstream.continue_models": "upstream.stream_failover_models",
    "upstream.continue_streams": "upstream.stream_failover",
    "upstream.hand_over_s": "upstream.drain_migrate_after_s",
    "upstream.stuck_after_s": "upstream.stall_timeout_s",
}
"""Former dotted key -> key."""

_SEVERAL = "start several routers with listen.reuse_port and peering.redis_url"
_SCRAPE = "let the OpenTelemetry Collector scrape /metrics with its prometheus receiver"
REMOVED: dict[str, str] = {
    "listen.workers": _SEVERAL,
    "listen.hub_timeout_s": _SEVERAL,
    "metrics.aliases": "recording rules make these names from warmroute_* (docs/reference/names.md)",
    "metrics.otel_names": "the OpenTelemetry Collector makes these names from warmroute_* (docs/reference/names.md)",
    "metrics.otlp_endpoint": _SCRAPE,
    "metrics.otlp_interval_s": _SCRAPE,
}
"""Dotted key of a removed setting -> its replacement, as the end of an error message."""

REMOVED_VALUES: dict[str, dict[str, str]] = {
    "upstream.stream_failover": {
        "approximate": "use 'exact'; a stream that cannot be continued exactly ends with an error event"
    }
}
"""Dotted key -> removed value -> its replacement, as the end of an error message."""

SETTING_VALUES: dict[str, dict[str, str]] = {"listen.mode": {"edge": "proxy", "picker": "extproc"}}
"""Key -> former value -> value."""

KEY_FIELDS: dict[str, str] = {
    "append_only": "history_policy",
    "continue_streams": "stream_failover",
    "repairs": "normalize_tools",
}
"""Former field of an entry of `auth.keys_file` -> field."""


class RenamedMetric(NamedTuple):
    """Current name of a metric. `labels`: former label -> label, for labels with another name now."""

    name: str
    labels: dict[str, str] = {}  # noqa: RUF012 - never changed


METRICS: dict[str, RenamedMetric] = {
    "warmroute_continued_streams_total": RenamedMetric(
        "warmroute_stream_failovers_total", {"how": "mode", "cause": "reason"}
    ),
    "warmroute_deadlines_total": RenamedMetric("warmroute_ttft_deadlines_total", {"kept": "result"}),
    "warmroute_differences_total": RenamedMetric("warmroute_prompt_divergences_total"),
    "warmroute_funnel_tokens_total": RenamedMetric("warmroute_token_fate_total", {"place": "fate"}),
    "warmroute_graded_requests_total": RenamedMetric("warmroute_prediction_confidence_total"),
    "warmroute_held_requests": RenamedMetric("warmroute_deferred_requests"),
    "warmroute_leg_failures_total": RenamedMetric("warmroute_disagg_failures_total", {"leg": "stage"}),
    "warmroute_panic_placements_total": RenamedMetric("warmroute_panic_mode_placements_total"),
    "warmroute_prompt_diversity": RenamedMetric("warmroute_prompt_diversity_ratio"),
    "warmroute_pulls_total": RenamedMetric("warmroute_p2p_transfers_total", {"came": "result"}),
    "warmroute_refused_continuations_total": RenamedMetric("warmroute_stream_failovers_refused_total"),
    "warmroute_repairs_total": RenamedMetric("warmroute_tool_normalizations_total"),
    "warmroute_replays_total": RenamedMetric("warmroute_duplicate_prompts_total"),
    "warmroute_replica_held_blocks": RenamedMetric("warmroute_replica_cached_blocks"),
    "warmroute_replica_kv_usage": RenamedMetric("warmroute_replica_kv_usage_ratio"),
    "warmroute_replica_predictions_equal": RenamedMetric("warmroute_replica_predictions_equal_ratio"),
    "warmroute_replica_share": RenamedMetric("warmroute_replica_share_ratio"),
    "warmroute_sharing_bytes_total": RenamedMetric("warmroute_peering_bytes_total"),
    "warmroute_sharing_delay_seconds": RenamedMetric("warmroute_peering_delay_seconds"),
    "warmroute_sharing_failures_total": RenamedMetric("warmroute_peering_failures_total"),
    "warmroute_sharing_interruptions_total": RenamedMetric("warmroute_peering_disconnects_total"),
    "warmroute_sharing_messages_total": RenamedMetric("warmroute_peering_messages_total"),
    "warmroute_sharing_routers": RenamedMetric("warmroute_peering_routers"),
    "warmroute_sharing_strangers": RenamedMetric("warmroute_peering_unknown_routers"),
    "warmroute_sharing_whole": RenamedMetric("warmroute_peering_connected"),
    "warmroute_sharing_writable": RenamedMetric("warmroute_peering_writable"),
    "warmroute_state_age_seconds": RenamedMetric("warmroute_snapshot_age_seconds"),
    "warmroute_state_bytes": RenamedMetric("warmroute_snapshot_bytes"),
    "warmroute_state_replicas": RenamedMetric("warmroute_snapshot_replicas"),
    "warmroute_state_restored_blocks": RenamedMetric("warmroute_snapshot_restored_blocks"),
    "warmroute_state_writes_total": RenamedMetric("warmroute_snapshot_writes_total"),
}
"""Former metric -> metric."""

HEADERS: dict[str, str] = {
    "x-warmroute-continue": "x-warmroute-stream-failover",
    "x-warmroute-not-continued": "x-warmroute-stream-failover-refused",
    "x-warmroute-predicted-pull-tokens": "x-warmroute-predicted-p2p-tokens",
}
"""Former header of requests or responses -> header."""

LOG_EVENTS: dict[str, str] = {
    "config_refused": "config_rejected",
    "gateway_malformed": "extproc_malformed_message",
    "gateway_misused": "extproc_misconfigured",
    "gateway_must_fail_closed": "extproc_must_fail_closed",
    "handshake_down": "kv_connector_down",
    "handshake_up": "kv_connector_up",
    "history_kept": "history_recovered",
    "pair_failed": "disagg_pair_failed",
    "replica_drains_no_more": "replica_drain_cancelled",
    "replica_takes_traffic": "replica_serving",
    "sharing_alone": "peering_disconnected",
    "sharing_bad_message": "peering_invalid_message",
    "sharing_namesake": "peering_duplicate_name",
    "sharing_not_left": "peering_leave_failed",
    "sharing_stranger": "peering_unknown_router",
    "sharing_too_many": "peering_too_many_routers",
    "sharing_unauthenticated": "peering_unauthenticated",
    "sharing_whole": "peering_connected",
    "state_ignored": "snapshot_ignored",
    "state_not_written": "snapshot_write_failed",
    "state_restored": "snapshot_restored",
}
"""Former log event -> log event."""

TOKEN_FATES = {"genuine": "gpu_hit", "held_elsewhere": "cached_on_other_replica"}
SPILL_CAUSES = {"crowd": "decode_load", "unfit": "unhealthy"}
LABEL_VALUES: dict[str, dict[str, str]] = {
    "fate": TOKEN_FATES,
    "cause": SPILL_CAUSES,
    "result": {"untold": "unreported"},
}
"""Label -> former value -> value. The label `cause` is that of spills."""

_METRICS = {renamed.name: former for former, renamed in METRICS.items()}
_HEADERS = {name: former for former, name in HEADERS.items()}
_EVENTS = {name: former for former, name in LOG_EVENTS.items()}
_VALUES = {label: {value: former for former, value in values.items()} for label, values in LABEL_VALUES.items()}


def former_metric(name: str) -> str:
    """Return the former name of a metric; "" for none."""
    return _METRICS.get(name, "")


def former_labels(former: str) -> dict[str, str]:
    """Return the renamed labels of a former metric: label -> former label."""
    return {label: old for old, label in METRICS[former].labels.items()}


def former_values(label: str) -> dict[str, str]:
    """Return the renamed values of a label: value -> former value."""
    return _VALUES.get(label, {})


def former_event(event: str) -> str:
    """Return the former name of a log event; "" for none."""
    return _EVENTS.get(event, "")


def former_header(name: str) -> str:
    """Return the former name of a renamed header."""
    return _HEADERS[name]


def header_lines(name: str, value: object) -> str:
    """Return the lines of a renamed header, under both names, each with its CRLF."""
    return f"{name}: {value}\r\n{_HEADERS[name]}: {value}\r\n"
