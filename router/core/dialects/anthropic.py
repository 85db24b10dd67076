"""The Anthropic dialect of vLLM: Messages.

A request becomes the same canonical bytes as the chat that vLLM 0.32 makes of it (entrypoints/anthropic/serving.py), so
a conversation is one chain through either API. `cache_control` marks the cache points of Anthropic's own service.
Engines cache every block, so it changes nothing in the chain, as do sampling and the thinking budget. vLLM merges
system messages between others into the first one if the template requires it. The router does not know the template,
and leaves them in place.

Usage: prompt tokens are `input_tokens` plus those read from and written to the cache. Streams always carry usage, which
is complete only in `message_delta`.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.core.dialects import errors, sse
from router.core.dialects.dialect import Abort, NoUsageRequest, abort_of
from router.core.prompts import agent_headers, json_fields
from router.core.prompts.canonical_messages import SEEN_AS, decode_loose, parse_quick, prompt_of
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import ABSENT, USAGE_BODY_BYTES_MAX
from router.core.prompts.messages_fields import MessagesBody
from router.core.prompts.template_messages import messages_input
from router.core.types.placements import EndReason, Usage
from router.core.types.requests import RequestSpec, TemplateInput


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    usage: _Usage | None = None
    message: _Answer | None = None
    error: Raw = ABSENT


_REASON = re.compile(rb'"stop_reason"\s*:\s*[^\sn]')  # one that is not null
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_EARLY = frozenset((b"message_start", b"ping"))


class Anthropic(NoUsageRequest):
    """The Messages API."""

    name = "anthropic"
    says_done = False
    seen_as = SEEN_AS

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: BodyPrefixCache | None = None) -> RequestSpec:
        """Read the fields that placement needs. Raises InvalidBody for a body that is not a JSON object, or a model
        that is no string."""
        ask = parse_quick(body, keep, seen)
        if ask is not None:
            return ask
        fields = decode_loose(body)
        model = json_fields.model_of(fields.model)
        prompt = prompt_of(fields)
        session = json_fields.decode_as(str, fields.prompt_cache_key)
        if session is None and prompt is None:
            # Often one id for all of a client's conversations: worth less than the beginning of the prompt.
            user = (json_fields.decode_as(dict, fields.metadata) or {}).get("user_id")
            session = user if isinstance(user, str) else None
        return RequestSpec(
            model=model,
            prompt=prompt,
            stream=json_fields.is_true(fields.stream),
            salt=json_fields.salt_of(fields.cache_salt),
            session=session,
            output_tokens_max=json_fields.positive(fields.max_tokens),
            wants_usage=True,
            metadata=json_fields.metadata_of(fields.metadata),
            names=agent_headers.names_of(fields.nvext, ABSENT, fields.metadata, fields.session_id),
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Return the chat that vLLM makes of it. None for images, documents and other content that is not text."""
        return messages_input(body, decoded if isinstance(decoded, MessagesBody) else None)

    def usage(self, body: bytes) -> Usage | None:
        """Return the token counts of an answer that did not stream."""
        answer = json_fields.decode_or_none(_decode_answer, body) if len(body) <= USAGE_BODY_BYTES_MAX else None
        return _counts(answer.usage) if answer else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Return the token counts of the last `message_delta`. Prompt tokens may be in `message_start` only."""
        last: _Usage | None = None
        for data in sse.payloads_backwards(tail):
            event = json_fields.decode_or_none(_decode_event, data) if b'"usage"' in data else None
            if event is None:
                continue
            if event.type == "message_delta" and last is None:
                last = event.usage
            elif event.type == "message_start" and last and last.input_tokens is None and event.message:
                start = event.message.usage or _Usage()
                last = msgspec.structs.replace(start, output_tokens=last.output_tokens)
            if last and last.input_tokens is not None:
                break
        return _counts(last)

    def event_error(self, chunk: bytes) -> int | None:
        """Return the status of an `event: error`, from its type. vLLM sends internal_error if its engine has failed."""
        if b'"error"' not in chunk[:4096]:
            return None
        event = json_fields.decode_or_none(_decode_event, sse.first_payload(chunk))
        if event is None:
            return None
        if not json_fields.has_value(event.error):
            return 500 if event.type == "error" else None
        return errors.status_of_raw(event.error)

    def find_abort(self, head: bytes) -> Abort | None:
        """Return the outcome of an aborted answer. vLLM sends no stop_reason for it, and leaves the field out of a
        whole answer."""
        if not head.startswith(b"{") or _REASON.search(head):
            return None
        event = json_fields.decode_or_none(_decode_event, head)
        return abort_of(head) if event is not None and event.type == "message" else None

    def has_output(self, chunk: bytes) -> bool:
        """True for events other than `message_start` and pings, which may come before prefill is done."""
        return json_fields.has_event_besides(_EARLY, chunk)

    def find_ending(self, tail: bytes) -> EndReason | None:
        """Whole: `message_stop` after a `message_delta`. Its stop reason is null if vLLM has no value for it, such as
        for a repetition that it ended."""
        stopped = b'"message_delta"' in tail
        for data in sse.payloads_backwards(tail):
            event = json_fields.decode_or_none(_decode_event, data)
            if event is None:
                continue
            if json_fields.has_value(event.error):
                return errors.ending_of(errors.status_of_raw(event.error), data)
            if event.type == "error":
                return EndReason.FAILED
            if event.type == "message_stop" and stopped:
                return EndReason.OK
        return None

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """Return Anthropic's error object with the router's code in it."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message, "code": code}})

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """Return Anthropic's event `error`."""
        return b"event: error\ndata: " + self.error(status, code, message) + b"\n\n"


def _counts(usage: _Usage | None) -> Usage | None:
    if usage is None or usage.input_tokens is None or usage.input_tokens < 0:
        return None
    cached = usage.cache_read_input_tokens
    prompt = usage.input_tokens + max(0, cached or 0) + max(0, usage.cache_creation_input_tokens or 0)
    return json_fields.counts(prompt, usage.output_tokens, cached)
