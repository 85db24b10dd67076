"""Makes a request of a line of a log in JSON. Each line is examined separately, since shapes may differ within a log.

Readers of other formats (`log_formats`) make such lines. A line is a request's body, or contains one in a field. The
field is `body`, `request` (OpenAI's batches, gateways) or `proxy_server_request` (LiteLLM). Its value is an object or
JSON text, possibly nested. Other facts about the request may be at any of these levels. If no path is named, the API is
inferred from the body's fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct, field

from router.core.dialects import PATHS
from router.core.prompts.json_fields import ABSENT, UNREADABLE, decode_as, has_value

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, RESPONSES, GENERATE = "/v1/messages", "/v1/responses", "/generate"
LEVELS_MAX = 4  # levels of nesting: bodies within requests within lines
NAME_CHARS_MAX = 256
# Numbers from these on are Unix times in these units: in seconds, 1e11 is the year 5138
MILLISECONDS_MIN, MICROSECONDS_MIN, NANOSECONDS_MIN = 1e11, 1e14, 1e17


class NotRequest(ValueError):
    """Raised if a line is no request, or has no prompt; the message gives the reason without quoting the line."""


class LogRecord(Struct):
    """LogRecord of a log. `fields` are those of a JSON object, none for any other text."""

    text: bytes
    fields: dict[str, Raw]


class LoggedRequest(Struct):
    """Logged request. `prompt_tokens` is 0 if no usage was logged. Without a body there is only usage."""

    path: str  # one of PATHS
    body: bytes
    model: str  # "" if no model is named outside the body
    session: str
    tenant: str
    at_s: float | None  # Unix time
    prompt_tokens: int
    cached_tokens: int | None
    rendered: bool = False  # True if an engine logged the prompt that it made of the body


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _FieldLevel(Struct):
    """Fields of a line, or of an object within it; each is decoded only when it is needed."""

    body: Raw = ABSENT
    request: Raw = ABSENT
    proxy_server_request: Raw = ABSENT
    path: Raw = ABSENT
    url: Raw = ABSENT
    endpoint: Raw = ABSENT
    model: Raw = ABSENT
    headers: Raw = ABSENT
    session: Raw = ABSENT
    session_id: Raw = ABSENT
    session_header: Raw = field(default=ABSENT, name="x-session-id")
    tenant: Raw = ABSENT
    time: Raw = ABSENT
    timestamp: Raw = ABSENT
    start_time: Raw = field(default=ABSENT, name="startTime")
    created: Raw = ABSENT
    usage: Raw = ABSENT
    response: Raw = ABSENT
    # Of bodies
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    sampling_params: Raw = ABSENT
    system: Raw = ABSENT
    anthropic_version: Raw = ABSENT
    stop_sequences: Raw = ABSENT
    thinking: Raw = ABSENT
    tools: Raw = ABSENT
    instructions: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    encoding_format: Raw = ABSENT
    dimensions: Raw = ABSENT


class _Answer(Struct):
    usage: Raw = ABSENT
    body: Raw = ABSENT


_decode = msgspec.json.Decoder(_FieldLevel).decode
_WITHIN = ("body", "request", "proxy_server_request")
_PATHS = ("path", "url", "endpoint")
_TIMES = ("time", "timestamp", "startTime", "created")
_OF_MESSAGES = re.compile(rb'"input_schema"\s*:|"type"\s*:\s*"tool_(?:use|result)"')


def parse_request(line: bytes) -> LoggedRequest:
    """Read the request of a line. Raises NotRequest."""
    levels, body = _levels(line)
    headers = _headers(levels)
    path = _path(levels, body)
    prompt_tokens, cached_tokens = _usage(levels)
    own_model = has_value(levels[-1].model)
    session = _name(levels, "session", "session_id", "session_header") or headers.get("x-session-id", "")
    return LoggedRequest(
        path,
        body,
        "" if own_model else _name(levels, "model"),
        session[:NAME_CHARS_MAX],
        (_name(levels, "tenant") or headers.get("x-warmroute-tenant", ""))[:NAME_CHARS_MAX],
        _parse_time_s(levels),
        prompt_tokens,
        cached_tokens,
    )


def make_request(fields: Mapping[str, Any], *, rendered: bool = False) -> LoggedRequest:
    """Read the request of a line with these fields. Raises NotRequest, or an error in UNREADABLE."""
    request = parse_request(msgspec.json.encode(fields))
    request.rendered = rendered
    return request


def make_usage(fields: Mapping[str, Any]) -> LoggedRequest:
    """Return the usage and the time of a line with these fields. Raises an error in UNREADABLE."""
    levels = [_decode(msgspec.json.encode(fields))]
    return LoggedRequest("", b"", "", "", "", _parse_time_s(levels), *_usage(levels))


def _levels(line: bytes) -> tuple[Sequence[_FieldLevel], bytes]:
    """Return all levels, from the line's own fields to those of the request's body, and that body."""
    body = line.strip()
    try:
        levels = [_decode(body)]
    except UNREADABLE as error:
        raise NotRequest("not a JSON object") from error
    while len(levels) < LEVELS_MAX:
        inner = next(filter(None, (_object(getattr(levels[-1], name)) for name in _WITHIN)), b"")
        if not inner:
            break
        try:
            levels.append(_decode(inner))
        except UNREADABLE as error:
            raise NotRequest("its body is not a JSON object") from error
        body = inner
    return levels, body


def _object(raw: Raw) -> bytes:
    """Return the object, which may be given as JSON text; b"" if it is neither."""
    data = bytes(raw)
    if data.startswith(b"{"):
        return data
    if data.startswith(b'"'):
        text = (decode_as(str, raw) or "").strip()
        if text.startswith("{"):
            return text.encode(errors="surrogatepass")
    return b""


# -- the API -----------------------------------------------------------------------------------------------------------


def _path(levels: Sequence[_FieldLevel], body: bytes) -> str:
    named = _name(levels, *_PATHS)
    if named:
        known = _match_api_path(named)
        if known:
            return known
    fields = levels[-1]
    if has_value(fields.messages):
        if "token" in named.rpartition("/")[2]:  # count_tokens, tokenize
            raise NotRequest("it is a request to count tokens")
        return MESSAGES if _is_of_messages(fields, body) else CHAT
    if named:
        raise NotRequest("its path belongs to no API with prompts")
    if has_value(fields.prompt):
        return COMPLETIONS
    if has_value(fields.input):
        return EMBEDDINGS if _is_embedding(fields) else RESPONSES
    if has_value(fields.sampling_params) and (has_value(fields.text) or has_value(fields.input_ids)):
        return GENERATE
    raise NotRequest("it has no field messages, prompt or input")


def _match_api_path(url: str) -> str:
    """Return the API's path without a gateway's prefix; "" if it is not a known path."""
    try:
        path = urlsplit(url).path.rstrip("/")
    except ValueError:
        return ""
    if path in PATHS:
        return path
    return next((known for known in PATHS if path.endswith(known.removeprefix("/v1"))), "")


def _is_of_messages(fields: _FieldLevel, body: bytes) -> bool:
    """True if chat messages are in the form of Anthropic's API."""
    theirs = (fields.system, fields.anthropic_version, fields.stop_sequences, fields.thinking)
    return any(map(has_value, theirs)) or _OF_MESSAGES.search(body) is not None


def _is_embedding(fields: _FieldLevel) -> bool:
    if any(map(has_value, (fields.instructions, fields.max_output_tokens, fields.tools))):
        return False
    if (
        has_value(fields.encoding_format)
        or has_value(fields.dimensions)
        or "embed" in (decode_as(str, fields.model) or "")
    ):
        return True
    return not bytes(fields.input).startswith(b'"') and decode_as(list[dict[str, Raw]], fields.input) is None


# -- other facts -------------------------------------------------------------------------------------------------------


def _name(levels: Sequence[_FieldLevel], *names: str) -> str:
    """Return the first of these fields that is text, searched from the line's own level inward."""
    for level in levels:
        for name in names:
            text = decode_as(str, getattr(level, name))
            if text:
                return text
    return ""


def _headers(levels: Sequence[_FieldLevel]) -> dict[str, str]:
    """Return headers by name in lower case; the log has them as an object or a list of pairs."""
    found: dict[str, str] = {}
    for level in levels:
        pairs = decode_as(dict[str, str | list[str]], level.headers) if has_value(level.headers) else None
        listed = decode_as(list[tuple[str, str]], level.headers) if pairs is None and has_value(level.headers) else None
        for name, value in [*(pairs or {}).items(), *(listed or [])]:
            text = value if isinstance(value, str) else value[0] if value else ""
            found.setdefault(name.lower(), text)
    return found


def _parse_time_s(levels: Sequence[_FieldLevel]) -> float | None:
    for level in levels:
        for raw in (level.time, level.timestamp, level.start_time, level.created):
            value = decode_as(float | str, raw) if has_value(raw) else None  # type: ignore[arg-type]
            seconds = _seconds(value) if value is not None else None
            if seconds is not None:
                return seconds
    return None


def _seconds(value: float | str) -> float | None:
    """Return the Unix time from a number in any of the units, or from ISO 8601, which is UTC without a zone."""
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value.strip())
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
        else:
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    for least, unit in ((NANOSECONDS_MIN, 1e9), (MICROSECONDS_MIN, 1e6), (MILLISECONDS_MIN, 1e3)):
        if value >= least:
            value /= unit
            break
    return value if 0 < value < MILLISECONDS_MIN else None


def _usage(levels: Sequence[_FieldLevel]) -> tuple[int, int | None]:
    """Return prompt tokens and cached tokens as the engine reported them; 0 and None if they were not logged."""
    for level in levels:
        raw = level.usage
        answer = decode_as(_Answer, level.response)
        if not has_value(raw) and answer is not None:
            inner = decode_as(_Answer, answer.body)
            raw = answer.usage if has_value(answer.usage) or inner is None else inner.usage
        usage = decode_as(_Usage, raw)
        if usage is not None:
            tokens, cached = _counts(usage)
            if tokens > 0:
                return tokens, min(max(0, cached), tokens) if cached is not None else None
    return 0, None


def _counts(usage: _Usage) -> tuple[int, int | None]:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cached_tokens
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    if usage.prompt_tokens:
        return usage.prompt_tokens, read if cached is None else cached
    if read is None and written is None:
        return usage.input_tokens or 0, cached
    return (usage.input_tokens or 0) + (read or 0) + (written or 0), read  # Anthropic counts the three separately
