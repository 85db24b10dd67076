"""Fields of a Messages request and their decoders, for placement (canonical_messages.py) and for templates
(template_messages.py). Tools and system prompts are converted as vLLM 0.32 does (entrypoints/anthropic/serving.py)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts.canonical import BILLING_HEADER
from router.core.prompts.json_fields import ABSENT
from router.core.prompts.template_chat import UnsupportedForTemplate


class Block(msgspec.Struct):
    """A block of content. Fields that only some kinds of blocks have are decoded by their readers."""

    type: str
    text: str | None = None
    source: Raw = ABSENT
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    content: Raw = ABSENT
    thinking: str | None = None
    cache_control: Raw = ABSENT


class Message(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[Block]


class Fields(msgspec.Struct, kw_only=True):
    """Fields of a body that are decoded only by their readers. They may have any type."""

    system: Raw = ABSENT
    tools: Raw = ABSENT
    thinking: Raw = ABSENT
    output_config: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    metadata: Raw = ABSENT
    nvext: Raw = ABSENT
    session_id: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    mcp_servers: Raw = ABSENT
    container: Raw = ABSENT


class Head(Fields, kw_only=True):
    """A body with the right type in all fields. Its messages are still JSON."""

    messages: list[Raw]
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    max_tokens: int | None = None


class MessagesBody(Head, kw_only=True):
    """A `Head` with its messages, decoded once for all readers."""

    messages: list[Message]  # type: ignore[assignment]  # no code reads `messages` through the base class


class LooseBody(Fields, kw_only=True):
    """A body with fields of any type. Each field is checked by its reader."""

    messages: Raw = ABSENT
    model: Raw = ABSENT
    stream: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    max_tokens: Raw = ABSENT


class Tool(msgspec.Struct):
    """A tool as the client defines it."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: Raw = ABSENT


LOOSE = msgspec.json.Decoder(LooseBody)
decode_body = msgspec.json.Decoder(MessagesBody).decode
decode_head = msgspec.json.Decoder(Head).decode
decode_message = msgspec.json.Decoder(Message).decode
decode_messages = msgspec.json.Decoder(list[Message]).decode
decode_blocks = msgspec.json.Decoder(str | list[Block]).decode
decode_tools = msgspec.json.Decoder(list[Tool]).decode


def build_messages_body(head: Head, messages: list[Message]) -> MessagesBody:
    """Return the body with these fields and messages."""
    fields = {name: getattr(head, name) for name in head.__struct_fields__}
    return MessagesBody(**fields | {"messages": messages})


def to_function(tool: Tool) -> dict[str, Any]:
    """Return the tool as the function that vLLM shows to a template."""
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function | {"strict": tool.strict, "defer_loading": tool.defer_loading}}


def system_text(blocks: list[Block]) -> str:
    """Return the text of a system prompt, without the line that Claude Code changes with every request. Raises
    UnsupportedForTemplate if tools change within the conversation."""
    if any(block.type in ("tool_addition", "tool_removal") for block in blocks):
        raise UnsupportedForTemplate("tools that change within a conversation")
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))
