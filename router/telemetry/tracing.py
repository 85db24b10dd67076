"""OpenTelemetry traces; the only importer of opentelemetry, and only if `tracing.endpoint` is set.

While a request is served, its trace costs only the recording of moments (spans.py). Spans are made of them once the
answer is written, for sampled requests only. They wait in a bounded queue for OpenTelemetry's own thread, which sends
them by OTLP over HTTP. A slow or absent collector costs spans, which are counted, and delays no request.

With a `traceparent` the client decides if its request is sampled. Without one the ratio decides, by the trace id. The
router sends the decision to the replica even for an unsampled request: otherwise the replica would make its own
decision, and export a part of a trace without its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from router import __version__
from router.config.schema import TracingSettings
from router.http.failures import describe
from router.http.request import Request
from router.telemetry.request_record import RequestRecord
from router.telemetry.spans import RequestTrace, Span, spans_of
from router.telemetry.trace_context import (
    SPAN_ID_BITS,
    TRACE_ID_BITS,
    TRACEPARENT,
    TRACESTATE,
    Parent,
    is_sampled,
    parse,
    traceparent,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

PATH = "/v1/traces"  # OTLP's default, if the endpoint has no path
FLUSH_S = 2.0  # longest wait for spans to be sent when the router ends
# Less than OpenTelemetry's own 512 and 5,000: encoding a span takes 40 us, during which the event loop may wait.
BATCH_SPANS_MAX = 128
DELAY_MS, DELAY_NAME = 1_000, "OTEL_BSP_SCHEDULE_DELAY"
STATE_BYTES_MAX = 4 << 10  # longest `tracestate` passed on; W3C Trace Context 3.3.1.5 asks for at least 512 bytes
NOISY = ("opentelemetry", "urllib3")  # loggers that repeat errors for every batch, with URLs and header values
EXPORTS = ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3")
_PHRASES = frozenset(status.phrase for status in HTTPStatus)


def problems(endpoint: str) -> list[str]:
    """Return the problems of `tracing.endpoint`, without quoting the URL, which may contain a password."""
    if not endpoint:
        return []
    try:
        parts = urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        fine = fine and endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
    except ValueError:
        fine, parts = False, urlsplit("")
    if not fine:
        return [f"'tracing.endpoint': is not a URL such as http://collector:4318{PATH}"]
    if "@" in parts.netloc or "?" in endpoint or "#" in endpoint:
        what = "use OTEL_EXPORTER_OTLP_HEADERS for credentials"
        return [f"'tracing.endpoint': must have only host, port and path; {what}"]
    try:
        missing = find_spec("opentelemetry.exporter.otlp.proto.http") is None
    except ModuleNotFoundError:
        missing = True
    return ["'tracing.endpoint': needs OpenTelemetry: pip install '.[tracing]'"] if missing else []


class Tracer:
    """Begins and ends traces. It starts a thread, so make it after a fork and not before."""

    def __init__(self, settings: TracingSettings, *, scheme: str) -> None:
        """`scheme` is that of the listener. These variables of OpenTelemetry apply too: OTEL_EXPORTER_OTLP_HEADERS,
        _CERTIFICATE and _TIMEOUT, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY."""
        self._ratio = settings.sample_ratio
        self._scheme = scheme
        ids = random.Random(secrets.randbits(256))  # noqa: S311 - ids that must differ and may be guessed
        self._trace_id = partial(ids.getrandbits, TRACE_ID_BITS)
        self._bits = partial(ids.getrandbits, SPAN_ID_BITS)
        self._queue = _SpanQueue(settings)

    @property
    def dropped(self) -> int:
        """Spans that did not reach the collector."""
        return self._queue.dropped

    def _span_id(self) -> int:
        return self._bits() or 1  # 0 is an invalid id

    def begin(self, request: Request, now_s: float) -> RequestTrace | None:
        """Begin the trace of a request; None if it is not sampled. Afterwards the request's header lines are those for
        the replica. The `traceparent` of a sampled request comes from `RequestTrace.record_call`."""
        parent = self._parent(request)
        if parent is not None and not parent.sampled:
            return None  # not sampled by the client: both headers are passed on unchanged
        trace_id = parent.trace_id if parent is not None else self._trace_id() or 1
        if parent is None and not is_sampled(trace_id, self._ratio):
            value = traceparent(trace_id, self._span_id(), sampled=False)
            request.lines.append((TRACEPARENT, TRACEPARENT, value))
            return None
        state = _state(request) if parent is not None else ""
        _leave_out(request, TRACEPARENT)
        return RequestTrace(
            trace_id,
            parent,
            begun_s=now_s,
            method=request.method,
            path=request.path,
            version=request.version,
            state=state,
            new_id=self._span_id,
        )

    def _parent(self, request: Request) -> Parent | None:
        """Return the client's `traceparent`. Without a valid one return None and drop both headers."""
        given = request.fields.get(TRACEPARENT)
        if given is None:
            if TRACESTATE in request.fields:
                _leave_out(request, TRACESTATE)
            return None
        alone = sum(low == TRACEPARENT for low, _, _ in request.lines) == 1
        parent = parse(given) if alone else None
        if parent is None:
            _leave_out(request, TRACEPARENT, TRACESTATE)
        return parent

    def schedule_export(self, moments: RequestTrace, record: RequestRecord) -> None:
        """Schedule the export of an ended request. Its spans are made in the event loop's next turn, after writes to
        clients."""
        asyncio.get_running_loop().call_soon(self._export, moments, record)

    def _export(self, moments: RequestTrace, record: RequestRecord) -> None:
        try:
            self._queue.put(moments, spans_of(moments, record, self._scheme, self._span_id), record.at_s)
        except Exception:  # a bug, which must not stop the router
            log.exception(
                "bug: spans of a request cannot be created", extra={"event": "bug", "fields": {"request_id": record.id}}
            )

    async def close(self) -> None:
        """Send the spans that wait; after FLUSH_S the rest is dropped."""
        await asyncio.sleep(0)  # spans of requests that ended in this turn are made first
        await self._queue.close()


def _state(request: Request) -> str:
    """Return the client's `tracestate`, lines joined; "" if it is too long."""
    values = [value for low, _, value in request.lines if low == TRACESTATE]
    if sum(map(len, values)) > STATE_BYTES_MAX:
        _leave_out(request, TRACESTATE)
        return ""
    return b",".join(values).decode("latin-1")


def _leave_out(request: Request, *names: bytes) -> None:
    request.lines = [line for line in request.lines if line[0] not in names]


class _SpanQueue:
    """OpenTelemetry's BatchSpanProcessor, with a count of spans that are dropped."""

    def __init__(self, settings: TracingSettings) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource.create(
            {
                "service.name": settings.service_name,
                "service.version": __version__,
                "service.instance.id": secrets.token_hex(16),  # each process is an instance
            }
        )
        self._scope = InstrumentationScope("warmroute", __version__)
        self._spans_max = settings.queue_spans_max
        self._put = self._full = 0
        self._exporter = _Exporter(settings.endpoint)
        self._processor = BatchSpanProcessor(
            cast("SpanExporter", self._exporter),
            max_queue_size=settings.queue_spans_max,
            schedule_delay_millis=None if os.environ.get(DELAY_NAME) else DELAY_MS,  # None: the variable's value
            max_export_batch_size=min(BATCH_SPANS_MAX, settings.queue_spans_max),
        )

    @property
    def dropped(self) -> int:
        """Spans that did not fit into the queue or that the collector did not take."""
        return self._full + self._exporter.lost

    def put(self, moments: RequestTrace, spans: Sequence[Span], at_s: float) -> None:
        """Queue all spans of a request, or none of them. `at_s` is the Unix time at which the request began."""
        # The processor's own queue drops the oldest spans silently. It is never longer than this class's count: a batch
        # is taken from it before the thread passes it to the exporter.
        if self._put - self._exporter.taken + len(spans) > self._spans_max:
            self._full += len(spans)
            return
        self._put += len(spans)
        for span in self._build_otel_spans(moments, spans, round(at_s * 1e9)):
            self._processor.on_end(span)

    def _build_otel_spans(self, moments: RequestTrace, spans: Sequence[Span], at_ns: int) -> list[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
        state = TraceState.from_header([moments.state]) if moments.state else None
        flags, unset = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)

        def context(span_id: int, *, remote: bool) -> SpanContext:
            return SpanContext(moments.trace_id, span_id, is_remote=remote, trace_flags=flags, trace_state=state)

        return [
            ReadableSpan(
                span.name,
                context=context(span.span_id, remote=False),
                parent=context(span.parent_id, remote=span.kind == "server") if span.parent_id else None,
                resource=self._resource,
                attributes=cast("dict[str, Any]", span.attributes),
                events=[Event(name, timestamp=at_ns + round(s * 1e9)) for name, s in span.events],
                kind=kinds[span.kind],
                status=unset if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=at_ns + round(span.start_s * 1e9),
                end_time=at_ns + round(span.end_s * 1e9),
                instrumentation_scope=self._scope,
            )
            for span in spans
        ]

    async def close(self) -> None:
        """Send the spans that wait; after FLUSH_S the rest is dropped."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            self._exporter.library_log.restore()
            with suppress(RuntimeError):  # the event loop no longer waits
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=flush, name="flush spans", daemon=True).start()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await sent.wait()
        finally:
            self._exporter.shutdown()
            if left := self._put - self._exporter.sent - self._exporter.lost:
                log.warning("unsent spans at shutdown", extra={"event": "spans_lost", "fields": {"spans": left}})


class _LibraryLog(logging.Handler):
    """Takes over the log of OpenTelemetry and of the libraries below it, which repeat an error for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""  # reason that the last batch could not be sent, if it is safe to log
        for name in NOISY:
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Record why a batch could not be sent. Of any other record, such as a variable that OpenTelemetry does not
        understand, log the text without its values, which may be a key."""
        if record.levelno < logging.WARNING:
            return
        values = record.args if isinstance(record.args, tuple) else ()
        if record.name.startswith(EXPORTS):
            self.why = next(filter(None, map(redact, values)), self.why)
        else:
            fields = {"what": record.msg if values else record.name}
            log.warning("OpenTelemetry warns", extra={"event": "tracing_warning", "fields": fields})

    def restore(self) -> None:
        """Give the libraries' loggers back once sending has stopped."""
        for name in NOISY:
            logging.getLogger(name).removeHandler(self)
            logging.getLogger(name).propagate = True


class _Exporter:
    """OpenTelemetry's exporter with a count of spans. It logs a failure once when it begins, and once when it ends."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        parts = urlsplit(endpoint)
        path = parts.path if parts.path.strip("/") else PATH
        self._collector = parts.netloc
        self._results = SpanExportResult
        self.taken = self.sent = self.lost = 0  # numbers of spans
        self._failing, self._shut = False, False
        self.library_log = _LibraryLog()  # before the exporter, which warns of its variables
        self._exporter = OTLPSpanExporter(f"{parts.scheme}://{parts.netloc}{path}")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch. Called by the processor."""
        self.taken += len(spans)
        try:
            result = self._results.FAILURE if self._shut else self._exporter.export(spans)
        except Exception as error:  # the exporter should never raise
            self.library_log.why, result = redact(error), self._results.FAILURE
        failed = result is not self._results.SUCCESS
        if failed:
            self.lost += len(spans)
        else:
            self.sent += len(spans)
        if failed is not self._failing and not self._shut:
            self._failing = failed
            if failed:
                fields = {"collector": self._collector, "why": self.library_log.why or "unknown"}
                log.warning("the collector accepts no spans", extra={"event": "collector_down", "fields": fields})
            else:
                log.info(
                    "the collector accepts spans again",
                    extra={"event": "collector_up", "fields": {"collector": self._collector}},
                )
        return result

    def shutdown(self) -> None:
        """Stop sending, and cut short the wait before another try. Called by the processor, and by `close` after its
        longest wait."""
        if not self._shut:
            self._shut = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def redact(value: object) -> str:
    """Return a status, or the kind of an error; "" for text that may contain anything."""
    if isinstance(value, BaseException):
        while (cause := value.__cause__ or value.__context__) is not None:
            value = cause
        return describe(value)
    if isinstance(value, int):
        return f"status {value}" if 100 <= value < 600 else ""
    return value if isinstance(value, str) and value in _PHRASES else ""
