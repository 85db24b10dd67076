"""The fields of a Messages request, their decoders, and what vLLM 0.32 makes of tools and system prompts
(entrypoints/anthropic/serving.py): for placement (canonical_messages.py) and for templates (template_messages.py)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts.bodies import ABSENT
from router.core.prompts.canonical import BILLING_HEADER
from router.core.prompts.template_chat import Unfit


class Block(msgspec.Struct):
    """A block of content; fields that only some kinds of blocks have are decoded where they are read."""

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
    """The fields of a body that are decoded only where they are read, whatever their type."""

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
    """A body whose fields all have the right type; its messages are still JSON."""

    messages: list[Raw]
    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    max_tokens: int | None = None


class MessagesBody(Head, kw_only=True):
    """A `Head` with its messages, decoded once for all who read them."""

    messages: list[Message]  # type: ignore[assignment]  # no code reads `messages` through the base class


class LooseBody(Fields, kw_only=True):
    """A body none of whose fields need have the right type: each is checked where it is read."""

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


def with_messages(head: Head, messages: list[Message]) -> MessagesBody:
    """The body with these fields and messages."""
    fields = {name: getattr(head, name) for name in head.__struct_fields__}
    return MessagesBody(**fields | {"messages": messages})


def as_function(tool: Tool) -> dict[str, Any]:
    """The tool as the function that vLLM shows to a template."""
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function | {"strict": tool.strict, "defer_loading": tool.defer_loading}}


def system_text(blocks: list[Block]) -> str:
    """The text of a system prompt, without the line that Claude Code changes with every request. Raises Unfit where
    tools change within the conversation."""
    if any(block.type in ("tool_addition", "tool_removal") for block in blocks):
        raise Unfit("tools that change within a conversation")
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))
