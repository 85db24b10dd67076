"""Metrics under the names of endpoint pickers, if `metrics.aliases` requests them. Dashboards made for a picker keep
working: `llm_d_epp_*` are the names of llm-d's picker, `inference_*` its earlier names.

A metric is present only if the router knows its value with the same meaning and unit: tokens as engines report them,
times of answers that succeeded. docs/reference/names.md lists the differences. Both families of names share their
numbers. Bounds are the picker's own. Labels are bounded as in all metrics. `fairness_id` and the objective's priority
are absent, because the router has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from router.core.types.placements import EndReason
from router.telemetry.gen_ai import CLIENT_LEFT_STATUS, EMBEDDINGS, OPERATIONS
from router.telemetry.request_record import RequestRecord
from router.telemetry.series import Counter, Histogram

EPP, OLD = "llm_d_epp", "inference"
ALIASES = (EPP, OLD)
"""Families of names."""
MODEL = ("model_name", "target_model_name")
POOL = "warmroute"  # label value: the router's replicas are one pool, with this name

Bounds = tuple[float, ...]  # a type without a length, as in gen_ai.py
DURATION_S: Bounds = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
TTFT_S: Bounds = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0, 120.0,
)  # fmt: skip
TPOT_S: Bounds = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0,
)  # fmt: skip
NTPOT_S: Bounds = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# 32,778 is the picker's own value.
OUTPUT_TOKENS: Bounds = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT_TOKENS: Bounds = (*OUTPUT_TOKENS, 16384, 32778, 65536, 131072, 262144, 524288, 1048576)
QUEUE_S: Bounds = (
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Alias(NamedTuple):
    """Family under the picker's name. `old` is its name after `inference`; "" if it had none."""

    name: str
    old: str
    text: str
    labels: tuple[str, ...] = MODEL
    bounds: Bounds = ()


COUNTED: tuple[Alias, ...] = (
    Alias("request_total", "objective_request_total", "Requests that were placed."),
    Alias(
        "request_error_total", "objective_request_error_total", "Requests that failed, by status.",
        (*MODEL, "error_code"),
    ),
    Alias(
        "request_duration_seconds", "objective_request_duration_seconds",
        "Duration of requests that succeeded, from request read to answer ended.", bounds=DURATION_S,
    ),
    Alias(
        "request_ttft_seconds", "", "Time from request read to first token; to the answer's end if it is not streamed.",
        (*MODEL, "streaming"), TTFT_S,
    ),
    Alias("request_input_tokens", "objective_input_tokens", "Prompt tokens, as reported.", bounds=PROMPT_TOKENS),
    Alias("request_output_tokens", "objective_output_tokens", "Tokens of answers, as reported.", bounds=OUTPUT_TOKENS),
    Alias(
        "request_cached_tokens", "objective_prompt_cached_tokens", "Cached prompt tokens, as reported.",
        bounds=PROMPT_TOKENS,
    ),
    Alias(
        "request_ntpot_seconds", "objective_normalized_time_per_output_token_seconds",
        "Duration divided by the answer's tokens.", bounds=NTPOT_S,
    ),
    Alias(
        "request_streaming_tpot_seconds", "", "Mean time per token after the first, of streams.", bounds=TPOT_S
    ),
    Alias(
        "flow_control_request_queue_duration_seconds", "extension_flow_control_request_queue_duration_seconds",
        "Time in the router's queue, 0 for requests that did not wait, by outcome.",
        ("outcome", "inference_pool", *MODEL), QUEUE_S,
    ),
)  # fmt: skip
"""Families that are counted once per request, at its end."""
DISPATCHED, NO_ROOM, LEFT, REJECTED = "Dispatched", "RejectedCapacity", "EvictedContextCancelled", "RejectedOther"


class EppTallies:
    """Counted families of one router."""

    def __init__(self, aliases: Collection[str], label: Callable[[str], str]) -> None:
        """`aliases`: members of ALIASES. `label(model)`: the model's label in metrics."""
        self._label = label
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._shown: list[Counter | Histogram] = []
        for each in COUNTED:
            made = _family(each, f"{EPP}_{each.name}")
            if isinstance(made, Counter):
                self._counters[each.name] = made
            else:
                self._histograms[each.name] = made
            if EPP in aliases:
                self._shown.append(made)
            if OLD in aliases and each.old:
                twin = _family(each, f"{OLD}_{each.old}")
                twin.series = made.series
                self._shown.append(twin)

    def list_families(self) -> list[Counter | Histogram]:
        """Return the requested families, in the order of the page."""
        return self._shown

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        operation = OPERATIONS.get(record.route)
        if operation is None or not record.model:
            return
        label = self._label(record.model)
        model = (label, label)
        placed = record.receipt is not None
        if placed:
            self._counters["request_total"].get_series(*model)[0] += 1
        if record.status >= 400 and record.status != CLIENT_LEFT_STATUS:
            self._counters["request_error_total"].get_series(*model, str(record.status))[0] += 1
        self._add("flow_control_request_queue_duration_seconds", record.queued_s, _outcome(record), POOL, *model)
        if placed and record.ending == EndReason.OK and record.status < 400:
            self._observe_answer(record, model, streams=operation != EMBEDDINGS and record.stream)

    def _observe_answer(self, record: RequestRecord, model: tuple[str, str], *, streams: bool) -> None:
        duration_s, usage = record.duration_s, record.usage
        self._add("request_duration_seconds", duration_s, *model)
        first_s: float | None = duration_s
        if streams:
            first_s = None if record.ttft_s is None else (record.overhead_s or 0.0) + record.ttft_s
        if first_s is not None:
            self._add("request_ttft_seconds", first_s, *model, "true" if streams else "false")
        if usage is None:
            return
        self._add("request_input_tokens", usage.prompt_tokens, *model)
        self._add("request_output_tokens", usage.completion_tokens, *model)
        if usage.cached_tokens is not None:
            self._add("request_cached_tokens", usage.cached_tokens, *model)
        if usage.completion_tokens:
            self._add("request_ntpot_seconds", duration_s / usage.completion_tokens, *model)
        if streams and first_s is not None and usage.completion_tokens > 1:
            self._add("request_streaming_tpot_seconds", (duration_s - first_s) / (usage.completion_tokens - 1), *model)

    def _add(self, name: str, value: float, *labels: str) -> None:
        histogram = self._histograms[name]
        histogram.add(histogram.get_series(*labels), value)


def _family(alias: Alias, name: str) -> Counter | Histogram:
    """Return a family of this name. A counter's name omits the ending that the page adds."""
    text = f"With metrics.aliases: {alias.text[0].lower()}{alias.text[1:]}"
    if alias.bounds:
        return Histogram(name, text, alias.bounds, *alias.labels, prefix="")
    return Counter(name.removesuffix("_total"), text, *alias.labels, prefix="")


def _outcome(record: RequestRecord) -> str:
    """Return the outcome of a request in the queue, in the picker's terms."""
    if record.receipt is not None:
        return DISPATCHED
    if record.status == CLIENT_LEFT_STATUS:
        return LEFT
    return NO_ROOM if record.error == "overloaded" else REJECTED
