"""Formats of logs, one row of FORMATS each. A log may mix them: the first format that recognizes a record reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from router.cli.audit.engine_logs import read_escaped_body, read_sglang, read_vllm
from router.cli.audit.log_requests import LoggedRequest, LogRecord, NotRequest, parse_request
from router.cli.audit.payload_logs import read_langfuse, read_litellm
from router.cli.audit.trace_exports import read_otel
from router.core.prompts.json_fields import UNREADABLE, decode_as

_LISTS = ("data", "observations")  # fields with a list of records, as pages of Langfuse's API have
_TEXTS = ("log", "message", "msg")  # fields with a line of text: Docker's json-file, vLLM's JSON logging, Loki
_BODIES = frozenset(("body", "request", "proxy_server_request", "messages", "prompt", "input", "obj"))
_decode = msgspec.json.Decoder(dict[str, Raw]).decode


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a log.

    `read` returns None for a record of another format, and no request for a record of another event. It raises
    NotRequest or an error in UNREADABLE.
    """

    name: str  # in errors
    read: Callable[[LogRecord], Sequence[LoggedRequest] | None]


def read_body(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a request's body, or an object that contains a body."""
    return [parse_request(record.text)] if record.fields else None


FORMATS = (
    Format("OpenTelemetry GenAI spans and events: OTLP JSON, console exporter", read_otel),
    Format("Langfuse observations: JSON, JSONL, pages of the API", read_langfuse),
    Format("LiteLLM standard logging payloads", read_litellm),
    Format("SGLang's log: --log-requests --log-requests-level 3", read_sglang),
    Format("vLLM's log: --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG", read_vllm),
    Format("access logs with an escaped request body: nginx's $request_body", read_escaped_body),
    Format("request bodies in JSON: alone, in OpenAI batches, LiteLLM's spend logs, JSON access logs", read_body),
)


class LogReader:
    """Reader of one log."""

    def __init__(self) -> None:
        self._has_bodies = False

    def read(self, text: bytes) -> Sequence[LoggedRequest]:
        """Return the requests in a record. Raises NotRequest if it has none and is no record of a known other event.

        Engines log a request's body and then the same request's rendered prompt. After the first body in a log,
        rendered prompts are ignored.
        """
        requests: list[LoggedRequest] = []
        problem: NotRequest | None = None
        for record in records_in(text):
            try:
                requests += _requests_in(record)
            except NotRequest as error:
                problem = error
        if problem is not None and not requests:
            raise problem
        kept = [each for each in requests if not (each.rendered and self._has_bodies)]
        self._has_bodies = self._has_bodies or any(each.body and not each.rendered for each in requests)
        return kept


def _requests_in(record: LogRecord) -> Sequence[LoggedRequest]:
    for each in FORMATS:
        try:
            found = each.read(record)
        except UNREADABLE as error:
            raise NotRequest("damaged, or of another release's format") from error
        if found is not None:
            return found
    raise NotRequest("damaged JSON" if record.text.startswith(b"{") else "no request in any of the formats")


def records_in(text: bytes) -> Sequence[LogRecord]:
    """Return the records within a record: the elements of a list, the text in a field, or the record itself."""
    record = _record(text.strip())
    if record.fields.keys() & _BODIES:
        return [record]
    for name in _LISTS:
        listed = decode_as(list[Raw], record.fields.get(name, Raw()))
        if listed:
            return [_record(bytes(each)) for each in listed]
    for name in _TEXTS:
        inner = decode_as(str, record.fields.get(name, Raw()))
        if inner:
            return [_record(inner.strip().encode(errors="replace"))]
    return [record]


def _record(text: bytes) -> LogRecord:
    if not text.startswith(b"{"):
        return LogRecord(text, {})
    try:
        return LogRecord(text, _decode(text))
    except UNREADABLE:
        return LogRecord(text, {})
