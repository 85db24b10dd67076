"""The OpenAI dialect as vLLM and SGLang speak it: chat completions, completions, embeddings.

A chat becomes the canonical bytes of chat.py; a completion's prompt is its own bytes. Whatever is not understood makes
the prompt unknown (None), never the request invalid: the engine judges its own input.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import Raw

from router.core import sse
from router.core.dialects import wire
from router.core.dialects.chat import RS, Chat, Part, calls, canonical
from router.core.dialects.inputs import Body, decode_openai, openai_input
from router.core.dialects.wire import ABSENT, UNREADABLE, USAGE_BODY_BYTES_MAX
from router.core.facts import Ask, Prompt, TemplateInput, Usage

TOKEN_ID_BYTES = 4


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    image_url: Raw = ABSENT


class _Url(msgspec.Struct):
    url: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[Raw] | None = None


class _Error(msgspec.Struct):
    error: Raw = ABSENT


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None


_HEAD = ("functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
_FIELDS = ("name", "tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content")

_decode_part = msgspec.json.Decoder(_Part | str).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_Error).decode
_decode_error_code = msgspec.json.Decoder(_ErrorCode).decode
_decode_prompt = msgspec.json.Decoder(str | list[str | int | list[int]]).decode


class OpenAI:
    """Chat completions, completions and embeddings."""

    name = "openai"

    def parse(self, path: str, body: bytes) -> Ask:
        """Read what placement needs. Raises BadBody for a body that is not a JSON object or names no model."""
        fields = decode_openai(body)
        model = wire.model_of(fields.model)
        options = wire.as_type(dict, fields.stream_options) or {}
        return Ask(
            model=model,
            prompt=_prompt(path, fields),
            stream=wire.as_type(bool, fields.stream) or False,
            salt=wire.salt_of(fields.cache_salt) + (bytes(fields.extra_key) if wire.given(fields.extra_key) else b""),
            session=wire.as_type(str, fields.prompt_cache_key),
            output_tokens_max=wire.positive(fields.max_completion_tokens) or wire.positive(fields.max_tokens),
            stored=wire.as_type(bool, fields.store),
            response_id=wire.as_type(str, fields.previous_response_id),
            wants_usage=bool(options.get("include_usage")),
            decoded=fields,
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """Of chats and completions that are one text; None for anything else."""
        return openai_input(path, body, decoded if isinstance(decoded, Body) else None)

    def usage(self, body: bytes) -> Usage | None:
        """Token counts of an answer that did not stream."""
        return _usage(body) if len(body) <= USAGE_BODY_BYTES_MAX else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Token counts from the last events of a stream: vLLM sends them in the last one before [DONE]."""
        for data in sse.payloads_backwards(tail):
            if b'"usage"' in data:
                usage = _usage(data)
                if usage is not None:
                    return usage
        return None

    def event_error(self, chunk: bytes) -> int | None:
        """vLLM reports an engine failure as `data: {"error": {..., "code": 500}}` on status 200."""
        if not chunk.startswith(b"data:") or b'"error"' not in chunk[:4096]:
            return None
        event = wire.decoded(_decode_error, sse.first_payload(chunk))
        if event is None or not wire.given(event.error):
            return None
        try:
            code = _decode_error_code(event.error).code
        except UNREADABLE:
            return 500  # an error, if not an object
        return code if isinstance(code, int) and 400 <= code < 600 else 500

    def aborted(self, head: bytes) -> bool:
        """vLLM, told to stop, ends what runs with status 200 and this reason."""
        return b'"finish_reason":"abort"' in head

    def begun(self, chunk: bytes) -> bool:
        """Chunks come only after prefill: vLLM's first one, with the role, is made with the first token."""
        return True

    def with_usage(self, body: bytes) -> bytes:
        """Ask for usage at the end of the stream; only called when the client did not.

        A last duplicate key wins in the JSON parsers of vLLM and SGLang (pydantic, json), so the option is
        spliced in before the closing brace and the rest of the body stays as it was.
        """
        end = body.rindex(b"}")
        options = msgspec.json.decode(decode_openai(body).stream_options or b"{}")
        merged = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return body[:end] + b',"stream_options":' + msgspec.json.encode(merged) + body[end:]

    def is_usage_event(self, event: bytes) -> bool:
        """The extra event has usage and no choices."""
        if b'"usage"' not in event:
            return False
        answer = wire.decoded(_decode_answer, sse.payload(event))
        return answer is not None and answer.usage is not None and answer.choices == []

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """OpenAI's error object; `type` follows the status as OpenAI's own does."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        return msgspec.json.encode(body)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def _prompt(path: str, fields: Body) -> Prompt | None:
    try:
        if isinstance(fields.messages, list):
            return _chat_prompt(fields, fields.messages)
        if fields.messages:
            return None
        given = fields.input if path.endswith("/embeddings") else fields.prompt
        return _text_prompt(_decode_prompt(given)) if given else None
    except UNREADABLE:
        return None


def _chat_prompt(fields: Body, messages: list[dict[str, Any]]) -> Prompt:
    chat = Chat()
    if wire.given(fields.tools):
        chat.tools(msgspec.json.decode(fields.tools))
    for name in _HEAD:
        raw = getattr(fields, name)
        if wire.given(raw):
            chat.head(name, canonical(raw))
    for message in messages:
        given = [(name, _field(name, message[name])) for name in _FIELDS if message.get(name) is not None]
        chat.message(_string(message.get("role", "")), _parts(message.get("content")), given)
    return chat.prompt()


def _field(name: str, value: object) -> bytes:
    return calls(value) if name == "tool_calls" else msgspec.json.encode(value)


def _parts(content: object) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise msgspec.ValidationError("content")
    return [_text_or(part) for part in content]


def _text_or(part: object) -> Part:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    return _part(Raw(msgspec.json.encode(part)))


def _string(value: object) -> str:
    if isinstance(value, str):
        return value
    raise msgspec.ValidationError("role")


def content_parts(content: str | list[Raw] | None) -> list[Part]:
    """The parts of a message's content: texts, and the identities of what is not text. Raises UNREADABLE."""
    if content is None:
        return []
    return [content] if isinstance(content, str) else [_part(raw) for raw in content]


def _part(raw: Raw) -> Part:
    part: _Part | str = _decode_part(raw)
    if isinstance(part, str):
        return part
    if part.text is not None and part.type in ("text", "input_text", "output_text", "refusal", ""):
        return part.text
    url = wire.as_type(str, part.image_url) or (wire.as_type(_Url, part.image_url) or _Url()).url
    return url.encode() if url else bytes(raw)


def _text_prompt(prompt: str | list[str | int | list[int]]) -> Prompt:
    """A string, strings, token ids, or lists of token ids; several prompts are chained one behind the other."""
    if isinstance(prompt, str):
        text = prompt.encode()
        return Prompt(text, len(text))
    ids: list[int] = []
    texts: list[bytes] = []
    for item in prompt:
        if isinstance(item, str):
            texts.append(item.encode())
        elif isinstance(item, int):
            ids.append(item)
        else:
            ids += item
    if texts:
        text = RS.join(texts)
        return Prompt(text, len(texts[0]))
    text = array("I", ids).tobytes()
    return Prompt(text, len(text), opaque_bytes=len(text), bytes_per_token=TOKEN_ID_BYTES)


def _usage(data: bytes) -> Usage | None:
    try:
        usage = _decode_answer(data).usage
    except UNREADABLE:
        usage = wire.cut_usage(_Usage, data)
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return wire.counts(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details else None)
