"""SGLang's own dialect: `/generate`, which takes a prompt as text or token ids and uses no chat template.

Read in SGLang 0.5.23: the body is `GenerateReqInput` (srt/managers/io_struct.py), answers are put together in
srt/managers/tokenizer_manager.py, errors in srt/entrypoints/http_server.py. A text becomes the same canonical bytes as
the same prompt through `/v1/completions`, so one chain serves both.

The body names no model. It may name a LoRA adapter (`lora_path`), which SGLang lists among its models. A field `model`,
which SGLang ignores, selects the fleet if the router serves several. `extra_key` separates caches as `cache_salt` does.
A body that cannot be interpreted makes the prompt unknown, never the request invalid.
"""

from __future__ import annotations

import re
from http import HTTPStatus

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from router.core.dialects import errors, sse
from router.core.dialects.dialect import Abort, NoUsageRequest, abort_of
from router.core.prompts import json_fields
from router.core.prompts.canonical import OPAQUE_REPEATS
from router.core.prompts.incremental_parse import BodyPrefixCache
from router.core.prompts.json_fields import ABSENT, UNREADABLE, USAGE_BODY_BYTES_MAX
from router.core.prompts.raw_prompts import TOKEN_ID_BYTES, Given, decode_ids, decode_text, decode_texts, only_text
from router.core.prompts.sliced_json import read, utf8
from router.core.types.placements import EndReason, Usage
from router.core.types.progress import is_progress
from router.core.types.requests import Prompt, RequestSpec, TemplateInput

OUTPUT_TOKENS_DEFAULT = 128  # max_new_tokens of SGLang's srt/sampling/sampling_params.py


class _Body(msgspec.Struct):
    model: Raw = ABSENT
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    input_embeds: Raw = ABSENT
    image_data: Raw = ABSENT
    video_data: Raw = ABSENT
    audio_data: Raw = ABSENT
    sampling_params: Raw = ABSENT
    stream: Raw = ABSENT
    lora_path: Raw = ABSENT
    cache_salt: Raw = ABSENT
    extra_key: Raw = ABSENT
    session_params: Raw = ABSENT
    session_id: Raw = ABSENT
    conversation_id: Raw = ABSENT
    logprob_start_len: Raw = ABSENT  # the engine computes the prompt from this token on, cached or not


class _Sampling(msgspec.Struct):
    max_new_tokens: Raw = ABSENT


class _Finish(msgspec.Struct):
    type: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: Raw = ABSENT


class _Answer(msgspec.Struct):
    """An answer, a piece of one, or an error: nested in streams, flat (`object`) otherwise."""

    meta_info: _Meta | None = None
    index: Raw = ABSENT
    error: Raw = ABSENT
    object: str = ""
    type: Raw = ABSENT
    code: Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_answers = msgspec.json.Decoder(_Answer | list[_Answer]).decode
_decode_meta = msgspec.json.Decoder(_Meta).decode
# meta_info at the end of an event that is cut off at its beginning: objects in it hold none themselves.
_META_AT = re.compile(rb'"meta_info"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})([^{}]*)')
_ABORT = b'"abort"'
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*(?:"[^"]|\{\s*")')
_MEDIA = ("image_data", "video_data", "audio_data")


class SGLang(NoUsageRequest):
    """SGLang's `/generate`."""

    name = "sglang"
    says_done = True
    seen_as = (b"", b"")

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: BodyPrefixCache | None = None) -> RequestSpec:
        """Read the fields that placement needs. Raises InvalidBody for a body that is not a JSON object, or a model
        that is no string."""
        fields = json_fields.decode_body(_BODY, body)
        adapter, adapters = json_fields.adapter_of(fields.lora_path)
        sampling = json_fields.decode_as(_Sampling, fields.sampling_params) or _Sampling()
        return RequestSpec(
            model=json_fields.model_of(fields.model),
            prompt=_prompt(fields),
            stream=json_fields.is_true(fields.stream),
            salt=_salt(fields) + adapters,
            session=json_fields.decode_as(str, fields.session_id)
            or json_fields.decode_as(str, fields.conversation_id)
            or _held_by(fields),
            output_tokens_max=json_fields.positive(sampling.max_new_tokens) or OUTPUT_TOKENS_DEFAULT,
            wants_usage=True,
            adapter=adapter,
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Return the one prompt of the body. None for several, for media, and for sessions kept by the engine. None
        also with `extra_key`: SGLang 0.5.23 publishes such blocks as if they had no key."""
        fields = json_fields.decode_or_none(_BODY.decode, body) or _Body()
        each = any(json_fields.decode_as(list, raw) is not None for raw in (fields.cache_salt, fields.lora_path))
        if (
            each
            or any(map(json_fields.has_value, (fields.input_embeds, fields.extra_key, fields.logprob_start_len)))
            or _held_by(fields)
            or _media(fields)
        ):
            return None
        try:
            if json_fields.has_value(fields.input_ids):
                given = Given(one_kind=True)
                given.read(fields.input_ids, decode_ids)
                return TemplateInput(ids=given.id_bytes()) if given.flat or given.lists == 1 else None
            # SGLang's tokenizer_manager.py calls the tokenizer without options, so the usual special tokens are added.
            text = only_text(fields.text) if fields.text else None
            return TemplateInput(text=text, add_special_tokens=True) if text is not None else None
        except UNREADABLE:
            return None

    def usage(self, body: bytes) -> Usage | None:
        """Return the token counts of an answer that did not stream. None for several answers: the counts of several
        prompts look like those of several answers to one (`n`)."""
        if len(body) > USAGE_BODY_BYTES_MAX:
            return None
        answers = json_fields.decode_or_none(_decode_answers, body)
        if isinstance(answers, list):
            return _counts(answers[0].meta_info) if len(answers) == 1 else None
        return _counts(answers.meta_info) if answers else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Return the token counts of the last event before [DONE]. Every event has them, and the text from its
        beginning."""
        for data in sse.payloads_backwards(tail):
            if b'"meta_info"' in data:
                answer = json_fields.decode_or_none(_decode_answer, data) or _cut(data)
                return _counts(answer.meta_info) if answer and not json_fields.has_value(answer.index) else None
        return None

    def event_error(self, chunk: bytes) -> int | None:
        """Return the status of `data: {"error": {..., "code": 400}}` on status 200, or of an answer that ended with an
        error's status."""
        if not chunk.startswith(b"data:") or (b'"error"' not in chunk[:4096] and _ABORT not in chunk):
            return None
        event = json_fields.decode_or_none(_decode_answer, sse.first_payload(chunk))
        if event is None:
            return None
        if json_fields.has_value(event.error):
            return errors.status_of_raw(event.error)
        if event.object == "error":
            return errors.status_of(errors.ErrorFields(event.type, event.code))
        finish = _finish(event)
        code = finish.status_code if finish.type == "abort" else None
        return code if code is not None and 400 <= code < 600 else None

    def find_abort(self, head: bytes) -> Abort | None:
        """Return the outcome of an answer with finish reason `abort`. None if the request is at fault (SGLang,
        schedule_batch.py, FINISH_ABORT). An abort without a status was requested."""
        if _ABORT not in head:
            return None
        data = sse.first_payload(head) if head.startswith(b"data:") else head
        answers = json_fields.decode_or_none(_decode_answers, data)
        ends = [_finish(answer) for answer in (answers if isinstance(answers, list) else [answers] if answers else [])]
        statuses = [end.status_code or 0 for end in ends if end.type == "abort"]
        if any(status >= 500 for status in statuses):
            return Abort.FAILED
        return abort_of(head) if any(status < 400 for status in statuses) else None

    def has_output(self, chunk: bytes) -> bool:
        """True for an event with data: the first event carries the first token."""
        return is_progress(chunk)

    def find_ending(self, tail: bytes) -> EndReason | None:
        """Whole: at least one answer has a finish reason, other than an error's status."""
        reason = _FINISHED.search(tail)
        finished = reason is not None and sse.line_ends(tail, reason.end())  # the event is complete
        if finished and _ABORT not in tail:
            return EndReason.OK
        for data in sse.payloads_backwards(tail):
            if (status := self.event_error(b"data: " + data)) is not None:
                return errors.ending_of(status, data)
        return EndReason.OK if finished else None

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """Return SGLang's flat error, with the router's code instead of a second copy of the status."""
        kind = HTTPStatus(status).phrase if status in _STATUSES else "Error"
        body = {"object": "error", "message": message, "type": kind, "param": param, "code": code}
        return msgspec.json.encode(body)

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """Return an error event as SGLang 0.5.23 sends it (srt/entrypoints/http_server.py)."""
        return b'data: {"error":' + self.error(status, code, message) + b"}\n\n"


_STATUSES = frozenset(HTTPStatus)


def with_rank(body: bytes, rank: int) -> bytes:
    """Return the same request for one data-parallel rank. `/generate` reads no header for it (unless the server was
    started with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES); of two equal keys its JSON parser takes the last."""
    end = body.rindex(b"}")
    # A body with no field at all has no prompt either; the engine refuses it as it stands.
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return body[:end] + comma + b'"routed_dp_rank":%d' % rank + body[end:]


def _finish(answer: _Answer) -> _Finish:
    meta = answer.meta_info
    return (json_fields.decode_as(_Finish, meta.finish_reason) if meta else None) or _Finish()


def _counts(meta: _Meta | None) -> Usage | None:
    if meta is None or meta.prompt_tokens is None:
        return None
    return json_fields.counts(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)


def _cut(data: bytes) -> _Answer | None:
    """Return the readable part of an event that begins in the middle of its text."""
    found = _META_AT.findall(data)
    if not found or b'"index"' in found[-1][1]:
        return None
    meta: _Meta | None = json_fields.decode_or_none(_decode_meta, found[-1][0])
    return _Answer(meta_info=meta)


def _salt(fields: _Body) -> bytes:
    """Return the bytes that separate caches apart from the adapter. `cache_salt` alone gives the same salt as in every
    other dialect."""
    salt, extra = _read_salt_field(fields.cache_salt), _read_salt_field(fields.extra_key)
    return salt + b"\x1fextra_key\x1f" + extra if extra else salt


def _read_salt_field(raw: Raw) -> bytes:
    given = bytes(raw) if json_fields.has_value(raw) else b""
    # A batch may have one for each of its prompts.
    return json_fields.salt_of(raw) if given.startswith(b'"') else given


def _held_by(fields: _Body) -> str | None:
    """Return the id of a session opened on one replica, which keeps the beginning of the prompt."""
    session = json_fields.decode_as(dict, fields.session_params) or {}
    name = session.get("id")
    return name if isinstance(name, str) and name else None


def _media(fields: _Body) -> list[bytes]:
    """Return the identities of content that is not text."""
    found: list[bytes] = []
    for name in _MEDIA:
        raw = getattr(fields, name)
        if json_fields.has_value(raw) and bytes(raw) not in (b"[]", b"[null]"):
            found += [bytes(item) for item in json_fields.decode_as(list[Raw], raw) or [raw]]
    return found


def _prompt(fields: _Body) -> Prompt | None:
    """Return the prompt of text or ids, with several prompts chained as in the OpenAI dialect. Media come first: only
    the model's processor knows their places in the text."""
    if json_fields.has_value(fields.input_embeds) or _held_by(fields):
        return None
    try:
        media = b"".join(xxh3_128_digest(item) * OPAQUE_REPEATS for item in _media(fields))
        if json_fields.has_value(fields.input_ids):
            given = Given(one_kind=True)
            given.read(fields.input_ids, decode_ids)
            whole = media + given.id_bytes()
            return Prompt(whole, len(whole), (), len(media), TOKEN_ID_BYTES) if whole else None
        if not json_fields.has_value(fields.text):
            return None
        if json_fields.is_text(fields.text):
            text = utf8(read(decode_text, fields.text))
            return Prompt(media + text, len(media) + len(text), opaque_bytes=len(media))
        given = Given()
        given.read(fields.text, decode_texts)
        return Prompt(media + given.text(), len(media) + given.first_text_bytes, opaque_bytes=len(media))
    except UNREADABLE:
        return None
