"""Log lines to standard error: one JSON object a line, or text for people. They never contain a prompt, an answer or a
key.

A thread writes the lines (log_queue.py). The line of a request is on the path of every request. It bypasses the logging
module and enters the same queue, so that lines keep their order.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from router.core.types.cache_misses import MissReason, TokenFate
from router.core.types.placements import EndReason
from router.former_names import former_event
from router.telemetry.log_queue import LogQueue, LogStyle, sink
from router.telemetry.request_record import RequestRecord

log = logging.getLogger(__name__)
requests_log = logging.getLogger("router.requests")
_out: LogQueue | None = None
_NEEDS_QUOTES = re.compile(r"[ =\"'\\]")
_CACHED_ELSEWHERE = TokenFate.CACHED_ON_OTHER_REPLICA
REQUEST = "request"  # sentence and event of a request's line
_BROKEN = (EndReason.FAILED, EndReason.UNREACHED, "drained")  # endings of answers that began and did not complete


def setup(level: str, format_: str, *, requests: bool) -> None:
    """Configure the logging of this process. It starts a thread, so call it after a fork and not before. `format_` is
    `json`, `text` or `auto`: text if standard error is a terminal."""
    global _out
    is_text = sys.stderr.isatty() if format_ == "auto" else format_ == "text"
    style: LogStyle = _Text() if is_text else _Json()
    _out = LogQueue(sink(sys.stderr), style, requests=requests)
    logging.basicConfig(handlers=[_out], force=True)  # closes the handler of an earlier call
    configure(level, requests=requests)


def configure(level: str, *, requests: bool) -> None:
    """Set which lines are written from now on. No effect if another program has set up logging."""
    if _out is not None:
        logging.getLogger().setLevel(level.upper())
        requests_log.setLevel(logging.INFO if requests else logging.CRITICAL)
        _out.requests = requests


def log_requests(records: Sequence[RequestRecord]) -> None:
    """Write one line per request. The clock is read once and the buffer's lock taken once for all of them."""
    if _out is not None:
        if _out.requests:
            now_s, line, lines = time.time(), _out.style.request, []
            for record in records:
                try:
                    lines.append(line(now_s, record))
                except Exception:  # a bug, which must not break the request
                    log.exception("bug: the log line of a request cannot be written", extra={"event": "bug"})
            _out.write(*lines)
    elif requests_log.isEnabledFor(logging.INFO):  # the router is embedded in another program, which has set up logging
        for record in records:
            made = _request("", record)
            extra = {"event": REQUEST, "fields": _list_set_fields(made)}
            requests_log.log(logging.getLevelNamesMapping()[made.level.upper()], REQUEST, extra=extra)


def count_dropped() -> int:
    """Return the number of lines since `setup` that were dropped because standard error did not take them in time."""
    return _out.dropped if _out is not None else 0


class _RequestLine(msgspec.Struct):
    """Fields of a request's line, in this order. Fields that are not set are left out."""

    time: str
    level: str
    logger: str
    message: str
    event: str
    request_id: str
    route: str
    model: str
    status: int
    ending: str
    duration_ms: float
    queued_ms: float | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    replica: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    grade: str | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    predicted_cached_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType | None = UNSET
    completion_tokens: int | UnsetType = UNSET
    hit_tokens: int | UnsetType = UNSET
    miss: Mapping[MissReason, int] | UnsetType = UNSET
    places: Mapping[TokenFate, int] | UnsetType = UNSET
    held: str | UnsetType = UNSET
    retries: list[str] | UnsetType = UNSET
    continued: str | UnsetType = UNSET
    not_continued: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    warning: str | UnsetType = UNSET


def _request(at: str, record: RequestRecord) -> _RequestLine:
    duration_ms = int(record.times.duration_s * 1e4 + 0.5) / 10  # takes a tenth of the time of round()
    about = (record.id, record.route, record.model, record.status, record.ending, duration_ms)
    line = _RequestLine(at, _level(record), "router.requests", REQUEST, REQUEST, *about)
    if record.times.queued_s > 0:
        line.queued_ms = int(record.times.queued_s * 1e4 + 0.5) / 10
    if record.times.ttft_s is not None:
        line.ttft_ms = int(record.times.ttft_s * 1e4 + 0.5) / 10
    if (receipt := record.receipt) is not None:
        line.replica, line.reason, line.grade = receipt.replica, receipt.reason, receipt.grade
        line.prompt_tokens, line.predicted_cached_tokens = receipt.prompt_tokens, receipt.predicted_cached_tokens
    if (usage := record.usage) is not None:
        line.cached_tokens, line.completion_tokens = usage.cached_tokens, usage.completion_tokens
    if record.cache.miss is not None:
        line.hit_tokens, line.miss = record.cache.miss.hit, record.cache.miss.misses
    if record.cache.places is not None:
        line.places = record.cache.places
        if _CACHED_ELSEWHERE in record.cache.places and record.cache.miss is not None and record.cache.miss.held[0]:
            holder, why = record.cache.miss.held
            line.held = f"{why} at {holder}"
    if record.retries:
        line.retries = [f"{kind} at {replica}" for kind, replica in record.retries]
    if record.failover.continued[0]:
        how, cause, replica = record.failover.continued
        line.continued = f"{how} after {cause} at {replica}"
    if record.failover.not_continued:
        line.not_continued = record.failover.not_continued
    if record.error:
        line.error = record.error
    if record.detail:
        line.detail = record.detail
    if record.client.tenant:
        line.tenant = record.client.tenant
    if record.trace_id:
        line.trace_id = record.trace_id
    if record.warning:
        line.warning = record.warning
    return line


def _level(record: RequestRecord) -> str:
    """Return the level of a request's line. Client errors, and requests that clients cancel, are information. An answer
    that failed or broke is a warning. A bug is an error."""
    if record.status < 500 and record.ending not in _BROKEN:
        return "info"
    return "error" if record.status == 500 and record.error == "internal_error" else "warning"


def _list_set_fields(line: _RequestLine) -> dict[str, object]:
    """Return the fields that are set, without those that every line has."""
    names = line.__struct_fields__[5:]
    return {name: value for name in names if (value := getattr(line, name)) is not UNSET}


class _Stamps:
    """Times as text. The part up to the second is formatted once a second."""

    def __init__(self, format_: str) -> None:
        self._format = format_
        self._last = (-1, "")
        self._said = (-1.0, "")

    def __call__(self, at_s: float) -> str:
        """Return a Unix time as text: UTC, to the millisecond."""
        last_s, said = self._said  # read once, since other threads log too
        if at_s == last_s:  # several requests ended in one turn of the event loop
            return said
        second = int(at_s)
        known, text = self._last
        if second != known:
            text = datetime.fromtimestamp(second, UTC).strftime(self._format)
            self._last = (second, text)
        said = f"{text}.{int((at_s - second) * 1e3):03d}"
        self._said = (at_s, said)
        return said


class _Json:
    def __init__(self) -> None:
        self._stamps = _Stamps("%Y-%m-%dT%H:%M:%S")
        self._encode = msgspec.json.Encoder().encode

    def request(self, at_s: float, record: RequestRecord) -> bytes:
        return self._encode(_request(self._stamps(at_s) + "+00:00", record))

    def ordinary(self, record: logging.LogRecord) -> bytes:
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        if event := getattr(record, "event", ""):  # lines of libraries have no event
            former = former_event(event)
            fields = {"event": event, "former_event": former, **fields} if former else {"event": event, **fields}
        return self._line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)

    def _line(self, at_s: float, level: str, logger: str, message: str, fields: Mapping[str, object]) -> bytes:
        at = self._stamps(at_s) + "+00:00"
        return self._encode({"time": at, "level": level, "logger": logger, "message": message, **fields})


class _Text:
    def __init__(self) -> None:
        self._stamps = _Stamps("%H:%M:%S")

    def request(self, at_s: float, record: RequestRecord) -> bytes:
        line = _request("", record)
        return self._line(at_s, line.level, REQUEST, _list_set_fields(line))

    def ordinary(self, record: logging.LogRecord) -> bytes:
        fields = getattr(record, "fields", {})
        line = self._line(record.created, record.levelname.lower(), record.getMessage(), fields)
        if record.exc_info:
            line += b"\n" + logging.Formatter().formatException(record.exc_info).encode(errors="replace")
        return line

    def _line(self, at_s: float, level: str, message: str, fields: Mapping[str, object]) -> bytes:
        shown = " ".join(f"{k}={_plain(v)}" for k, v in fields.items() if v not in ("", None))
        return f"{self._stamps(at_s)} {level:7} {message} {shown}".rstrip().encode(errors="replace")


def _plain(value: object) -> str:
    """Return any text on one line, in quotes if it contains spaces or `=`. Names and messages come from clients, which
    must not be able to forge lines or fields."""
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if not _NEEDS_QUOTES.search(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def log_listening(url: str, admin_url: str) -> None:
    """Write the addresses of both listeners to standard output, for programs that start the router. It is one write,
    because on an unbuffered output `print` writes the end of the line separately, and a log line may come between."""
    sys.stdout.write(f"listening {url} admin {admin_url}\n")
    sys.stdout.flush()
