"""Names of everything that is counted, with their labels, bounds and help texts, in the order of the metrics page."""

from __future__ import annotations

from typing import NamedTuple

from router.core.dialects.repairs import REPAIRS
from router.core.facts.misses import Change, Miss
from router.core.facts.placements import Ending, Grade
from router.core.facts.requests import Priority
from router.core.placement.spill import SpillCause
from router.telemetry.series import Labels

LATENCY_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
INTER_TOKEN_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
OVERHEAD_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
REPLICA_TTFT_S = (0.1, 0.3, 1.0, 3.0, 10.0)  # few: there are many replicas


class Family(NamedTuple):
    """A family of series: a histogram where it has bounds, otherwise a counter."""

    name: str
    text: str
    labels: str = ""  # names of the labels, separated by spaces
    bounds: tuple[float, ...] = ()


FAMILIES = (  # families in the order of the metrics page
    Family("requests", "Requests answered.", "route model status"),
    Family("ttft_seconds", "Time to the first event of a stream.", "model", LATENCY_S),
    Family("duration_seconds", "Request read to answer ended.", "route model", LATENCY_S),
    Family("inter_token_seconds", "Mean time between the events of a stream.", "model", INTER_TOKEN_S),
    Family("overhead_seconds", "Request read to request sent on: parse, hash, match, place.", "", OVERHEAD_S),
    Family("queue_seconds", "Waited for a place, or held back, of requests that were.", "model", LATENCY_S),
    Family("shed_requests", "Requests turned away though replicas are there, by reason.", "code priority model"),
    Family("stream_events", "Streamed events passed on.", "model"),
    Family("prompt_tokens", "Prompt tokens placed, estimated.", "model"),
    Family("predicted_cached_tokens", "Prompt tokens predicted to be cached.", "model"),
    Family("reported_prompt_tokens", "Prompt tokens of answers that say how many were cached.", "model"),
    Family("cached_tokens", "Prompt tokens that engines reported as cached.", "model"),
    Family("completion_tokens", "Tokens of answers: by the engine's count, else events of their streams.", "model"),
    Family("decisions", "Placements.", "policy reason model"),
    Family("graded_requests", "Placements by grade of the prediction.", "grade"),
    Family("predictions", "Predictions against the engine's own count of cached tokens.", "grade result"),
    Family("overpredicted_tokens", "Tokens predicted to be cached that were not.", "grade"),
    Family("attempts", "Requests sent to replicas, further attempts included, by what became of them.", "outcome"),
    Family("retries", "Attempts that failed and were retried elsewhere.", "kind"),
    Family("replica_failures", "Attempts that failed.", "replica kind"),
    Family("worker_hub_lost_placements", "Placements that workers made by the ring, as the hub was lost to them."),
    Family("reloads", "Times that the settings were read again.", "result"),
    Family("tenant_requests", "Requests answered, by tenant of the keys file and class of status.", "tenant status"),
    Family("tenant_prompt_tokens", "Prompt tokens of whole answers, by tenant of the keys file.", "tenant"),
    Family(
        "tenant_cached_tokens", "Those of them that were cached: by the engine's count, else as predicted.", "tenant"
    ),
    Family(
        "tenant_completion_tokens",
        "Tokens of answers, by tenant of the keys file: by the engine's count, else events of their streams.",
        "tenant",
    ),
    Family(
        "saved_prefill_tokens",
        "Prompt tokens of whole answers that were not computed: by the engine's count, else as predicted.",
        "model",
    ),
    Family(
        "saved_prefill_seconds",
        "Prefill that was not done for that, estimated in a replica's seconds by its learned speed.",
        "model",
    ),
    Family(
        "spills", "Placements off the replica that holds most of the prompt, by what spoke against it.", "cause model"
    ),
    Family("spilled_tokens", "Tokens that it holds, and that were predicted to be computed again.", "cause model"),
    Family("replica_placed_tokens", "Prompt tokens placed on a replica, estimated.", "replica"),
    Family("replica_computed_tokens", "Those of them predicted to be computed.", "replica"),
    Family("replica_requests", "Requests placed on a replica that ended, whatever their end.", "replica"),
    Family("replica_completion_tokens", "Tokens of its answers, counted as completion_tokens.", "replica"),
    Family("replica_ttft_seconds", "Time to the first event of a stream, in few buckets.", "replica", REPLICA_TTFT_S),
    Family("prewarm_requests", "Prompts sent to fill replicas' caches, by what became of them.", "result"),
    Family("prewarm_tokens", "Prompt tokens of those that were answered."),
    Family(
        "miss_tokens",
        "Prompt tokens that were computed, by why: by the engine's count where it told, else as predicted.",
        "reason model",
    ),
    Family(
        "hit_tokens",
        "Prompt tokens that were cached, likewise: in prompts asked for before (replay), or not (genuine).",
        "kind model",
    ),
    Family(
        "counted_prompt_tokens",
        "Prompt tokens of answers that do not say what was cached, on replicas whose own counters tell of them.",
        "model",
    ),
    Family("counted_cached_tokens", "Those of them that were cached, by these counters.", "model"),
    Family("replays", "Requests whose very prompt was asked for before, within the observatory's window."),
    Family(
        "differences",
        "Prompts that differ from an earlier one before tokens that both have, by what differs.",
        "change",
    ),
    Family("repairs", "Requests whose tools were put in order before they were sent, by what they needed.", "repair"),
)

KINDS = (  # kinds of failures (http/failures.py)
    "broke_early", "broke_midway", "connect", "engine", "garbage", "lost", "shed", "stale", "stalled",
    "stuck", "timeout", "unfinished",
)  # fmt: skip

# Series that are there from the first scrape on: one that begins with its first increment has no rate that shows it.
_OUTCOMES = (Ending.OK.value, Ending.CLIENT_LEFT.value, *KINDS)
BEGUN: dict[str, list[Labels]] = {
    "graded_requests": [(grade,) for grade in Grade],
    "predictions": [(grade, result) for grade in Grade for result in ("equal", "over", "under")],
    "overpredicted_tokens": [(grade,) for grade in Grade],
    "attempts": [(outcome,) for outcome in _OUTCOMES],
    "retries": [(kind,) for kind in KINDS],
    "worker_hub_lost_placements": [()],
    "reloads": [("ok",), ("refused",)],
    "prewarm_requests": [("ok",), ("failed",), ("skipped",)],
    "prewarm_tokens": [()],
    "replays": [()],
    "differences": [(change.value,) for change in Change],
    "repairs": [(repair,) for repair in REPAIRS],
}

# Series that begin with the first request of a model, for the first MODELS_BEGUN_MAX models; the model's label follows.
MODELS_BEGUN_MAX = 16
BEGUN_BY_MODEL: dict[str, list[Labels]] = {
    "shed_requests": [(code, each.name.lower()) for code in ("overloaded", "rate_limited") for each in Priority],
    "spills": [(cause.value,) for cause in SpillCause],
    "spilled_tokens": [(cause.value,) for cause in SpillCause],
    "miss_tokens": [(miss.value,) for miss in Miss],
    "hit_tokens": [("genuine",), ("replay",)],
    "counted_prompt_tokens": [()],
    "counted_cached_tokens": [()],
}
