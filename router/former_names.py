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

SETTINGS: dict[str, str] = {}
"""Former dotted key -> key."""


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
    "warmroute_sharing_interruptions_total": RenamedMetric("warmroute_peering_disconnects_total"),
    "warmroute_sharing_whole": RenamedMetric("warmroute_peering_connected"),
    "warmroute_state_restored_blocks": RenamedMetric("warmroute_snapshot_restored_blocks"),
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
    "gateway_misused": "extproc_misconfigured",
    "handshake_down": "kv_connector_down",
    "handshake_up": "kv_connector_up",
    "history_kept": "history_recovered",
    "pair_failed": "disagg_pair_failed",
    "replica_drains_no_more": "replica_drain_cancelled",
    "replica_takes_traffic": "replica_serving",
    "sharing_alone": "peering_disconnected",
    "sharing_namesake": "peering_duplicate_name",
    "sharing_not_left": "peering_leave_failed",
    "sharing_whole": "peering_connected",
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
