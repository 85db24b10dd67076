"""Metrics of requests under the names of OpenTelemetry's conventions for generative AI, if `metrics.otel_names` is set.
The names are those that OpenTelemetry's own exporter for Prometheus produces: dots become underscores, a unit of
seconds ends the name, and counters end with `_total`.

In these conventions a router has both roles. It is a server to its clients, from the request read to the answer ended.
It is a client of its replicas, from the first call to the end, retries included. Names that the conventions have
changed are present twice, because dashboards exist for both; the two share their numbers.

Only requests that generate or embed are counted, by the conventions' operations. Labels are bounded: operations and
types of errors are fixed sets, models are those of counters.py, and providers are the kinds of engines that replicas
name, the first PROVIDERS_MAX. An unknown attribute is an empty label, which Prometheus treats as absent. Values that
engines do not report are not counted: modality, reasoning tokens, tokens written to a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.config.api_keys import OTHER
from router.core.types.placements import EndReason
from router.telemetry.request_record import RequestRecord
from router.telemetry.series import Counter, Histogram

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Routes -> names of operations in the conventions; other routes have no operation."""
PROVIDERS_MAX = 16  # kinds of engines with a label value each; the rest share one
UNKNOWN = "unknown"  # provider of a model that no engine serves, or engines of several kinds; modality of tokens
EMBEDDINGS = "embeddings"  # the only operation that is not inference

# The conventions require exactly these bounds. Their type has no length: mypyc 2.3 takes a constant tuple of floats for
# one that was never set.
Bounds = tuple[float, ...]
DURATION_S: Bounds = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_S: Bounds = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
OUTPUT_TOKEN_S: Bounds = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Bounds = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)

PREFIX, WITH = "gen_ai_", "With metrics.otel_names: "
_BASE = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_BROKE_OFF = (EndReason.FAILED, "drained")  # `drained` is proxy.DRAINED: cut by the router itself
CLIENT_LEFT_STATUS = 499  # not an error of a replica


def error_type(record: RequestRecord) -> str | None:
    """Return the kind of error, as in log lines, of a request that failed by the server's fault; None for any other. It
    is never the client's message, which may quote the client's own words."""
    if record.status < 500 and record.ending not in _BROKE_OFF:
        return None
    return record.error or (str(record.status) if record.status >= 400 else str(record.ending))


class GenAiTallies:
    """Metrics of the conventions for one router, counted once per request, at its end."""

    def __init__(self, engines: Callable[[str], Iterable[str]], label: Callable[[str], str]) -> None:
        """`engines(model)`: the kinds of engines that serve a model. `label(model)`: the model's label in metrics."""
        self._engines, self._label = engines, label
        self._providers: set[str] = set()
        self._duration = _histogram(
            "server_request_duration_seconds",
            "duration of a generative AI request, from request read to answer ended.", DURATION_S, "error_type",
        )  # fmt: skip
        self._ttft = _histogram(
            "server_time_to_first_token_seconds", "time to first token of streamed answers that succeeded.", TTFT_S
        )
        self._output_token = _histogram(
            "server_time_per_output_token_seconds",
            "mean time per output token after the first, of streamed answers that succeeded.", OUTPUT_TOKEN_S,
        )  # fmt: skip
        self._tokens = _histogram(
            "client_token_usage", "input and output tokens of a request, as reported by the engine.", TOKENS,
            "gen_ai_token_type",
        )  # fmt: skip
        text = "duration of a request to replicas, from the first call to the answer's end, retries included."
        self._called = _histogram("client_operation_duration_seconds", text, DURATION_S, "error_type")
        self._inferred = _histogram("client_inference_duration_seconds", _newer(text), DURATION_S, "error_type")
        text = "time from the first call of a replica to the first token of a streamed answer."
        self._first_chunk = _histogram("client_operation_time_to_first_chunk_seconds", text, DURATION_S)
        self._first_inferred = _histogram("client_inference_time_to_first_chunk_seconds", _newer(text), DURATION_S)
        self._used = [
            Counter(f"client_inference_usage_{name}", f"{WITH}{text}", *_BASE, "gen_ai_token_modality", prefix=PREFIX)
            for name, text in (
                ("input_tokens", "prompt tokens as reported by engines, cached ones included."),
                ("output_tokens", "tokens of answers as reported by engines."),
                ("cache_read_input_tokens", "prompt tokens that engines reported as cached."),
            )
        ]
        self._of_operation = [
            _histogram(f"client_inference_operation_{name}", text, TOKENS)
            for name, text in (
                ("input_tokens", "prompt tokens of a request that succeeded, as reported by the engine."),
                ("output_tokens", "tokens of an answer that succeeded, as reported by the engine."),
            )
        ]

    def list_families(self) -> list[Counter | Histogram]:
        """Return all families, in the order of the page."""
        served: list[Counter | Histogram] = [self._duration, self._ttft, self._output_token, self._tokens]
        called: list[Counter | Histogram] = [self._called, self._inferred, self._first_chunk, self._first_inferred]
        return [*served, *called, *self._used, *self._of_operation]

    def observe(self, record: RequestRecord) -> None:
        """Count one request at its end."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        base = (operation, self._provider(record.model), self._label(record.model) if record.model else "")
        error = error_type(record)
        kind = (error or "").partition(":")[0]
        self._duration.add(self._duration.get_series(*base, kind), record.duration_s)
        usage = record.usage
        if usage is not None:
            for of, tokens in (("input", usage.prompt_tokens), ("output", usage.completion_tokens)):
                self._tokens.add(self._tokens.get_series(*base, of), tokens)
        succeeded = error is None and record.ending == EndReason.OK
        if record.receipt is not None:
            self._observe_client(record, base, kind, succeeded=succeeded)
        if not succeeded:
            return
        if record.ttft_s is not None:
            self._ttft.add(self._ttft.get_series(*base), record.ttft_s)
        if record.inter_token_s is not None:
            self._output_token.add(self._output_token.get_series(*base), _per_token_s(record, record.inter_token_s))

    def _observe_client(
        self, record: RequestRecord, base: tuple[str, str, str], error: str, *, succeeded: bool
    ) -> None:
        """Count a request that was sent to replicas. A request that an engine refused counts as failed, because it
        failed for its client."""
        if not error and 400 <= record.status != CLIENT_LEFT_STATUS:
            error = str(record.status)
        infers = base[0] != EMBEDDINGS
        called_s = max(0.0, record.duration_s - (record.overhead_s or 0.0))
        series = _get_shared_series(self._called, self._inferred if infers else None, (*base, error))
        self._called.add(series, called_s)
        if record.ttft_s is not None:
            series = _get_shared_series(self._first_chunk, self._first_inferred if infers else None, base)
            self._first_chunk.add(series, record.ttft_s)
        if not infers:
            return
        usage = record.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens or 0) if usage else (0, 0, 0)
        for counter, tokens in zip(self._used, counts, strict=True):
            counter.get_series(*base, UNKNOWN)[0] += tokens
        if usage is not None and succeeded:
            for histogram, tokens in zip(self._of_operation, counts[:2], strict=True):
                histogram.add(histogram.get_series(*base), tokens)

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
    """Return the time per output token after the first. Events may hold several tokens: if the engine reported the
    number of tokens, the time between the first event and the last is divided among them."""
    usage = record.usage
    if usage is None or usage.completion_tokens < 2:
        return inter_event_s
    return inter_event_s * (record.events - 1) / (usage.completion_tokens - 1)


def _histogram(name: str, text: str, bounds: Bounds, *labels: str) -> Histogram:
    return Histogram(name, f"{WITH}{text}", bounds, *_BASE, *labels, prefix=PREFIX)


def _newer(text: str) -> str:
    """Return the help text of a family that has two names."""
    return f"{text.removesuffix('.')}; the conventions' newer name, without embeddings."


def _get_shared_series(histogram: Histogram, twin: Histogram | None, labels: tuple[str, ...]) -> list[float]:
    """Return the series with these label values. The twin shares it: the series is counted once and shown under both
    names."""
    series = histogram.series.get(labels)
    if series is None:
        series = histogram.get_series(*labels)
        if twin is not None:
            twin.series[labels] = series
    return series
