"""Metadata of an answer: the model that made it, its finish reasons, its id, and further token counts.

Only traces use it, so one lenient form with the fields of all dialects is enough. The first event of a stream names
model and id; its last events have the reasons. A reason is the engine's own value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw

from router.core.dialects import sse
from router.core.prompts import json_fields

BODY_BYTES_MAX = 256 << 10  # longest answer that is read for this: less than a millisecond of decoding
NAME_CHARS_MAX = 256  # a longer model, id or reason is left out
REASONS_MAX = 128  # choices of one answer with a reported reason

_INNER = ("message", "delta", "response", "meta_info")  # parts of events; `meta_info` is SGLang's
_REASON = re.compile(rb'"(?:finish_reason|stop_reason|status)"\s*:\s*["{]')  # fields that may hold a reason


class ResponseMetadata(msgspec.Struct, frozen=True):
    """Metadata of an answer. Absent fields are "", empty or None."""

    model: str = ""
    id: str = ""
    reasons: tuple[str, ...] = ()  # one for each choice with a finish reason
    reasoning_tokens: int | None = None  # tokens of the answer that were reasoning
    cache_write_tokens: int | None = None  # tokens of the prompt that were written to a cache


_Object = dict[str, Raw]
_decode = msgspec.json.Decoder(_Object).decode


def metadata_of(body: bytes) -> ResponseMetadata:
    """Return the metadata of an answer that did not stream."""
    return _parse_metadata(body, (body,)) if len(body) <= BODY_BYTES_MAX else ResponseMetadata()


def metadata_of_stream(head: bytes, tail: bytes) -> ResponseMetadata:
    """Return the metadata of a stream with these first and last bytes."""
    return _parse_metadata(sse.first_payload(head), sse.payloads_backwards(tail))


def _parse_metadata(first: bytes, last: Iterable[bytes]) -> ResponseMetadata:
    parts = _parts(first)
    reasons: dict[int, str] = {}
    reasoning = written = None
    for data in last:
        if b'"usage"' in data and (reasoning is None or written is None):
            counts = _counts(data)
            reasoning = counts[0] if reasoning is None else reasoning
            written = counts[1] if written is None else written
        if _REASON.search(data) is not None:
            reasons = dict(_reasons(data)) | reasons  # the last reason of a choice counts
        if len(reasons) > REASONS_MAX:
            break
    return ResponseMetadata(
        _first_name(parts, "model"),
        _first_name(parts, "id"),
        tuple(reasons[index] for index in sorted(reasons)[:REASONS_MAX]),
        reasoning,
        written,
    )


def _parts(data: bytes) -> list[_Object]:
    """Return the objects with metadata: the event or answer itself, and those in it that are not empty."""
    answer = _object(data)
    return [answer, *(part for name in _INNER if (part := _object(answer.get(name))))]


def _object(raw: Raw | bytes | None) -> _Object:
    """Return the fields of a JSON object; {} for anything else."""
    return json_fields.decode_or_none(_decode, bytes(raw)) or {} if raw else {}  # native code takes bytes themselves


def _counts(data: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of reasoning, and those written to a cache, of an event or an answer with usage. SGLang has the
    tokens of reasoning next to the others."""
    usage = next((usage for part in _parts(data) if (usage := _object(part.get("usage")))), {})
    answer = _object(usage.get("completion_tokens_details")) or _object(usage.get("output_tokens_details"))
    prompt = _object(usage.get("prompt_tokens_details")) or _object(usage.get("input_tokens_details"))
    reasoning = answer.get("reasoning_tokens") or usage.get("reasoning_tokens")
    return _tokens(reasoning), _tokens(prompt.get("cache_write_tokens") or usage.get("cache_creation_input_tokens"))


def _tokens(raw: Raw | None) -> int | None:
    """Return a plausible number of tokens, else None."""
    tokens = json_fields.decode_as(int, raw) if raw else None
    return tokens if tokens is not None and 0 <= tokens <= json_fields.USAGE_TOKENS_MAX else None


def _reasons(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the numbers of choices and their finish reasons."""
    parts = _parts(data)
    for choice in json_fields.decode_as(list[_Object], parts[0].get("choices", json_fields.ABSENT)) or ():
        if reason := _reason(choice.get("finish_reason")):
            yield json_fields.decode_as(int, choice.get("index", json_fields.ABSENT)) or 0, reason
    for part in parts:
        incomplete = _object(part.get("incomplete_details")).get("reason")
        reason = _reason(part.get("stop_reason")) or _reason(part.get("finish_reason")) or _name(incomplete)
        if reason := reason or _get_final_status(part):
            yield 0, reason


def _get_final_status(part: _Object) -> str:
    """Return the status of a response of the Responses API that has ended."""
    status = _name(part.get("status"))
    return status if status in ("completed", "failed", "cancelled", "incomplete") else ""


def _reason(raw: Raw | None) -> str:
    """Return a finish reason: text, or in SGLang's own dialect an object with a type."""
    return _name(_object(raw).get("type")) or _name(raw)


def _first_name(parts: list[_Object], field: str) -> str:
    return next((name for part in parts if (name := _name(part.get(field)))), "")


def _name(raw: Raw | None) -> str:
    name = json_fields.decode_as(str, raw) if raw else None
    return name if name and len(name) <= NAME_CHARS_MAX and name.isprintable() else ""
