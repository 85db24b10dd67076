"""The OpenAI dialect as vLLM and SGLang speak it: chat completions, completions, embeddings.

The canonical bytes of a prompt are what the chat template will see, in the order most templates use it: tools and
template arguments, then each message as

    RS role US content [GS field US json]...

with generation parameters left out. JSON that the template prints (tools, tool calls) is decoded and encoded again,
so white space and escapes do not matter, but key order does, as it does to `tojson` in a template. A message adds
bytes only at the end, so an appended conversation extends its own canonical bytes. Whatever is not understood makes
the prompt unknown (None), never the request invalid: the engine judges its own input.
"""

from __future__ import annotations

import re
from array import array
from typing import TypeVar

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from router.core import sse
from router.core.dialects.base import BadBody
from router.core.facts import Ask, Prompt, Usage

RS, US, GS = b"\x1e", b"\x1f", b"\x1d"
# An image is hundreds of tokens, not its URL's length: it stands as 1,024 bytes, about 256 tokens.
OPAQUE_REPEATS = 64
TOKEN_ID_BYTES = 4
USAGE_BODY_BYTES_MAX = 4 << 20  # usage is not looked for in larger answers (embeddings)

_ABSENT = Raw(b"")
_T = TypeVar("_T")
# Raw fields are checked for UTF-8 and for depth (CPython's recursion limit) only when they are decoded.
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class _Body(msgspec.Struct):
    """Top level of a request; Raw is not decoded, whatever it holds."""

    model: Raw = _ABSENT
    stream: Raw = _ABSENT
    stream_options: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input: Raw = _ABSENT
    tools: Raw = _ABSENT
    functions: Raw = _ABSENT
    documents: Raw = _ABSENT
    chat_template: Raw = _ABSENT
    chat_template_kwargs: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    cache_salt: Raw = _ABSENT
    prompt_cache_key: Raw = _ABSENT
    max_tokens: Raw = _ABSENT
    max_completion_tokens: Raw = _ABSENT
    previous_response_id: Raw = _ABSENT
    store: Raw = _ABSENT


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[Raw] | None = None
    name: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    tool_call_id: Raw = _ABSENT
    function_call: Raw = _ABSENT
    reasoning: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


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
    error: Raw = _ABSENT


class _ErrorCode(msgspec.Struct):
    code: int | str | None = None


_HEAD = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")
_FIELDS = ("name", "tool_calls", "tool_call_id", "function_call", "reasoning", "reasoning_content")

_decode_body = msgspec.json.Decoder(_Body).decode
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
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
        try:
            fields = _decode_body(body)
        except _UNREADABLE as error:
            raise BadBody("invalid_json", f"The request body is not a JSON object: {error}") from error
        model = _as(str, fields.model)
        if model is None and _given(fields.model):
            raise BadBody("invalid_model", "The field 'model' must be a string.")
        options = _as(dict, fields.stream_options) or {}
        return Ask(
            model=model,
            prompt=_prompt(path, fields),
            stream=_as(bool, fields.stream) or False,
            salt=(_as(str, fields.cache_salt) or "").encode(errors="surrogatepass"),
            session=_as(str, fields.prompt_cache_key),
            output_tokens_max=_positive(fields.max_completion_tokens) or _positive(fields.max_tokens),
            stored=_as(bool, fields.store),
            response_id=_as(str, fields.previous_response_id),
            wants_usage=bool(options.get("include_usage")),
        )

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
        try:
            error = _decode_error(sse.first_payload(chunk)).error
        except _UNREADABLE:
            return None
        if not _given(error):
            return None
        try:
            code = _decode_error_code(error).code
        except _UNREADABLE:
            return 500  # an error, if not an object
        return code if isinstance(code, int) and 400 <= code < 600 else 500

    def with_usage(self, body: bytes) -> bytes:
        """Ask for usage at the end of the stream; only called when the client did not.

        A last duplicate key wins in the JSON parsers of vLLM and SGLang (pydantic, json), so the option is
        spliced in before the closing brace and the rest of the body stays as it was.
        """
        end = body.rindex(b"}")
        options = msgspec.json.decode(_decode_body(body).stream_options or b"{}")
        merged = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return body[:end] + b',"stream_options":' + msgspec.json.encode(merged) + body[end:]

    def is_usage_event(self, event: bytes) -> bool:
        """The extra event has usage and no choices."""
        if b'"usage"' not in event:
            return False
        try:
            answer = _decode_answer(sse.payload(event))
        except _UNREADABLE:
            return False
        return answer.usage is not None and answer.choices == []

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


def _as(type_: type[_T], raw: Raw) -> _T | None:
    """Decode a Raw field if it is of this type; None when absent, null or of another."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=type_)
    except _UNREADABLE:
        return None


def _given(raw: Raw) -> bool:
    """Present and not null. (A Raw never equals bytes.)"""
    return bool(raw) and bytes(raw) != b"null"


def _positive(raw: Raw) -> int | None:
    value = _as(int, raw)
    return value if value is not None and value > 0 else None


def _prompt(path: str, fields: _Body) -> Prompt | None:
    try:
        if fields.messages:
            return _chat_prompt(fields)
        given = fields.input if path.endswith("/embeddings") else fields.prompt
        return _text_prompt(_decode_prompt(given)) if given else None
    except _UNREADABLE:
        return None


def _chat_prompt(fields: _Body) -> Prompt:
    out: list[bytes] = []
    for name in _HEAD:
        raw = getattr(fields, name)
        if _given(raw):
            out += (GS, name.encode(), US, _canonical(raw))
    size = sum(map(len, out))
    first_user_end, spans, opaque = 0, [], 0
    for message in _decode_messages(fields.messages):
        start, before = size, len(out)
        out += (RS, message.role.encode(), US)
        opaque += _content(message.content, out)
        for name in _FIELDS:
            raw = getattr(message, name)
            if _given(raw):
                out += (GS, name.encode(), US, _canonical(raw))
        size += sum(map(len, out[before:]))
        if message.role == "assistant":
            spans.append((start, size))
        elif message.role == "user" and not first_user_end:
            first_user_end = size
    return Prompt(b"".join(out), first_user_end or size, tuple(spans), opaque)


def _content(content: str | list[Raw] | None, out: list[bytes]) -> int:
    """Append a message's content; returns how many of its bytes are opaque."""
    if content is None:
        return 0
    if isinstance(content, str):
        out.append(content.encode())
        return 0
    opaque = 0
    for position, raw in enumerate(content):
        if position:
            out.append(b"\n")  # vLLM joins text parts so where the template takes a string
        part = _decode_part(raw)
        if isinstance(part, str):
            part = _Part("text", part)
        if part.text is not None and part.type in ("text", "input_text", "output_text", "refusal", ""):
            out.append(part.text.encode())
        else:
            filler = xxh3_128_digest(bytes(raw)) * OPAQUE_REPEATS
            out.append(filler)
            opaque += len(filler)
    return opaque


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


def _canonical(raw: Raw) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(raw))


def _usage(data: bytes) -> Usage | None:
    try:
        usage = _decode_answer(data).usage
    except _UNREADABLE:
        usage = _cut_usage(data)
    if usage is None or usage.prompt_tokens < 0:
        return None
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    if cached is not None:
        cached = min(max(0, cached), usage.prompt_tokens)
    return Usage(usage.prompt_tokens, max(0, usage.completion_tokens or 0), cached)


_USAGE_AT = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')


def _cut_usage(data: bytes) -> _Usage | None:
    """Usage from an event whose beginning is cut off."""
    found = _USAGE_AT.findall(data)
    try:
        return msgspec.json.decode(found[-1], type=_Usage) if found else None
    except _UNREADABLE:
        return None
