"""The OpenAI dialect of vLLM and SGLang: chat completions, completions, embeddings.

A chat becomes the canonical bytes of core/prompts/canonical.py; a completion's prompt is its own bytes. A body that
cannot be interpreted makes the prompt unknown (None), never the request invalid: the engine judges its own input.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from router.core.dialects import errors, sse
from router.core.dialects.dialect import Abort, abort_of
from router.core.prompts import agent_headers, json_fields
from router.core.prompts.canonical_openai import SEEN_AS, parse_and_keep, parse_quick, prompt_of
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import ABSENT, UNREADABLE, USAGE_BODY_BYTES_MAX
from router.core.prompts.template_chat import ChatBody, decode_openai, openai_input
from router.core.types.placements import EndReason, Usage
from router.core.types.progress import is_progress
from router.core.types.requests import RequestSpec, TemplateInput


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(_Counted):
    choices: list[Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


class _Error(msgspec.Struct):
    """An error: nested, or flat as SGLang has it outside streams (`object`)."""

    error: Raw = ABSENT
    object: Raw = ABSENT
    type: Raw = ABSENT
    code: Raw = ABSENT


# Quotes are escaped within strings, so these match fields. Events may be cut off at their beginning, but not at their
# end.
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
# Fields of events that SGLang 0.5.23 (openai/serving_chat.py) sends after the finish reason; they may fill the whole
# tail.
_HIDDEN_STATES = re.compile(rb'"delta"\s*:\s*\{[^{}]*?"hidden_states"\s*:\s*\[')
_NO_CHOICES, _EXTRAS = re.compile(rb'"choices"\s*:\s*\[\]'), re.compile(rb'"sglext"\s*:\s*\{')
_USAGE_GIVEN = re.compile(rb'"usage"\s*:\s*\{')  # not null, which some engines send in every event
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_SECOND = re.compile(rb'"index"\s*:\s*[1-9]')  # matches if a choice other than the first is present
_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_counted = msgspec.json.Decoder(_Counted).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_Error).decode


class OpenAI:
    """Chat completions, completions and embeddings."""

    name = "openai"
    says_done = True
    seen_as = SEEN_AS

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: BodyPrefixCache | None = None) -> RequestSpec:
        """Read the fields that placement needs. Raises InvalidBody for a body that is not a JSON object, or a model
        that is no string."""
        ask = parse_and_keep(path, body, seen) if keep else parse_quick(path, body, seen)
        if ask is not None:
            return ask
        fields = decode_openai(body)
        model = json_fields.model_of(fields.model)
        options = json_fields.decode_as(dict, fields.stream_options)
        adapter, adapters = json_fields.adapter_of(fields.lora_path)
        return RequestSpec(
            model=model,
            prompt=prompt_of(path, fields),
            stream=json_fields.is_true(fields.stream),
            salt=json_fields.salt_of(fields.cache_salt)
            + (bytes(fields.extra_key) if json_fields.has_value(fields.extra_key) else b"")
            + adapters,
            session=json_fields.decode_as(str, fields.prompt_cache_key),
            output_tokens_max=json_fields.positive(fields.max_completion_tokens)
            or json_fields.positive(fields.max_tokens),
            stored=json_fields.flag(fields.store),
            response_id=json_fields.decode_as(str, fields.previous_response_id),
            wants_usage=json_fields.wants_usage(options),
            metadata=json_fields.metadata_of(fields.metadata),
            stream_options=options,
            names=agent_headers.names_of(fields.nvext, fields.client_metadata, ABSENT, fields.session_id),
            adapter=adapter,
            decoded=fields,
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Return the engine's tokenizer input for a chat, or for a completion of one text. None for any other
        request."""
        return openai_input(path, body, decoded if isinstance(decoded, ChatBody) else None)

    def usage(self, body: bytes) -> Usage | None:
        """Return the token counts of an answer that did not stream."""
        return _usage(body) if len(body) <= USAGE_BODY_BYTES_MAX else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Return the token counts in the last events of a stream: vLLM sends them in the last event before [DONE]."""
        for data in sse.payloads_backwards(tail):
            if b'"usage"' in data:
                usage = _usage(data)
                if usage is not None:
                    return usage
        return None

    def event_error(self, chunk: bytes) -> int | None:
        """Return the status of an error event such as `data: {"error": {..., "code": 500}}` on status 200."""
        if not chunk.startswith(b"data:") or b'"error"' not in chunk[:4096]:
            return None
        event = json_fields.decode_or_none(_decode_error, sse.first_payload(chunk))
        if event is None:
            return None
        if json_fields.has_value(event.error):
            return errors.status_of_raw(event.error)
        is_flat = bytes(event.object) == b'"error"'
        return errors.status_of(errors.ErrorFields(event.type, event.code)) if is_flat else None

    def find_abort(self, head: bytes) -> Abort | None:
        """Return the outcome of an answer with this finish reason. vLLM ends running requests with it, and status 200,
        at shutdown. Both engines use it for requests that an operator aborts."""
        return abort_of(head) if b'"abort"' in head and _ABORTED.search(head) else None

    def has_output(self, chunk: bytes) -> bool:
        """True for events with data, which come only after prefill: vLLM sends its first one, with the role, together
        with the first token."""
        return is_progress(chunk)

    def find_ending(self, tail: bytes) -> EndReason | None:
        """Whole: at least one choice has a finish reason, and so has every choice in the tail."""
        finished = b'"finish_reason"' in tail and _has_line(_FINISHED, tail)  # faster than the expression alone
        if (finished or _is_behind(tail)) and not _goes_on(tail):
            return EndReason.OK
        if b'"error"' in tail:
            for data in sse.payloads_backwards(tail):
                if (status := self.event_error(b"data: " + data)) is not None:
                    return errors.ending_of(status, data)
        return None

    def with_usage(self, body: bytes, options: dict[str, Any] | None = None) -> bytes:
        """Request usage at the end of the stream; only called if the client did not request it.

        A last duplicate key wins in the JSON parsers of vLLM and SGLang (pydantic, json), so the option is spliced in
        before the closing brace. The rest of the body is unchanged.
        """
        end = body.rindex(b"}")
        merged = {**(options or {}), "include_usage": True}
        return b"".join((memoryview(body)[:end], b',"stream_options":', msgspec.json.encode(merged), body[end:]))

    def is_usage_event(self, event: bytes) -> bool:
        """True for the extra event, which has usage and no choices."""
        if b'"usage"' not in event:
            return False
        answer = json_fields.decode_or_none(_decode_answer, sse.payload(event))
        return answer is not None and answer.usage is not None and answer.choices == []

    def is_usage_unasked(self, event: bytes) -> bool:
        """True for usage next to choices. vLLM sends it with `--enable-force-include-usage`. Otherwise it sends it only
        if a client requests `continuous_usage_stats`, and then the router requests no usage."""
        if _USAGE_GIVEN.search(event) is None:
            return False
        answer = json_fields.decode_or_none(_decode_answer, sse.payload(event))
        return answer is not None and answer.usage is not None and bool(answer.choices)

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """Return OpenAI's error object; `type` follows the status as OpenAI's own does."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        return msgspec.json.encode(body)

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """Return an error event as vLLM sends it. No [DONE] follows, which would look like a regular end."""
        return b"data: " + self.error(status, code, message) + b"\n\n"


def _has_line(field: re.Pattern[bytes], tail: bytes) -> bool:
    """True if a line with this field is complete. The end of the line is searched separately: an expression that
    extended to the end of the line would scan that far from each occurrence of the field."""
    found = field.search(tail)
    return found is not None and sse.line_ends(tail, found.end())


def _is_behind(tail: bytes) -> bool:
    """True if `tail` has an event that comes after the finish reason."""
    if b'"hidden_states"' in tail and _has_line(_HIDDEN_STATES, tail):
        return True
    if b'"sglext"' not in tail:
        return False
    lines = tail.rsplit(b"\n", sse.EVENTS_BACK_MAX)[:-1]  # the last line has no end
    choices = [(line, _NO_CHOICES.search(line)) for line in lines if b'"sglext"' in line]
    return any(found is not None and _EXTRAS.search(line, found.end()) is not None for line, found in choices)


def _goes_on(tail: bytes) -> bool:
    """True if one of several choices sent content in `tail` without a finish reason after it. SGLang sends hidden
    states after the reason."""
    if not _SECOND.search(tail):
        return False
    finished: set[int] = set()
    for data in sse.payloads_backwards(tail):
        event = json_fields.decode_or_none(_decode_choices, data) if b'"hidden_states"' not in data else None
        for choice in event.choices if event is not None else ():
            if choice.finish_reason:
                finished.add(choice.index)
            elif choice.index not in finished:
                return True
    return False


_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def _usage(data: bytes) -> Usage | None:
    try:
        usage = _decode_counted(data).usage
    except UNREADABLE:
        usage = json_fields.cut_usage(_Usage, data)
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return json_fields.counts(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)
