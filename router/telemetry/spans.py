"""Moments that are recorded for a traced request while it is served, and the spans that are made of them at its end.

    POST /v1/chat/completions      server span: the whole request
      parse                        body parsed and hashed, prompt turned into token ids
      match and place              one step of the router, on the event loop or in the control plane's process
        queue                      part of it: waited in the queue
      POST                         client span: one attempt on a replica; a retry is another
        stream                     from the answer's first event to its end

A moment is one reading of the clock, recorded by the code that has just finished a step. Span ids are needed early,
because the request to the replica carries the id of the calling span; all other attributes come from the request's
record. Names of attributes follow OpenTelemetry's conventions for HTTP and generative AI if these define one. No span
contains text of a prompt or an answer, a key, a name that a client gives itself, or the id of a stored response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from router.core.dialects.response_metadata import ResponseMetadata, metadata_of, metadata_of_stream
from router.core.types.placements import EndReason, Receipt
from router.core.types.replicas import Replica
from router.telemetry.request_record import RequestRecord
from router.telemetry.trace_context import Parent, traceparent

Attributes: TypeAlias = dict[str, str | int | float | bool | tuple[str, ...]]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Routes -> names of operations in OpenTelemetry's conventions; other routes have no operation."""
ID_ROUTES = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages"))  # engines keep no answer of these

_BROKE_OFF = (EndReason.FAILED, "drained")  # `drained` is proxy.DRAINED: cut by the router itself


@dataclass(slots=True)
class Attempt:
    """One call of a replica. Times are in seconds of the request's clock."""

    receipt: Receipt
    span_id: int
    at_s: float
    first_byte_s: float | None = None  # time of the first whole event of a stream
    first_token_s: float | None = None  # time of the first event of a stream with output
    end_s: float | None = None  # None: the attempt lasts until the request ends
    status: int = 0  # status of the engine's answer; 0: no answer
    failure: str = ""  # kind of failure before an answer began; "" for none


class RequestTrace:
    """Moments of one traced request."""

    __slots__ = (
        "_new_id", "attempts", "begun_s", "head", "method", "parent", "parsed_s", "path", "provider", "span_id",
        "state", "stored", "tail", "tenant", "trace_id", "version",
    )  # fmt: skip

    def __init__(
        self,
        trace_id: int,
        parent: Parent | None,
        *,
        begun_s: float,
        method: str,
        path: str,
        version: str,
        state: str,
        new_id: Callable[[], int],
    ) -> None:
        """`version`: the HTTP version. `state`: the client's `tracestate`. `new_id`: makes ids of spans."""
        self.trace_id = trace_id
        self.span_id = new_id()
        self.parent = parent
        self.begun_s = begun_s
        self.method, self.path, self.version = method, path, version
        self.state = state
        self.tenant = ""  # the tenant of a verified API key; "" for none
        self.provider = ""  # the kind of engine that serves the model; "" if there are several kinds, or it is unknown
        self.parsed_s: float | None = None
        self.head = b""  # the whole answer or the first bytes of a stream, once it ended; empty for an error
        self.tail: bytes | None = None  # last bytes of an answer that was relayed; None for one that was sent whole
        self.stored = False  # True if the answer is stored, and can then be read by its id
        self.attempts: list[Attempt] = []
        self._new_id = new_id

    def record_call(self, receipt: Receipt, now_s: float) -> bytes:
        """Record the call of a replica. Returns the `traceparent` header line for it."""
        span_id = self._new_id()
        self.attempts.append(Attempt(receipt, span_id, now_s))
        return b"traceparent: %b\r\n" % traceparent(self.trace_id, span_id, sampled=True)

    def record_response(self, status: int, now_s: float, *, whole: bool) -> None:
        """Record that the last attempt's answer has begun, or is complete if `whole`."""
        attempt = self.attempts[-1]
        attempt.status = status
        if whole:
            attempt.end_s = now_s
        else:
            attempt.first_byte_s = now_s

    def record_first_token(self, now_s: float) -> None:
        """Record that the last attempt's stream has its first output."""
        self.attempts[-1].first_token_s = now_s

    def record_failure(self, kind: str, status: int, now_s: float) -> None:
        """Record that the last attempt failed before its answer began."""
        attempt = self.attempts[-1]
        attempt.failure, attempt.end_s = kind, now_s
        attempt.status = status or attempt.status


@dataclass(slots=True)
class Span:
    """Span. Its times are seconds since the request began."""

    name: str
    span_id: int
    parent_id: int | None
    start_s: float
    end_s: float
    kind: str = "internal"  # `internal`, `server` or `client`
    attributes: Attributes = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)  # (name, seconds since the request began)
    error: str | None = None  # description of the error; None: no error


def spans_of(moments: RequestTrace, record: RequestRecord, scheme: str, new_id: Callable[[], int]) -> list[Span]:
    """Return all spans of a request that has ended, the server span first. `scheme` is that of the router's
    listener."""
    end_s = record.times.duration_s
    own = moments.span_id
    at = moments.begun_s
    parsed_s = None if moments.parsed_s is None else moments.parsed_s - at
    spans = [
        _server(moments, record, scheme),
        Span("parse", new_id(), own, 0.0, end_s if parsed_s is None else parsed_s),
    ]
    if parsed_s is None:
        return spans
    since_s: float = parsed_s
    for number, attempt in enumerate(moments.attempts):
        spans.append(_make_placement_span(attempt.receipt, new_id(), own, since_s, attempt.at_s - at))
        if not number:
            spans += _queue(record, spans[-1], new_id)
        spans.append(_call(moments, record, number, end_s))
        if attempt.first_byte_s is not None and not attempt.failure:
            spans.append(_stream(record, new_id(), attempt, attempt.first_byte_s - at, spans[-1].end_s))
        since_s = spans[-1].end_s
    if not moments.attempts:
        spans.append(Span("match and place", new_id(), own, since_s, end_s, error=record.error))
        spans += _queue(record, spans[-1], new_id)
    return spans


def _server(moments: RequestTrace, record: RequestRecord, scheme: str) -> Span:
    about: Attributes = {
        "http.request.method": moments.method,
        "http.route": record.route,
        "url.scheme": scheme,
        "network.protocol.version": moments.version,
        "http.response.status_code": record.status,
        "warmroute.request_id": record.id,
        "warmroute.ending": str(record.ending),
        "warmroute.retries": len(record.retries),
    }
    if moments.path == record.route:  # otherwise the path has the id of a stored response
        about["url.path"] = moments.path
    if record.times.queued_s > 0:
        about["warmroute.queued_seconds"] = record.times.queued_s
    if moments.tenant:
        about["warmroute.tenant"] = moments.tenant
    _tell_generation(about, record, moments.provider)
    if moments.head:
        told = metadata_of(moments.head) if moments.tail is None else metadata_of_stream(moments.head, moments.tail)
        _tell_answer(about, told, with_id=record.route in ID_ROUTES and not moments.stored)
    if record.receipt is not None:
        about |= _make_placement_attributes(record.receipt)
    error = _error_type(record)
    if error is not None:
        about["error.type"] = error.partition(":")[0]
    parent_id = moments.parent.span_id if moments.parent is not None else None
    name = f"{moments.method} {record.route}"
    return Span(name, moments.span_id, parent_id, 0.0, record.times.duration_s, "server", about, error=error)


def _tell_generation(about: Attributes, record: RequestRecord, provider: str) -> None:
    if record.route in OPERATIONS:
        about["gen_ai.operation.name"] = OPERATIONS[record.route]
    if provider:
        about["gen_ai.provider.name"] = provider
    if conversation := _conversation(record):
        about["gen_ai.conversation.id"] = conversation
    if record.client.agent:
        about["warmroute.agent"] = record.client.agent
    if record.client.agent_parent:
        about["warmroute.agent_parent"] = record.client.agent_parent
    if record.model:
        about["gen_ai.request.model"] = record.model
        about["gen_ai.request.stream"] = record.stream
    if record.times.ttft_s is not None:
        about["gen_ai.response.time_to_first_chunk"] = record.times.ttft_s
    if (usage := record.usage) is not None:
        about["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        about["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            about["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens


def _conversation(record: RequestRecord) -> str:
    """Return the conversation's key, never a text of the client. It comes from the client's own id of the agent or
    session, otherwise from the texts of its prompts."""
    if record.client.agent_id or record.client.session:
        return record.client.agent_id or record.client.session
    seen = record.cache.analysis
    return f"{seen.conversation:016x}" if seen is not None and seen.conversation else ""


def _tell_answer(about: Attributes, told: ResponseMetadata, *, with_id: bool) -> None:
    if told.model:
        about["gen_ai.response.model"] = told.model
    if told.reasons:
        about["gen_ai.response.finish_reasons"] = told.reasons
    if told.id and with_id:
        about["gen_ai.response.id"] = told.id
    if told.reasoning_tokens is not None:
        about["gen_ai.usage.reasoning.output_tokens"] = told.reasoning_tokens
    if told.cache_write_tokens is not None:  # the conventions have renamed it from `cache_creation`
        about["gen_ai.usage.cache_write.input_tokens"] = told.cache_write_tokens
        about["gen_ai.usage.cache_creation.input_tokens"] = told.cache_write_tokens


def _make_placement_attributes(receipt: Receipt) -> Attributes:
    return {
        "warmroute.replica": receipt.replica,
        "warmroute.policy": receipt.policy,
        "warmroute.reason": str(receipt.reason),
        "warmroute.grade": str(receipt.grade),
        "warmroute.prompt_tokens": receipt.prompt_tokens,
        "warmroute.predicted_cached_tokens": receipt.predicted_cached_tokens,
        "warmroute.predicted_tier_tokens": receipt.predicted_tier_tokens,
        "warmroute.predicted_pull_tokens": receipt.pull.tokens if receipt.pull is not None else 0,
        **receipt.stage_fields("warmroute."),
    }


def _make_placement_span(receipt: Receipt, span_id: int, parent_id: int, start_s: float, end_s: float) -> Span:
    return Span("match and place", span_id, parent_id, start_s, end_s, attributes=_make_placement_attributes(receipt))


def _queue(record: RequestRecord, placing: Span, new_id: Callable[[], int]) -> list[Span]:
    """Return the span of waiting. It ends when the request leaves the queue, and the request is placed at once."""
    if record.times.queued_s <= 0:
        return []
    start_s = max(placing.start_s, placing.end_s - record.times.queued_s)
    return [Span("queue", new_id(), placing.span_id, start_s, placing.end_s)]


def _call(moments: RequestTrace, record: RequestRecord, number: int, end_s: float) -> Span:
    attempt = moments.attempts[number]
    at, replica = moments.begun_s, Replica(attempt.receipt.replica)
    server = urlsplit(replica.url)
    about: Attributes = {
        "http.request.method": moments.method,
        "server.address": server.hostname or "",
        "server.port": server.port or (443 if server.scheme == "https" else 80),
        "warmroute.replica": replica.id,
    }
    if moments.path == record.route:
        about["url.full"] = replica.url + moments.path
    if attempt.status:
        about["http.response.status_code"] = attempt.status
    if number:
        about["http.request.resend_count"] = number
    error = attempt.failure or (str(attempt.status) if attempt.status >= 400 else None)
    if error is None and record.ending == EndReason.FAILED:  # the answer ended early
        error = _error(record)
    if error is not None:
        about["error.type"] = error.partition(":")[0]
    events = []
    if attempt.first_byte_s is not None:
        events.append(("first byte", attempt.first_byte_s - at))
    if attempt.first_token_s is not None:
        events.append(("first token", attempt.first_token_s - at))
    until_s = end_s if attempt.end_s is None else attempt.end_s - at
    start_s = attempt.at_s - at
    span_id = attempt.span_id
    return Span(moments.method, span_id, moments.span_id, start_s, until_s, "client", about, events, error)


def _stream(record: RequestRecord, span_id: int, attempt: Attempt, start_s: float, end_s: float) -> Span:
    about: Attributes = {"warmroute.events": record.times.events}
    if record.times.inter_token_s is not None:
        about["warmroute.inter_token_seconds"] = record.times.inter_token_s
    error = _error(record) if record.ending in _BROKE_OFF else None
    return Span("stream", span_id, attempt.span_id, start_s, end_s, attributes=about, error=error)


def _error_type(record: RequestRecord) -> str | None:
    """Return the kind of error of a request that failed by the server's fault; None for any other."""
    return _error(record) if record.status >= 500 or record.ending in _BROKE_OFF else None


def _error(record: RequestRecord) -> str:
    """Return the kind of error, as in log lines. It is never the client's message, which may quote the client's own
    words."""
    return record.error or (str(record.status) if record.status >= 400 else str(record.ending))
