"""Requests of the Messages API: read for placement, their prompts written as canonical bytes of the chat that vLLM
makes of them. As in canonical_openai.py, one decoder reads nearly all of them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.facts.requests import Ask, Beginning, Heading, Prompt
from router.core.prompts import bodies
from router.core.prompts.beginnings import Place, Seen, ends_of
from router.core.prompts.bodies import ABSENT, UNREADABLE
from router.core.prompts.canonical import BILLING_HEADER, NO_EFFORT, Chat, Part, arguments, call, calls
from router.core.prompts.template_messages import Block, Body, Head, Message


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


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Raw = ABSENT


_BODY = msgspec.json.Decoder(_Body)
_decode_quick = msgspec.json.Decoder(Body).decode
_decode_rest = msgspec.json.Decoder(Head).decode
_decode_message = msgspec.json.Decoder(Message).decode
_decode_messages = msgspec.json.Decoder(list[Message]).decode
_decode_blocks = msgspec.json.Decoder(str | list[Block]).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode


def decode_messages(body: bytes) -> _Body:
    """The body, field by field. Raises BadBody when it is no JSON object."""
    return bodies.decode_body(_BODY, body)


def quick_ask(body: bytes, keep: bool, seen: Seen | None) -> Ask | None:
    """What nearly all requests are read by: every field of the type that it should be. None for the others."""
    try:
        prompt = None
        if seen is not None and not keep and (place := seen.find(body, b"anthropic")):
            fields: Head = _decode_rest(place.rest)
            prompt = _seen_prompt(fields, body, seen, place)
        if prompt is None:
            quick = fields = _decode_quick(body)
            chat = Chat()
            _head(chat, fields)
            for message in quick.messages:
                _message(chat, message)
            prompt = chat.prompt()
    except (*UNREADABLE, _Unknown):
        return None
    most, salt = fields.max_tokens, fields.cache_salt
    return Ask(
        fields.model,
        prompt,
        fields.stream or False,
        salt.encode(errors="surrogatepass") if salt else b"",
        fields.prompt_cache_key,
        most if most is not None and most > 0 else None,
        wants_usage=True,
        metadata=bodies.metadata_of(fields.metadata) if fields.metadata is not ABSENT else b"",
        decoded=fields if keep else None,
    )


def _seen_prompt(fields: Head, body: bytes, seen: Seen, place: Place) -> Prompt | None:
    messages = place.new(fields.messages)
    if messages is None:
        return None
    chat = Chat(place.mark.beginning)
    parts = [fields.tools, fields.system, fields.chat_template_kwargs, fields.output_config, fields.thinking]
    chat.rendered(seen.rendered(parts, lambda: _heading(fields)))
    ends: list[tuple[int, Beginning]] = []
    for message, end in zip(messages, ends_of(body, place.mark.at, messages), strict=True):
        _message(chat, _decode_message(message))
        ends.append((end, chat.beginning()))

    def whole() -> Prompt | None:
        seen.spend(len(body) // 8)
        return prompt_of(decode_messages(body))

    return chat.joined(seen.learn(place, body, ends), whole)


def _heading(fields: Head) -> Heading:
    chat = Chat()
    _head(chat, fields)
    return chat.heading()


def prompt_of(fields: _Body) -> Prompt | None:
    """The prompt; None where it is not understood."""
    if not fields.messages:
        return None
    try:
        chat = Chat()
        _head(chat, fields)
        for message in _decode_messages(fields.messages):
            _message(chat, message)
        return chat.prompt()
    except (*UNREADABLE, _Unknown):
        return None


def _head(chat: Chat, fields: _Body | Head) -> None:
    if bodies.given(fields.tools):
        tools = _decode_tools(fields.tools)
        chat.tools([_tool(tool) for tool in tools])
        if tools and bodies.given(tools[-1].cache_control):
            chat.head_breakpoint()
    if bodies.given(fields.chat_template_kwargs):
        chat.argument("chat_template_kwargs", arguments(fields.chat_template_kwargs))
    effort = (bodies.as_type(dict, fields.output_config) or {}).get("effort")
    if (bodies.as_type(dict, fields.thinking) or {}).get("type") == "disabled":
        effort = NO_EFFORT  # as vLLM has it for templates that can do without thinking
    chat.effort(effort)
    if bodies.given(fields.system):
        content = _decode_blocks(fields.system)
        if system := _system_text(content):
            chat.system(system)
            if not isinstance(content, str):
                _mark_system(chat, content)


def _tool(tool: _Tool) -> dict[str, Any]:
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function | {"strict": tool.strict, "defer_loading": tool.defer_loading}}


def _system_text(content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    if any(block.type in ("tool_addition", "tool_removal") for block in content):
        raise _Unknown("tools that change within a conversation")
    texts = [block.text for block in content if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _mark_system(chat: Chat, blocks: list[Block]) -> None:
    marked = [number for number, block in enumerate(blocks, 1) if bodies.given(block.cache_control)]
    if marked:
        chat.head_breakpoint(len(_system_text(blocks[marked[-1] :]).encode()))


def _message(chat: Chat, message: Message) -> None:
    """One message, and before it the results of tools that it brings, which are messages of their own to engines."""
    role, content = message.role, message.content
    if role == "system":
        if text := _system_text(content):
            chat.message("system", (text,))
        return
    if isinstance(content, str):
        chat.text(role, content)
        return
    parts: list[Part] = []
    made: list[dict[str, Any]] = []
    thoughts: list[str] = []
    breakpoints: tuple[int, ...] = ()
    for block in content:
        if block.type == "tool_use":
            made.append(call(block.name or "", msgspec.json.decode(block.input) if bodies.given(block.input) else {}))
        elif block.type == "tool_result" and role == "user":
            _tool_result(chat, block)
        elif block.type == "thinking":
            thoughts += [block.thinking] if block.thinking is not None else []
        else:
            parts += _part(block)
            if block.cache_control is not ABSENT and bodies.given(block.cache_control):
                breakpoints = (*breakpoints, len(parts))
    if role == "user" and not parts:
        return
    fields = [("tool_calls", calls(made))] if made else []
    if thought := "".join(thoughts):
        fields.append(("reasoning", msgspec.json.encode(thought)))
    chat.message(role, parts, fields, breakpoints)


def _part(block: Block) -> list[Part]:
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


def _tool_result(chat: Chat, block: Block) -> None:
    """A message of role `tool`; its images follow as the user's."""
    content = _decode_blocks(block.content) if bodies.given(block.content) else ""
    blocks = [] if isinstance(content, str) else content
    if any(part.type == "tool_reference" for part in blocks):
        raise _Unknown("tool_reference")
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in blocks if part.type == "text")
    chat.message("tool", (text,))
    images = [_image(part.source) for part in blocks if part.type == "image"]
    if images:
        chat.message("user", images)
