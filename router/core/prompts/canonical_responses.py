"""The prompt of a Responses request, written as canonical bytes of the chat that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts import json_fields, sliced_json
from router.core.prompts.canonical import Chat, arguments, call, calls
from router.core.prompts.canonical_openai import content_parts
from router.core.prompts.json_fields import UNREADABLE
from router.core.prompts.responses_fields import ResponsesBody
from router.core.prompts.template_chat import UnsupportedForTemplate
from router.core.types.requests import Prompt


class _Text(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Raw] | None = None
    summary: list[_Text] = []
    encrypted_content: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[Raw] | None = None


class _Assistant:
    """The message that consecutive assistant items form."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.reasoning: str | None = None

    def write(self, chat: Chat) -> None:
        fields = [("tool_calls", calls(self.calls))] if self.calls else []
        if self.reasoning:
            fields.append(("reasoning", msgspec.json.encode(self.reasoning)))
        chat.message("assistant", () if self.text is None else (self.text,), fields)


_decode_input = msgspec.json.Decoder(str | list[_Item]).decode
_decode_text = msgspec.json.Decoder(_Text).decode
_decode_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode


def prompt_of(fields: ResponsesBody) -> Prompt | None:
    """Return the prompt. None if it cannot be interpreted, or continues a conversation that an engine stores."""
    elsewhere = (fields.previous_response_id, fields.previous_input_messages, fields.prompt)
    if not fields.input or any(map(json_fields.has_value, elsewhere)):
        return None
    try:
        chat = Chat()
        if json_fields.has_value(fields.mm_processor_kwargs):
            chat.media = arguments(fields.mm_processor_kwargs)
        _head(chat, fields)
        if instructions := json_fields.decode_as(str, fields.instructions):
            chat.message("system", (instructions,))
        given = sliced_json.read(_decode_input, fields.input)
        if isinstance(given, str):
            chat.message("user", (given,))
        else:
            _items(chat, given)
        return chat.prompt()
    except (*UNREADABLE, UnsupportedForTemplate):
        return None


def _head(chat: Chat, fields: ResponsesBody) -> None:
    if json_fields.has_value(fields.tools):
        chat.tools([made for tool in _decode_tools(fields.tools) for made in _tool(tool)])
    if json_fields.has_value(fields.chat_template_kwargs):
        chat.argument("chat_template_kwargs", arguments(fields.chat_template_kwargs))
    chat.effort((json_fields.decode_as(dict, fields.reasoning) or {}).get("effort"))


def _tool(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the model is shown for a tool, flat or in a namespace. The engine's own tools are not
    shown."""
    kind = tool.get("type")
    if kind == "namespace":
        inner = tool.get("tools")
        functions = (
            [made["function"] for each in inner if isinstance(each, dict) for made in _tool(each)]
            if isinstance(inner, list)
            else []
        )
        named = [function | {"name": f"{tool.get('name')}__{function.get('name')}"} for function in functions]
        return [{"type": "function", "function": function} for function in named]
    if kind == "function":
        return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}]
    if kind == "custom":  # shown as a function of one string
        return [{"type": "function", "function": tool}]
    return []


def _items(chat: Chat, items: Iterable[_Item]) -> None:
    open_: _Assistant | None = None
    for item in items:
        if _is_assistant_item(item):
            open_ = _join(chat, open_, item)
            continue
        if open_ is not None:
            open_.write(chat)
            open_ = None
        if item.type in ("function_call_output", "custom_tool_call_output"):
            chat.message("tool", content_parts(item.output))
        elif item.type == "message" and item.role:
            chat.message(item.role, content_parts(item.content))
        else:
            raise UnsupportedForTemplate(item.type)
    if open_ is not None:
        open_.write(chat)


def _is_assistant_item(item: _Item) -> bool:
    return item.type in ("function_call", "custom_tool_call", "reasoning") or item.role == "assistant"


def _join(chat: Chat, open_: _Assistant | None, item: _Item) -> _Assistant:
    """Add an item to the assistant's message, or to a new one if the field is taken. Returns the open message."""
    into = open_ or _Assistant()
    if item.type in ("function_call", "custom_tool_call"):
        name = f"{item.namespace}__{item.name}" if item.namespace else item.name
        # vLLM shows the model a custom tool as a function of one string, named `input`.
        given = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
        into.calls.append(call(name, given))
        return into
    reasoning = item.type == "reasoning"
    if (into.reasoning if reasoning else into.text) is not None:
        into.write(chat)
        into = _Assistant()
    if reasoning:
        into.reasoning = _thought(item)
    else:
        into.text = item.content if isinstance(item.content, str) else _first_text(item)
    return into


def _thought(item: _Item) -> str:
    if item.encrypted_content:
        raise UnsupportedForTemplate("encrypted reasoning")
    if item.content:
        return item.content if isinstance(item.content, str) else _first_text(item)
    return item.summary[0].text if item.summary else ""


def _first_text(item: _Item) -> str:
    """Return the first part of an assistant's content, as vLLM does."""
    return (
        sliced_json.read(_decode_text, item.content[0]).text if isinstance(item.content, list) and item.content else ""
    )
