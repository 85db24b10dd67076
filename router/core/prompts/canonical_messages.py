"""Requests of the Messages API, read for placement: their prompts become canonical bytes of the chat that vLLM makes of
them. One decoder reads nearly all requests, as in canonical_openai.py."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts import agent_headers, json_fields, sliced_json
from router.core.prompts.canonical import NO_EFFORT, Chat, Part, arguments, call, calls
from router.core.prompts.incremental_parse import BodyPrefixCache, KnownPrefix
from router.core.prompts.json_fields import ABSENT, UNREADABLE
from router.core.prompts.messages_fields import (
    LOOSE,
    Block,
    Fields,
    Head,
    LooseBody,
    Message,
    MessagesBody,
    build_messages_body,
    decode_blocks,
    decode_body,
    decode_head,
    decode_message,
    decode_messages,
    decode_tools,
    system_text,
    to_function,
)
from router.core.prompts.template_chat import UnsupportedForTemplate
from router.core.types.requests import DecodedMessages, Heading, Prompt, RequestSpec

SEEN_AS = (b"anthropic", b"anthropic, kept")  # names of bodies in a `BodyPrefixCache`


class _Source(msgspec.Struct):
    type: str = "base64"
    url: str = ""
    media_type: str = "image/jpeg"
    data: str = ""


def decode_loose(body: bytes) -> LooseBody:
    """Decode the body field by field. Raises InvalidBody if it is not a JSON object."""
    return json_fields.decode_body(LOOSE, body)


def parse_quick(body: bytes, keep: bool, seen: BodyPrefixCache | None) -> RequestSpec | None:
    """Return the request if every field has the right type, as in nearly all requests, else None."""
    try:
        prompt, new_bytes = None, 0
        if seen is not None and (place := seen.find(body, SEEN_AS[keep])):
            fields: Head = decode_head(place.rest)
            said = place.copy_known_messages() if keep else None
            prompt = _seen_prompt(fields, body, seen, place, said)
            if prompt is not None and said is not None:
                fields, new_bytes = build_messages_body(fields, said.messages), len(place.rest)
        if prompt is None:
            quick = fields = decode_body(body) if len(body) < sliced_json.LONG_BYTES_MIN else _long(body)
            chat = Chat()
            _head(chat, fields)
            for message in quick.messages:
                _message(chat, message)
            prompt = chat.prompt()
    except (*UNREADABLE, UnsupportedForTemplate):
        return None
    most, salt = fields.max_tokens, fields.cache_salt
    return RequestSpec(
        fields.model or None,
        prompt,
        fields.stream or False,
        salt.encode(errors="surrogatepass") if salt else b"",
        fields.prompt_cache_key,
        most if most is not None and most > 0 else None,
        wants_usage=True,
        metadata=json_fields.metadata_of(fields.metadata),
        names=agent_headers.names_of(fields.nvext, ABSENT, fields.metadata, fields.session_id),
        new_bytes=new_bytes,
        decoded=fields if keep else None,
    )


def _long(body: bytes) -> MessagesBody:
    """Decode a long body, its messages one by one. Raises UNREADABLE."""
    folded = sliced_json.fold(body)
    fields: Head = decode_head(folded.document)
    messages, fields.messages = fields.messages, []
    return build_messages_body(folded.restore(fields), list(folded.each(messages, decode_message)))


def _seen_prompt(
    fields: Head, body: bytes, seen: BodyPrefixCache, place: KnownPrefix, said: DecodedMessages | None
) -> Prompt | None:
    messages = place.new(fields.messages)
    if messages is None:
        return None
    chat = Chat(place.mark.beginning)
    parts = [fields.tools, fields.system, fields.chat_template_kwargs, fields.output_config, fields.thinking]
    chat.set_head(seen.get_or_render(parts, lambda: _build_heading(fields)))

    def write(raw: Raw) -> Message:
        message: Message = sliced_json.read(decode_message, raw)
        _message(chat, message)
        return message

    return seen.resume(chat, place, body, messages, write, lambda: prompt_of(decode_loose(body)), said)


def _build_heading(fields: Fields) -> Heading:
    chat = Chat()
    _head(chat, fields)
    return chat.get_heading()


def prompt_of(fields: LooseBody) -> Prompt | None:
    """Return the prompt. None if it cannot be interpreted."""
    if not fields.messages:
        return None
    try:
        chat = Chat()
        _head(chat, fields)
        for messages in sliced_json.items(decode_messages, fields.messages):
            for message in messages:
                _message(chat, message)
        return chat.prompt()
    except (*UNREADABLE, UnsupportedForTemplate):
        return None


def _head(chat: Chat, fields: Fields) -> None:
    if json_fields.has_value(fields.tools):
        tools = decode_tools(fields.tools)
        chat.tools([to_function(tool) for tool in tools])
        if tools and json_fields.has_value(tools[-1].cache_control):
            chat.head_breakpoint()
    if json_fields.has_value(fields.chat_template_kwargs):
        chat.argument("chat_template_kwargs", arguments(fields.chat_template_kwargs))
    effort = (json_fields.decode_as(dict, fields.output_config) or {}).get("effort")
    if (json_fields.decode_as(dict, fields.thinking) or {}).get("type") == "disabled":
        effort = NO_EFFORT  # vLLM passes this to templates that can switch thinking off
    chat.effort(effort)
    if json_fields.has_value(fields.system):
        content = sliced_json.read(decode_blocks, fields.system)
        if system := content if isinstance(content, str) else system_text(content):
            chat.system(system)
            if not isinstance(content, str):
                _mark_system(chat, content)


def _mark_system(chat: Chat, blocks: list[Block]) -> None:
    marked = [number for number, block in enumerate(blocks, 1) if json_fields.has_value(block.cache_control)]
    if marked:
        chat.head_breakpoint(len(system_text(blocks[marked[-1] :]).encode()))


def _message(chat: Chat, message: Message) -> None:
    """Write one message. The tool results in it are written first, as engines treat them as separate messages."""
    role, content = message.role, message.content
    if role == "system":
        if text := content if isinstance(content, str) else system_text(content):
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
            made.append(
                call(block.name or "", sliced_json.value(block.input) if json_fields.has_value(block.input) else {})
            )
        elif block.type == "tool_result" and role == "user":
            _tool_result(chat, block)
        elif block.type == "thinking":
            thoughts += [block.thinking] if block.thinking is not None else []
        else:
            parts += _part(block)
            if json_fields.has_value(block.cache_control):
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
        return []  # vLLM leaves these blocks out
    raise UnsupportedForTemplate(block.type)


def _image(raw: Raw) -> bytes:
    """Return the URL that an OpenAI client would send."""
    source = msgspec.json.decode(raw, type=_Source)
    return (source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}").encode()


def _tool_result(chat: Chat, block: Block) -> None:
    """Write a message of role `tool`. Its images follow as a user message."""
    content = sliced_json.read(decode_blocks, block.content) if json_fields.has_value(block.content) else ""
    blocks = [] if isinstance(content, str) else content
    if any(part.type == "tool_reference" for part in blocks):
        raise UnsupportedForTemplate("tool_reference")
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in blocks if part.type == "text")
    chat.message("tool", (text,))
    images = [_image(part.source) for part in blocks if part.type == "image"]
    if images:
        chat.message("user", images)
