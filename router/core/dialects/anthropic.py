"""The Anthropic dialect as vLLM speaks it: Messages.

A request becomes the same canonical bytes as the chat that vLLM 0.32 makes of it (entrypoints/anthropic/serving.py),
so a conversation is one chain through either API. `cache_control` marks where Anthropic's own service would cache;
engines cache every block, so it changes nothing, nor do sampling and the budget of thinking. vLLM merges system
messages between others into the first one where the template wants that; the router, which does not know the
template, leaves them in place.

Usage: prompt tokens are `input_tokens` plus those read from and written to the cache. Streams always carry it, whole
only in `message_delta`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core import sse
from router.core.dialects import wire
from router.core.dialects.chat import BILLING_HEADER, Chat, Part, call, calls, canonical
from router.core.dialects.messages_input import messages_input
from router.core.dialects.wire import ABSENT, UNREADABLE, USAGE_BODY_BYTES_MAX
from router.core.facts import Ask, Prompt, TemplateInput, Usage


class _Unknown(ValueError):
    """Something of which it is not known what the engine makes."""


class _Body(msgspec.Struct):
    model: Raw = ABSENT
    stream: Raw = ABSENT
    messages: Raw = ABSENT
    system: Raw = ABSENT
    tools: Raw = ABSENT
    metadata: Raw = ABSENT
    thinking: Raw = ABSENT
    output_config: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    max_tokens: Raw = ABSENT


class _Source(msgspec.Struct):
    type: str = "base64"
    url: str = ""
    media_type: str = "image/jpeg"
    data: str = ""


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    source: Raw = ABSENT
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    content: Raw = ABSENT
    thinking: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


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


class _Error(msgspec.Struct):
    type: str = ""
    code: Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_blocks = msgspec.json.Decoder(str | list[_Block]).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode

# https://docs.anthropic.com/en/api/errors
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
_STATUSES = {kind: status for status, kind in reversed(_ERROR_TYPES.items())}
_EARLY = frozenset((b"message_start", b"ping"))


class Anthropic:
    """Messages."""

    name = "anthropic"

    def parse(self, path: str, body: bytes) -> Ask:
        """Read what placement needs. Raises BadBody for what is not a JSON object, or a model that is no string."""
        fields = wire.decode_body(_BODY, body)
        model = wire.model_of(fields.model)
        prompt = _prompt(fields)
        session = wire.as_type(str, fields.prompt_cache_key)
        if session is None and prompt is None:
            # Often one id for all of a client's conversations: worth less than the beginning of the prompt.
            user = (wire.as_type(dict, fields.metadata) or {}).get("user_id")
            session = user if isinstance(user, str) else None
        return Ask(
            model=model,
            prompt=prompt,
            stream=wire.as_type(bool, fields.stream) or False,
            salt=wire.salt_of(fields.cache_salt),
            session=session,
            output_tokens_max=wire.positive(fields.max_tokens),
            wants_usage=True,
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """The chat that vLLM makes of it; None for images, documents and whatever else is not text."""
        return messages_input(body)

    def usage(self, body: bytes) -> Usage | None:
        """Token counts of an answer that did not stream."""
        answer = wire.decoded(_decode_answer, body) if len(body) <= USAGE_BODY_BYTES_MAX else None
        return _counts(answer.usage) if answer else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Token counts of the last `message_delta`; prompt tokens may have been said in `message_start` only."""
        last: _Usage | None = None
        for data in sse.payloads_backwards(tail):
            event = wire.decoded(_decode_event, data) if b'"usage"' in data else None
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
        """`event: error`, whose type names the status; vLLM says internal_error when its engine has failed."""
        if b'"error"' not in chunk[:4096]:
            return None
        event = wire.decoded(_decode_event, sse.first_payload(chunk))
        if event is None:
            return None
        if not wire.given(event.error):
            return 500 if event.type == "error" else None
        error = wire.as_type(_Error, event.error) or _Error()
        code = wire.as_type(int, error.code)
        return code if code and 400 <= code < 600 else _STATUSES.get(error.type, 500)

    def aborted(self, head: bytes) -> bool:
        """vLLM has no stop_reason for what it gave up, and leaves the field out of a whole answer."""
        if not head.startswith(b"{") or b'"stop_reason"' in head:
            return False
        event = wire.decoded(_decode_event, head)
        return event is not None and event.type == "message"

    def begun(self, chunk: bytes) -> bool:
        """`message_start` and pings may come before prefill is done."""
        return wire.has_event_besides(_EARLY, chunk)

    def with_usage(self, body: bytes) -> bytes:
        """Streams carry usage anyway."""
        return body

    def is_usage_event(self, event: bytes) -> bool:
        """Never: nothing was asked for."""
        return False

    def error(self, status: int, code: str, message: str, param: str | None = None) -> bytes:
        """Anthropic's error object, and our code in it."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message, "code": code}})


def _counts(usage: _Usage | None) -> Usage | None:
    if usage is None or usage.input_tokens is None or usage.input_tokens < 0:
        return None
    cached = usage.cache_read_input_tokens
    prompt = usage.input_tokens + max(0, cached or 0) + max(0, usage.cache_creation_input_tokens or 0)
    return wire.counts(prompt, usage.output_tokens, cached)


def _prompt(fields: _Body) -> Prompt | None:
    if not fields.messages:
        return None
    try:
        chat = Chat()
        _head(chat, fields)
        if wire.given(fields.system) and (system := _system_text(_decode_blocks(fields.system))):
            chat.message("system", (system,))
        for message in _decode_messages(fields.messages):
            _message(chat, message)
        return chat.prompt()
    except (*UNREADABLE, _Unknown):
        return None


def _head(chat: Chat, fields: _Body) -> None:
    if wire.given(fields.tools):
        chat.tools([_tool(tool) for tool in _decode_tools(fields.tools)])
    if wire.given(fields.chat_template_kwargs):
        chat.head("chat_template_kwargs", canonical(fields.chat_template_kwargs))
    effort = (wire.as_type(dict, fields.output_config) or {}).get("effort")
    if (wire.as_type(dict, fields.thinking) or {}).get("type") == "disabled":
        effort = "none"  # as vLLM has it for templates that can do without thinking
    if effort:
        chat.head("reasoning_effort", msgspec.json.encode(effort))


def _tool(tool: _Tool) -> dict[str, Any]:
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function | {"strict": tool.strict, "defer_loading": tool.defer_loading}}


def _system_text(content: str | list[_Block]) -> str:
    if isinstance(content, str):
        return content
    if any(block.type in ("tool_addition", "tool_removal") for block in content):
        raise _Unknown("tools that change within a conversation")
    texts = [block.text for block in content if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _message(chat: Chat, message: _Message) -> None:
    """One message, and before it the results of tools that it brings, which are messages of their own to engines."""
    role, content = message.role, message.content
    if role == "system":
        if text := _system_text(content):
            chat.message("system", (text,))
        return
    if isinstance(content, str):
        chat.message(role, (content,))
        return
    parts: list[Part] = []
    made: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        if block.type == "tool_use":
            arguments = msgspec.json.decode(block.input) if wire.given(block.input) else {}
            made.append(call(block.id or "", block.name or "", arguments))
        elif block.type == "tool_result" and role == "user":
            _tool_result(chat, block)
        elif block.type == "thinking":
            thoughts += [block.thinking] if block.thinking is not None else []
        else:
            parts += _part(block)
    if role == "user" and not parts:
        return
    fields = [("tool_calls", calls(made))] if made else []
    if thoughts:
        fields.append(("reasoning", msgspec.json.encode("".join(thoughts))))
    chat.message(role, parts, fields)


def _part(block: _Block) -> list[Part]:
    if block.type == "text":
        return [block.text] if block.text else []
    if block.type == "image":
        return [_image(block.source)]
    if block.type in ("redacted_thinking", "tool_reference"):
        return []  # vLLM leaves them out
    raise _Unknown(block.type)


def _image(raw: Raw) -> bytes:
    """The URL that an OpenAI client would send."""
    source = msgspec.json.decode(raw, type=_Source)
    return (source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}").encode()


def _tool_result(chat: Chat, block: _Block) -> None:
    """A message of role `tool`; its images follow as the user's."""
    content = _decode_blocks(block.content) if wire.given(block.content) else ""
    blocks = [] if isinstance(content, str) else content
    if any(part.type == "tool_reference" for part in blocks):
        raise _Unknown("tool_reference")
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in blocks if part.type == "text")
    chat.message("tool", (text,), [("tool_call_id", msgspec.json.encode(block.tool_use_id or ""))])
    images = [_image(part.source) for part in blocks if part.type == "image"]
    if images:
        chat.message("user", images)
