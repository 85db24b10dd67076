"""Metrics of requests under the names of OpenTelemetry's conventions for generative AI, where `metrics.otel_names` is
set. Names are those that OpenTelemetry's own exporter for Prometheus makes of them: dots become underscores, and
seconds end the name.

Only requests that generate or embed are counted, by the conventions' operations. Labels are bounded: operations and
types of errors are fixed sets, models are those of tallies.py, and providers are the kinds of engines that replicas
name, the first PROVIDERS_MAX. An attribute that is not known is an empty label, which for Prometheus is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.core.facts.placements import Ending
from router.settings.keys import OTHER
from router.telemetry.record import RequestRecord
from router.telemetry.series import Histogram

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Routes -> names of operations in the conventions; other routes have none."""
PROVIDERS_MAX = 16  # kinds of engines told apart; the rest are one more
UNKNOWN = "unknown"  # provider of a model that no engine serves, or engines of several kinds

# Bounds of the conventions, which ask for exactly these. Their type has no length: mypyc 2.3 takes a constant tuple of
# floats for one that was never set.
Bounds = tuple[float, ...]
DURATION_S: Bounds = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_S: Bounds = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_S: Bounds = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Bounds = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)

_BASE = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_BROKE_OFF = (Ending.FAILED, "drained")  # `drained` is proxy.DRAINED: cut by the router itself


def error_type(record: RequestRecord) -> str | None:
    """The kind of error of a request that failed by the server's fault, as log lines have it; None for any other. It
    is never the client's message, which may quote the client's own words."""
    if record.status < 500 and record.ending not in _BROKE_OFF:
        return None
    return record.error or (str(record.status) if record.status >= 400 else str(record.ending))


class GenAiTallies:
    """The histograms of the conventions for one router, counted once per request, at its end."""

    def __init__(self, engines: Callable[[str], Iterable[str]], label: Callable[[str], str]) -> None:
        """`engines(model)` gives the kinds of engines that serve a model, `label(model)` its label in metrics."""
        self._engines, self._label = engines, label
        self._providers: set[str] = set()
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "With metrics.otel_names: duration of a generative AI request, from request read to answer ended.",
            DURATION_S, *_BASE, "error_type", prefix="",
        )  # fmt: skip
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "With metrics.otel_names: time to first token of streamed answers that succeeded.",
            TTFT_S, *_BASE, prefix="",
        )  # fmt: skip
        self._output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "With metrics.otel_names: mean time per output token after the first, of streamed answers that succeeded.",
            OUTPUT_TOKEN_S, *_BASE, prefix="",
        )  # fmt: skip
        self._tokens = Histogram(
            "gen_ai_client_token_usage",
            "With metrics.otel_names: input and output tokens of a request, as reported by the engine.",
            TOKENS, *_BASE, "gen_ai_token_type", prefix="",
        )  # fmt: skip

    def all(self) -> list[Histogram]:
        """All histograms, in the order of the page."""
        return [self._duration, self._ttft, self._output_token, self._tokens]

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        base = (operation, self._provider(record.model), self._label(record.model) if record.model else "")
        error = error_type(record)
        self._duration.add(self._duration.of(*base, (error or "").partition(":")[0]), record.duration_s)
        usage = record.usage
        if usage is not None:
            for kind, tokens in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
                self._tokens.add(self._tokens.of(*base, kind), tokens)
        if error is not None or record.ending != Ending.OK:
            return
        if record.ttft_s is not None:
            self._ttft.add(self._ttft.of(*base), record.ttft_s)
        if record.inter_token_s is not None:
            self._output_token.add(self._output_token.of(*base), _per_token_s(record, record.inter_token_s))

    def _provider(self, model: str) -> str:
        kinds = list(self._engines(model)) if model else []
        name = kinds[0] if len(kinds) == 1 else ""
        if not name:
            return UNKNOWN
        if name not in self._providers and len(self._providers) >= PROVIDERS_MAX:
            return OTHER
        self._providers.add(name)
        return name


def _per_token_s(record: RequestRecord, inter_event_s: float) -> float:
    """Time per output token after the first. Events may hold several tokens: where the engine told how many there
    were, the time between the first event and the last is divided among those."""
    usage = record.usage
    if usage is None or usage.completion_tokens < 2:
        return inter_event_s
    return inter_event_s * (record.events - 1) / (usage.completion_tokens - 1)
