"""Names of all metrics, with their labels, bounds and help texts, in the order of the metrics page."""

from __future__ import annotations

from typing import NamedTuple

from router.core.dialects import PATHS
from router.core.dialects.failover import EXACT, REASONS
from router.core.dialects.tool_normalization import REPAIRS
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import DifferenceKind, MissReason, TokenFate
from router.core.types.placements import Confidence, EndReason
from router.core.types.requests import Priority
from router.telemetry.series import Labels

LATENCY_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
INTER_TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
OVERHEAD_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
TTFT_RATIO = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
REPLICA_TTFT_S = (0.1, 0.3, 1.0, 3.0, 10.0)  # few buckets, because there are many replicas


class Family(NamedTuple):
    """Family of series: a histogram if it has bounds, otherwise a counter."""

    name: str
    text: str
    labels: str = ""  # names of the labels, separated by spaces
    bounds: tuple[float, ...] = ()


FAMILIES = (  # families in the order of the metrics page
    Family("requests", "Requests answered.", "route model status"),
    Family("ttft_seconds", "Time to first token of streamed answers.", "model", LATENCY_S),
    Family(
        "ttft_predictions",
        "First tokens of streams, by the predicted quantile that they met: `p50`, `p90`, or `later` than both.",
        "within model",
    ),
    Family(
        "ttft_prediction_ratio", "Time to first token of streams, divided by its predicted median.", "model", TTFT_RATIO
    ),
    Family(
        "ttft_deadlines",
        "Streams with a deadline for the first token, by outcome: `in_time`, `late`, or `none` if no token came.",
        "result priority model",
    ),
    Family("duration_seconds", "Duration of requests, from request read to end of answer.", "route model", LATENCY_S),
    Family("inter_token_seconds", "Mean inter-token time of a stream, from its events.", "model", INTER_TOKEN_S),
    Family("overhead_seconds", "Router overhead, from request read to request forwarded.", "", OVERHEAD_S),
    Family("queue_seconds", "Time in the router's queue, of requests queued or deferred.", "model", LATENCY_S),
    Family("shed_requests", "Requests shed by admission control, by error code.", "code priority model"),
    Family("stream_events", "Streamed events forwarded to clients.", "model"),
    Family("prompt_tokens", "Prompt tokens of placed requests, estimated.", "model"),
    Family("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model"),
    Family("reported_prompt_tokens", "Prompt tokens of answers with a cached-token count.", "model"),
    Family("cached_tokens", "Prompt tokens that engines reported as cached.", "model"),
    Family("completion_tokens", "Completion tokens: by the engine's count, else by stream events.", "model"),
    Family("decisions", "Placement decisions, by policy and reason.", "policy reason model"),
    Family("prediction_confidence", "Placement decisions, by grade of the cache prediction.", "grade"),
    Family("predictions", "Cache predictions compared with the engine's count of cached tokens.", "grade result"),
    Family(
        "overpredicted_tokens",
        "Prompt tokens predicted to be cached that the engine did not report as cached.",
        "grade",
    ),
    Family("attempts", "Attempts on replicas, including retries, by outcome.", "outcome"),
    Family("retries", "Failed attempts retried on another replica, by kind of failure.", "kind"),
    Family(
        "stream_failovers",
        "Streams continued on another replica (stream failover), by mode and kind of failure.",
        "mode reason",
    ),
    Family(
        "stream_failovers_refused",
        "Broken streams with stream failover that could not be continued, by reason.",
        "reason",
    ),
    Family("replica_failures", "Failed attempts, by replica and kind of failure.", "replica kind"),
    Family("reloads", "Configuration reloads, by result.", "result"),
    Family("tenant_requests", "Requests answered, by tenant of the keys file and status class.", "tenant status"),
    Family("tenant_prompt_tokens", "Prompt tokens of completed answers, by tenant of the keys file.", "tenant"),
    Family(
        "tenant_cached_tokens",
        "Cached prompt tokens of completed answers, by tenant: by the engine's count, else as predicted.",
        "tenant",
    ),
    Family(
        "tenant_completion_tokens",
        "Completion tokens, by tenant of the keys file: by the engine's count, else by stream events.",
        "tenant",
    ),
    Family(
        "saved_prefill_tokens",
        "Prefill tokens saved by the cache in completed answers: by the engine's count, else as predicted.",
        "model",
    ),
    Family(
        "saved_prefill_seconds",
        "Prefill time saved by the cache, estimated from each replica's learned speed.",
        "model",
    ),
    Family("spills", "Placements away from the replica that caches most of the prompt, by cause.", "cause model"),
    Family("spilled_tokens", "Prompt tokens predicted to be recomputed because of spills, by cause.", "cause model"),
    Family("replica_placed_tokens", "Prompt tokens of requests placed on a replica, estimated.", "replica"),
    Family(
        "replica_computed_tokens",
        "Prompt tokens of requests placed on a replica that are predicted not to be cached.",
        "replica",
    ),
    Family("replica_requests", "Finished requests of any outcome, by replica.", "replica"),
    Family(
        "replica_completion_tokens",
        "Completion tokens by replica: by the engine's count, else by stream events.",
        "replica",
    ),
    Family(
        "replica_grade_falls",
        "Times that the confidence grade of a ready replica's cache state fell, such as from `exact` to `catching-up`.",
        "replica",
    ),
    Family(
        "replica_ttft_seconds",
        "Time to first token by replica, in a small number of buckets.",
        "replica",
        REPLICA_TTFT_S,
    ),
    Family("prewarm_requests", "Prompts sent to prewarm replicas' caches, by result.", "result"),
    Family("prewarm_tokens", "Prompt tokens of successful prewarm requests."),
    Family(
        "miss_tokens",
        "Prompt tokens that missed the cache, by reason: by the engine's count, else as predicted.",
        "reason model",
    ),
    Family(
        "hit_tokens",
        "Prompt tokens that hit the cache: by the engine's count, else as predicted; `replay`: repeated prompts.",
        "kind model",
    ),
    Family(
        "loaded_tokens",
        "Cache-hit prompt tokens loaded from memory or files outside the GPU, according to KV events.",
        "model",
    ),
    Family("pulled_tokens", "Cache-hit prompt tokens transferred from another replica's memory.", "model"),
    Family(
        "p2p_transfers",
        "Requests planned with a transfer of tokens from another replica, by the part of those tokens that arrived.",
        "result model",
    ),
    Family(
        "disagg_decisions",
        "Requests placed, by use of disaggregated prefill: one replica prefills, another one decodes.",
        "decision model",
    ),
    Family(
        "disagg_failures",
        "Failed attempts with disaggregated prefill, by the stage at fault and the kind of failure.",
        "stage kind",
    ),
    Family(
        "token_fate",
        "Prompt tokens by their final place on the way from request to cache hit. Each token is in exactly one place:"
        " by the engine's count, else as predicted.",
        "fate model",
    ),
    Family(
        "counted_prompt_tokens",
        "Prompt tokens of answers without a cached-token count, on replicas with engine counters that cover them.",
        "model",
    ),
    Family(
        "counted_cached_tokens",
        "Cached prompt tokens of answers without a cached-token count, by the engines' own counters.",
        "model",
    ),
    Family(
        "duplicate_prompts", "Requests with an exact repetition of an earlier prompt within the observatory's window."
    ),
    Family(
        "prompt_divergences",
        "Prompts that diverge from an earlier prompt before shared tokens, by kind of change.",
        "change",
    ),
    Family("tool_normalizations", "Requests with tool definitions normalized before forwarding, by repair.", "repair"),
)

KINDS = (  # kinds of failures (http/failures.py)
    "blocks", "blocks_stalled", "blocks_timeout", "broke_early", "broke_midway", "connect", "descriptors", "engine",
    "foreign_host", "garbage", "lost", "model", "pull", "shed", "stale", "stalled", "stuck", "timeout", "unfinished",
)  # fmt: skip
CAUSES = ("broke_midway", "stalled", "unfinished", "drain")  # kinds of failure after which a stream may be continued

FALLBACK = "fallback"  # kind of failure behind a gateway: an endpoint was unreachable and the gateway took the next one
_OUTCOMES = (
    *(ending.value for ending in (EndReason.OK, EndReason.CLIENT_LEFT, EndReason.REFUSED_BY_ENGINE, EndReason.FAILED)),
    *KINDS,
    FALLBACK,
)
# Series that exist from the first scrape on. A series that appears with its first increment has no rate that shows it.
PREDECLARED_SERIES: dict[str, list[Labels]] = {
    "requests": [(path, "none", 503) for path in PATHS],  # refusals for models that no replica serves
    "prediction_confidence": [(grade,) for grade in Confidence],
    "predictions": [(grade, result) for grade in Confidence for result in ("equal", "over", "under")],
    "overpredicted_tokens": [(grade,) for grade in Confidence],
    "attempts": [(outcome,) for outcome in _OUTCOMES],
    "retries": [(kind,) for kind in (*KINDS, FALLBACK)],
    "stream_failovers": [(EXACT, reason) for reason in CAUSES],
    "stream_failovers_refused": [(reason,) for reason in REASONS],
    "reloads": [("ok",), ("refused",)],
    "prewarm_requests": [("ok",), ("failed",), ("skipped",)],
    "prewarm_tokens": [()],
    "duplicate_prompts": [()],
    "prompt_divergences": [(change.value,) for change in DifferenceKind],
    "tool_normalizations": [(repair,) for repair in REPAIRS],
}

PREDICTION_BUCKETS = ("p50", "p90", "later")  # predictions of a time to first token
DEADLINE_OUTCOMES = ("in_time", "late", "none")  # outcomes of deadlines for first tokens

# Series that begin with the first request of a model, for the first MODELS_BEGUN_MAX models. The model's label comes
# last.
MODELS_BEGUN_MAX = 16
BEGUN_BY_MODEL: dict[str, list[Labels]] = {
    "shed_requests": [
        *((code, each.name.lower()) for code in ("overloaded", "rate_limited") for each in Priority),
        ("slo_unreachable", Priority.LOW.name.lower()),
    ],
    "ttft_deadlines": [(result, each.name.lower()) for result in DEADLINE_OUTCOMES for each in Priority],
    "spills": [(cause.value,) for cause in SpillCause],
    "spilled_tokens": [(cause.value,) for cause in SpillCause],
    "miss_tokens": [(miss.value,) for miss in MissReason],
    "hit_tokens": [("genuine",), ("replay",)],
    "loaded_tokens": [()],
    "token_fate": [(fate.value,) for fate in TokenFate],
    "counted_prompt_tokens": [()],
    "counted_cached_tokens": [()],
    "ttft_predictions": [(within,) for within in PREDICTION_BUCKETS],
}
