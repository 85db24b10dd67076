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

_REASON = re.compile(rb'"(?:finish_reason|stop_reason|status)"\s*:\s*["{]')  # fields that may hold a reason


class _Choice(msgspec.Struct):
    index: Raw = json_fields.ABSENT
    finish_reason: Raw = json_fields.ABSENT


class _Part(msgspec.Struct):
    """`message`, `delta` and `response` of an event, and `meta_info` of SGLang."""

    id: Raw = json_fields.ABSENT
    model: Raw = json_fields.ABSENT
    stop_reason: Raw = json_fields.ABSENT
    finish_reason: Raw = json_fields.ABSENT
    status: Raw = json_fields.ABSENT
    incomplete_details: Raw = json_fields.ABSENT
    usage: Raw = json_fields.ABSENT


class _Answer(_Part):
    choices: Raw = json_fields.ABSENT
    message: Raw = json_fields.ABSENT
    delta: Raw = json_fields.ABSENT
    response: Raw = json_fields.ABSENT
    meta_info: Raw = json_fields.ABSENT


class _Kind(msgspec.Struct):
    """SGLang's finish reason."""

    type: str = ""


class _Incomplete(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct):
    reasoning_tokens: Raw = json_fields.ABSENT
    cache_write_tokens: Raw = json_fields.ABSENT


class _Counts(msgspec.Struct):
    """`usage`; SGLang has the tokens of reasoning next to the others."""

    reasoning_tokens: Raw = json_fields.ABSENT
    cache_creation_input_tokens: Raw = json_fields.ABSENT
    prompt_tokens_details: Raw = json_fields.ABSENT
    input_tokens_details: Raw = json_fields.ABSENT
    completion_tokens_details: Raw = json_fields.ABSENT
    output_tokens_details: Raw = json_fields.ABSENT


class ResponseMetadata(msgspec.Struct, frozen=True):
    """Metadata of an answer. Absent fields are "", empty or None."""

    model: str = ""
    id: str = ""
    reasons: tuple[str, ...] = ()  # one for each choice with a finish reason
    reasoning_tokens: int | None = None  # tokens of the answer that were reasoning
    cache_write_tokens: int | None = None  # tokens of the prompt that were written to a cache


_decode = msgspec.json.Decoder(_Answer).decode


def told_by(body: bytes) -> ResponseMetadata:
    """Return the metadata of an answer that did not stream."""
    return _parse_metadata(body, (body,)) if len(body) <= BODY_BYTES_MAX else ResponseMetadata()


def told_by_stream(head: bytes, tail: bytes) -> ResponseMetadata:
    """Return the metadata of a stream with these first and last bytes."""
    return _parse_metadata(sse.first_payload(head), sse.payloads_backwards(tail))


def _parse_metadata(first: bytes, last: Iterable[bytes]) -> ResponseMetadata:
    answer = json_fields.decode_or_none(_decode, first) or _Answer()
    parts = [answer, *_parts(answer)]
    reasons: dict[int, str] = {}
    reasoning = written = None
    for data in last:
        if b'"usage"' in data and (reasoning is None or written is None):
            counts = _counts(data)
            reasoning = counts[0] if reasoning is None else reasoning
            written = counts[1] if written is None else written
        if _REASON.search(data) is not None and (event := json_fields.decode_or_none(_decode, data)) is not None:
            reasons = dict(_reasons(event)) | reasons  # the last reason of a choice counts
        if len(reasons) > REASONS_MAX:
            break
    return ResponseMetadata(
        _first(_name(part.model) for part in parts),
        _first(_name(part.id) for part in parts),
        tuple(reasons[index] for index in sorted(reasons)[:REASONS_MAX]),
        reasoning,
        written,
    )


def _counts(data: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of reasoning, and those written to a cache, of an event or an answer with usage."""
    answer = json_fields.decode_or_none(_decode, data) or _Answer()
    for part in (answer, *_parts(answer)):
        counts = json_fields.decode_as(_Counts, part.usage)
        if counts is not None:
            of_answer = _details(counts.completion_tokens_details, counts.output_tokens_details)
            prompt = _details(counts.prompt_tokens_details, counts.input_tokens_details)
            reasoning = _tokens(of_answer.reasoning_tokens or counts.reasoning_tokens)
            return reasoning, _tokens(prompt.cache_write_tokens or counts.cache_creation_input_tokens)
    return None, None


def _details(*raws: Raw) -> _Details:
    """Return the first of these fields that is an object."""
    return next((found for raw in raws if (found := json_fields.decode_as(_Details, raw)) is not None), _Details())


def _tokens(raw: Raw) -> int | None:
    """Return a plausible number of tokens, else None."""
    tokens = json_fields.decode_as(int, raw)
    return tokens if tokens is not None and 0 <= tokens <= json_fields.USAGE_TOKENS_MAX else None


def _parts(answer: _Answer) -> list[_Part]:
    raws = (answer.message, answer.delta, answer.response, answer.meta_info)
    return [
        part for raw in raws if json_fields.has_value(raw) and (part := json_fields.decode_as(_Part, raw)) is not None
    ]


def _reasons(event: _Answer) -> Iterator[tuple[int, str]]:
    """Yield the numbers of choices and their finish reasons."""
    for choice in json_fields.decode_as(list[_Choice], event.choices) or ():
        if reason := _reason(choice.finish_reason):
            yield json_fields.decode_as(int, choice.index) or 0, reason
    for part in (event, *_parts(event)):
        details = json_fields.decode_as(_Incomplete, part.incomplete_details)
        reason = _reason(part.stop_reason) or _reason(part.finish_reason) or (details.reason if details else "")
        if reason := reason or _get_final_status(part):
            yield 0, reason[:NAME_CHARS_MAX]


def _get_final_status(part: _Part) -> str:
    """Return the status of a response of the Responses API that has ended."""
    status = _name(part.status)
    return status if status in ("completed", "failed", "cancelled", "incomplete") else ""


def _reason(raw: Raw) -> str:
    """Return a finish reason: text, or in SGLang's own dialect an object with a type."""
    kind = json_fields.decode_as(_Kind, raw)
    return kind.type if kind is not None else _name(raw)


def _name(raw: Raw) -> str:
    name = json_fields.decode_as(str, raw) if json_fields.has_value(raw) else None
    return name if name and len(name) <= NAME_CHARS_MAX and name.isprintable() else ""


def _first(names: Iterable[str]) -> str:
    return next((name for name in names if name), "")
