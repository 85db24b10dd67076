"""Chat that vLLM 0.32 makes of a Responses request before its template (entrypoints/openai/responses/utils.py).

Consecutive items of an assistant are one message, until one of the fields would be set twice. Unlike chat completions,
the rendered text is tokenised with the tokenizer's own special tokens around it (protocol.py there leaves
`add_special_tokens` at its default), and calls keep the order in which they are put together here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from router.core.prompts import json_fields, sliced_json
from router.core.prompts.json_fields import UNREADABLE
from router.core.prompts.responses_fields import BODY
from router.core.prompts.template_chat import UnsupportedForTemplate, check_text, template_kwargs
from router.core.types.requests import TemplateInput


class _Effort(msgspec.Struct):
    effort: str | None = None


_ELSEWHERE = ("prompt", "previous_input_messages", "previous_response_id", "kv_transfer_params")
_decode_input = msgspec.json.Decoder(str | list[dict[str, Any]]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_tools = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_effort = msgspec.json.Decoder(_Effort).decode


def responses_input(body: bytes) -> TemplateInput | None:
    """Return the chat that the engine makes of it. None if it is unknown, or continues a conversation that an engine
    stores."""
    try:
        fields = sliced_json.read(BODY.decode, body)
        if any(json_fields.has_value(getattr(fields, name)) for name in _ELSEWHERE):
            return None
        if fields.truncation and sliced_json.value(fields.truncation) != "disabled":
            return None
        given = sliced_json.read(_decode_input, fields.input)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
        if json_fields.has_value(fields.instructions) and (
            instructions := sliced_json.read(_decode_text, fields.instructions)
        ):
            messages.insert(0, {"role": "system", "content": instructions})
        partial = _partial(given)
        return TemplateInput(
            messages=messages,
            tools=_tools(fields.tools),
            kwargs=template_kwargs(fields.chat_template_kwargs),
            reasoning_effort=_decode_effort(fields.reasoning).effort
            if json_fields.has_value(fields.reasoning)
            else None,
            add_generation_prompt=not partial,
            continue_final_message=partial,
            add_special_tokens=True,
            api="responses",
        )
    except (*UNREADABLE, UnsupportedForTemplate):
        return None


def _partial(given: str | list[dict[str, Any]]) -> bool:
    """True if the engine must continue the last item."""
    if isinstance(given, str) or not given or given[-1].get("type", "message") not in ("message", "reasoning"):
        return False
    return given[-1].get("status") in ("in_progress", "incomplete")


def _tools(raw: Raw) -> list[dict[str, Any]] | None:
    """Return functions, flat or in a namespace. None for no tools. The engine's own tools are not shown to the
    model."""
    given = _decode_tools(raw) if json_fields.has_value(raw) else []
    made = [function for tool in given for function in _functions(tool)]
    return [{"type": "function", "function": function} for function in made] if given else None


def _functions(tool: dict[str, Any]) -> list[dict[str, Any]]:
    kind = tool.get("type")
    if kind == "custom":
        raise UnsupportedForTemplate("custom tool")
    if kind == "function":
        return [{name: value for name, value in tool.items() if name != "type"}]
    inner = tool.get("tools") if kind == "namespace" else None
    if not isinstance(inner, list):
        return []
    named = [each for each in inner if isinstance(each, dict) and each.get("type") == "function"]
    return [
        {name: value for name, value in each.items() if name != "type"} | {"name": f"{tool['name']}__{each['name']}"}
        for each in named
        if isinstance(tool.get("name"), str) and isinstance(each.get("name"), str)
    ]


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        made = _merge_item(item, last)
        if made is not None:
            messages.append(made)
    return messages


def _merge_item(item: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a new message, or None if the item was added to the last assistant message."""
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        return _merge_call(item, last)
    if kind == "reasoning":
        return _merge_text(last, "reasoning", _thought(item))
    if kind == "function_call_output":
        _check(item.get("output"))
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind not in (None, "message") or not isinstance(role, str):
        raise UnsupportedForTemplate("item")
    content = item.get("content")
    _check(content)
    if role != "assistant":
        return {"role": role, "content": content}
    return _merge_text(last, "content", content if isinstance(content, str) else _first(content))


def _merge_call(item: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any] | None:
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str) or not isinstance(item.get("arguments"), str):
        raise UnsupportedForTemplate("function_call")
    name = f"{namespace}__{name}" if namespace else name
    call = {"id": item.get("call_id"), "function": {"name": name, "arguments": item["arguments"]}, "type": "function"}
    if last is None:
        return {"role": "assistant", "tool_calls": [call]}
    last.setdefault("tool_calls", []).append(call)
    return None


def _merge_text(last: dict[str, Any] | None, field: str, text: str) -> dict[str, Any] | None:
    if last is None or last.get(field) is not None:
        return {"role": "assistant", field: text}
    last[field] = text
    return None


def _thought(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnsupportedForTemplate("encrypted reasoning")
    content = item.get("content") or item.get("summary")
    if isinstance(content, str):
        return content
    return _first(content) if content else ""


def _first(content: object) -> str:
    """Return the first part of an assistant's content, as vLLM does."""
    part = content[0] if isinstance(content, list) and content else None
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise UnsupportedForTemplate("content")
    return text


def _check(content: object) -> None:
    if isinstance(content, list):
        for part in content:
            check_text(part)
    elif not isinstance(content, str):
        raise UnsupportedForTemplate("content")
