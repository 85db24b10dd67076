"""Chat that vLLM 0.32 makes of an Anthropic Messages request before its template (entrypoints/anthropic/serving.py).

Two things depend on the template and are left to the renderer (engine_messages.py): merging system messages between
others into the first one, and the effort that stands for thinking switched off.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.core.prompts import json_fields, sliced_json
from router.core.prompts.canonical import BILLING_HEADER
from router.core.prompts.json_fields import UNREADABLE
from router.core.prompts.messages_fields import (
    LOOSE,
    Block,
    LooseBody,
    Message,
    MessagesBody,
    decode_blocks,
    decode_messages,
    decode_tools,
    system_text,
    to_function,
)
from router.core.prompts.template_chat import UnsupportedForTemplate, template_kwargs
from router.core.types.requests import TemplateInput


class _Effort(msgspec.Struct):
    effort: str | None = None


class _Kind(msgspec.Struct):
    type: str = ""


_decode_arguments = msgspec.json.Decoder(dict[str, Any] | None).decode
_decode_content = msgspec.json.Decoder(str | list[dict[str, Any]] | None).decode
_decode_effort = msgspec.json.Decoder(_Effort).decode
_decode_kind = msgspec.json.Decoder(_Kind).decode


def messages_input(body: bytes, decoded: MessagesBody | None) -> TemplateInput | None:
    """Return the chat that the engine makes of it. None if it is unknown."""
    try:
        fields: MessagesBody | LooseBody = decoded or sliced_json.read(LOOSE.decode, body)
        if any(map(json_fields.has_value, (fields.kv_transfer_params, fields.mcp_servers, fields.container))):
            return None
        messages: list[dict[str, Any]] = []
        if json_fields.has_value(fields.system) and (
            system := _system(sliced_json.read(decode_blocks, fields.system), whole=True)
        ):
            messages.append({"role": "system", "content": system})
        given = fields.messages
        for message in given if isinstance(given, list) else sliced_json.read(decode_messages, given):
            messages += _message(message)
        return TemplateInput(
            messages=messages,
            tools=[to_function(tool) for tool in decode_tools(fields.tools)]
            if json_fields.has_value(fields.tools)
            else None,
            kwargs=template_kwargs(fields.chat_template_kwargs),
            reasoning_effort=_decode_effort(fields.output_config).effort
            if json_fields.has_value(fields.output_config)
            else None,
            thinking_off=json_fields.has_value(fields.thinking) and _decode_kind(fields.thinking).type == "disabled",
            api="messages",
        )
    except (*UNREADABLE, UnsupportedForTemplate):
        return None


def _system(content: str | list[Block], *, whole: bool) -> str:
    """Return the text of a system prompt, as the engine reads it. `whole`: it is the field `system`, not a message. A
    string there is taken unchanged."""
    if isinstance(content, str):
        return content if whole or not content.startswith(BILLING_HEADER) else ""
    for block in content:
        _arguments(block)
        _content(block)
    return system_text(content)


def _message(message: Message) -> list[dict[str, Any]]:
    """Return one message. The tool results in it come first, as separate messages."""
    if message.role == "system":
        text = _system(message.content, whole=False)
        return [{"role": "system", "content": text}] if text else []
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: dict[str, Any] = {"role": message.role}
    before: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        arguments, content = _arguments(block), _content(block)
        if block.type == "text":
            texts += [block.text] if block.text else []
        elif block.type == "thinking":
            thoughts += [block.thinking] if block.thinking is not None else []
        elif block.type == "tool_use":
            calls.append(_call(block, arguments))
        elif block.type == "tool_result" and message.role == "user":
            before.append(_result(block, content))
        elif block.type not in ("redacted_thinking", "tool_reference"):  # vLLM leaves these out
            raise UnsupportedForTemplate(block.type)
    made |= {"reasoning": "".join(thoughts)} if thoughts else {}
    made |= {"tool_calls": calls} if calls else {}
    if texts:
        made["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return before if message.role == "user" and not texts else [*before, made]


def _arguments(block: Block) -> dict[str, Any] | None:
    """Return the arguments of a block of any kind. The engine refuses a request in which arguments are not an
    object."""
    return _decode_arguments(block.input) if block.input else None


def _content(block: Block) -> str | list[dict[str, Any]] | None:
    return _decode_content(block.content) if block.content else None


def _call(block: Block, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool call with its fields in the order of vLLM's types, which templates print (template_chat.py)."""
    if not block.id:
        raise UnsupportedForTemplate("a call without an id, for which the engine generates one from its clock")
    return {"id": block.id, "function": {"arguments": arguments or {}, "name": block.name or ""}, "type": "function"}


def _result(block: Block, content: str | list[dict[str, Any]] | None) -> dict[str, Any]:
    if isinstance(content, list):
        if any(part.get("type") in ("image", "tool_reference") for part in content):
            raise UnsupportedForTemplate("tool result")
        content = "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content or ""}
