"""The Responses dialect of OpenAI, as implemented by vLLM.

`instructions` and `input` become the chat that vLLM 0.32 makes of them (entrypoints/openai/responses/utils.py). There,
consecutive reasoning, text and tool calls are one assistant message, so a conversation is one chain through either API.
Context that an engine continues from its own store (`previous_response_id`) is unknown here.

Streams begin with `response.created` and `response.in_progress`, before any prefill. They end with
`response.completed`, which holds the whole response and its usage.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from router.core.dialects import errors, sse
from router.core.dialects.dialect import NoUsageRequest
from router.core.dialects.openai import OpenAI
from router.core.prompts import agent_headers, json_fields
from router.core.prompts.canonical_responses import prompt_of
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import ABSENT, USAGE_BODY_BYTES_MAX
from router.core.prompts.responses_fields import BODY
from router.core.prompts.template_responses import responses_input
from router.core.types.placements import EndReason, Usage
from router.core.types.requests import RequestSpec, TemplateInput


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = 0
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    error: Raw = ABSENT


class _Event(msgspec.Struct):
    type: str = ""
    response: _Answer | None = None
    code: Raw = ABSENT
    error: Raw = ABSENT


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode

_EARLY = frozenset((b"response.created", b"response.queued", b"response.in_progress", b"ping"))
_LAST = ("response.completed", "response.incomplete", "response.failed")
_FAILED = ("error", "response.failed")
_NAMED_LAST = re.compile(rb"^event: ?response\.(completed|incomplete|failed)\r?\n[^\n]*\n\r?\n", re.MULTILINE)
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')


class Responses(NoUsageRequest, OpenAI):
    """The Responses API; errors are those of OpenAI's other paths."""

    name = "responses"
    says_done = False
    seen_as = (b"", b"")

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: BodyPrefixCache | None = None) -> RequestSpec:
        """Read the fields that placement needs. Raises InvalidBody for a body that is not a JSON object, or a model
        that is no string."""
        fields = json_fields.decode_body(BODY, body)
        return RequestSpec(
            model=json_fields.model_of(fields.model),
            prompt=prompt_of(fields),
            stream=json_fields.is_true(fields.stream),
            salt=json_fields.salt_of(fields.cache_salt),
            session=json_fields.decode_as(str, fields.prompt_cache_key),
            output_tokens_max=json_fields.positive(fields.max_output_tokens),
            stored=json_fields.flag(fields.store),
            response_id=json_fields.decode_as(str, fields.previous_response_id),
            wants_usage=True,
            metadata=json_fields.metadata_of(fields.metadata),
            names=agent_headers.names_of(fields.nvext, fields.client_metadata, ABSENT, fields.session_id),
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Return the chat that vLLM makes of it. None if it continues an answer that an engine stores."""
        return responses_input(body)

    def usage(self, body: bytes) -> Usage | None:
        """Return the token counts of an answer that did not stream."""
        answer = json_fields.decode_or_none(_decode_answer, body) if len(body) <= USAGE_BODY_BYTES_MAX else None
        return _counts(answer.usage) if answer else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Return the token counts of the last event. Of a long answer, the tail has only the end of that event."""
        for data in sse.payloads_backwards(tail):
            if b'"usage"' not in data:
                continue
            event = json_fields.decode_or_none(_decode_event, data)
            if event is None:
                return _counts(json_fields.cut_usage(_Usage, data))
            if event.type in _LAST and event.response:
                return _counts(event.response.usage)
        return None

    def event_error(self, chunk: bytes) -> int | None:
        """Return the status of an event `error` or `response.failed`, or of OpenAI's error object as engines send
        it."""
        event = json_fields.decode_or_none(_decode_event, sse.first_payload(chunk))
        if event is None:
            return None
        if event.type in _FAILED:
            return _status(event)
        return super().event_error(b"data: " + sse.first_payload(chunk))

    def has_output(self, chunk: bytes) -> bool:
        """True for any event except those that only confirm the arrival of the request."""
        return json_fields.has_event_besides(_EARLY, chunk)

    def find_ending(self, tail: bytes) -> EndReason | None:
        """Whole: the last event, recognised by its name, since it holds the whole answer."""
        if (found := _NAMED_LAST.findall(tail)) and found[-1] != b"failed":
            return EndReason.OK
        for data in sse.payloads_backwards(tail):
            if (status := self.event_error(b"data: " + data)) is not None:
                return errors.ending_of(status, data)
            event = json_fields.decode_or_none(_decode_event, data)
            if event is not None and event.type in _LAST:
                return EndReason.OK
        return EndReason.FAILED if found else None

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """Return OpenAI's event `error` with the next sequence number, and the object `error`, by which OpenAI's
        clients recognise it."""
        numbers = _NUMBER.findall(tail)
        error = msgspec.json.decode(self.error(status, code, message))["error"]
        event: dict[str, Any] = {"type": "error", "code": code, "message": message, "param": None}
        event |= {"sequence_number": int(numbers[-1]) + 1 if numbers else 0, "error": error}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _status(event: _Event) -> int:
    """Return the status of an event `error` with fields at the top level or in an object, or of `response.failed`."""
    for error in (event.error, event.response.error if event.response is not None else ABSENT):
        if json_fields.has_value(error):
            return errors.status_of_raw(error)
    return errors.status_of(errors.ErrorFields(code=event.code))


def _counts(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.input_tokens_details
    return json_fields.counts(usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None)
