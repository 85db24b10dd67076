"""Messages and tools as an engine passes them to its chat template: the last step before rendering.

vLLM 0.32 (renderers/chat_utils.py, renderers/hf.py) and SGLang 0.5.23 (srt/entrypoints/openai/serving_chat.py,
srt/parser/jinja_template_utils.py) take the same requests and pass different data to their templates. They differ in
the fields of a message and of a tool, in the way text parts become one text, and in the order of keys. Each engine's
behaviour is written here as one function. Behaviour that depends on the template is passed in as `Traits`, which
templates.py reads from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.core.prompts.canonical import BILLING_HEADER
from router.core.prompts.template_chat import TEXT_PARTS, UnsupportedForTemplate, in_order
from router.core.types.requests import TemplateInput

Message = dict[str, Any]

# Field names of vLLM's types of content parts. Other fields reach templates that take parts.
_KNOWN_OF_PARTS = {
    *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio"),
    *("name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url"),
}
_UNSET = (None, "auto")  # vLLM's merge_kwargs takes these for "not given"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a template to which an engine adapts its messages."""

    parts: bool = False  # content as a list of parts, not as a string
    developer: bool = False  # the engine knows the role `developer`
    system_first: bool = False  # refuses a system message between others (probed by vLLM for the Messages API)
    effort_off: str = "none"  # effort that stands for thinking switched off


@dataclass(frozen=True, slots=True)
class Rendering:
    """Inputs of the template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool = False
    suffix: str = ""  # text that is tokenised separately and appended


def for_vllm(given: TemplateInput, traits: Traits, defaults: Mapping[str, Any]) -> Rendering:
    """Return the rendering inputs of vLLM. `defaults` are the server's own template kwargs. Raises
    UnsupportedForTemplate for requests that the engine would refuse."""
    messages = given.messages or []
    if given.api == "messages" and traits.system_first:
        messages = _system_merged(messages)
    fitted = [_vllm_message(message, parts=traits.parts) for message in messages]
    if not traits.developer and any(message["role"] == "developer" for message in fitted):
        fitted = _system_led([_to_system_message(message) for message in fitted])
    effort = traits.effort_off if given.thinking_off else given.reasoning_effort
    kwargs = {**given.kwargs}
    if effort not in _UNSET:
        kwargs["reasoning_effort"] = effort
    if effort is not None and "enable_thinking" not in given.kwargs:
        kwargs["enable_thinking"] = effort != "none"
    if given.documents is not None:
        kwargs["documents"] = given.documents
    kwargs = {**defaults, **{name: value for name, value in kwargs.items() if value not in _UNSET}}
    tools = None if given.tools is None else [_vllm_tool(tool) for tool in given.tools]
    return Rendering(fitted, tools, kwargs, given.add_generation_prompt, given.continue_final_message)


_PLAIN_ROLES = frozenset(("user", "assistant"))


def _vllm_message(message: Message, *, parts: bool) -> Message:
    role, content = message["role"], message.get("content")
    if len(message) == 2 and isinstance(content, str) and role in _PLAIN_ROLES:  # a plain text, as most messages are
        return {"role": role, "content": [_vllm_part(content)] if parts else content}
    listed = content if isinstance(content, list) else [] if content is None else [content]
    if role == "system":
        listed = [part for each in listed if (part := _strip_billing(each)) is not None]
    made: Message = {"role": role}
    texts = [text for part in listed if (text := _text(part)) is not None]
    if not parts:
        made["content"] = "\n".join(text for text in texts if text)  # vLLM drops empty texts, here only
    elif role == "tool" and isinstance(content, list):
        made["content"] = "\n".join(texts)
    elif role == "tool":
        made["content"] = content or ""
    else:
        made["content"] = [_vllm_part(part) for part in listed if _text(part) is not None]
    if role == "assistant":
        if message.get("tool_calls"):
            made["tool_calls"] = [_call(each) for each in message["tool_calls"]]
        thought = message.get("reasoning")
        thought = message.get("reasoning_content") if thought is None else thought
        if thought is not None:
            made["reasoning"] = made["reasoning_content"] = thought
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    return part.get(TEXT_PARTS[part["type"]]) if isinstance(part, dict) else None


def _vllm_part(part: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    more = {name: value for name, value in part.items() if name not in _KNOWN_OF_PARTS}
    return {"type": "text", "text": _text(part), **more}


def _strip_billing(part: str | dict[str, Any]) -> str | dict[str, Any] | None:
    """Return the text without the line that Claude Code changes with every request. None if the line was the whole
    text."""
    text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: object) -> dict[str, Any]:
    """Return an object for any text: vLLM takes {} for text that is no JSON object."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given else {}
        except (ValueError, RecursionError):
            given = {}
    return given if isinstance(given, dict) else {}


def _vllm_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool as ChatCompletionToolsParam prints it: three fields always, two more if they are given."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise UnsupportedForTemplate("tool")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    more = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    made |= {name: value for name, value in more.items() if value is not None}
    shown = {"type": "function", "function": made}
    return shown if deferred is None else {**shown, "defer_loading": deferred}


def _system_merged(messages: list[Message]) -> list[Message]:
    """Merge system messages for a template that takes one, as vLLM's Messages API does: their texts are
    concatenated."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *rest] if texts else rest


def _to_system_message(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _system_led(messages: list[Message]) -> list[Message]:
    """Merge all system messages into one at the head, if any stands elsewhere (vLLM's _consolidate_system_messages)."""
    found = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if not found or found == [0]:
        return messages
    texts = [_join_text(messages[index]["content"]) for index in found]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *rest]


def _join_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def for_sglang(given: TemplateInput, traits: Traits, defaults: Mapping[str, Any]) -> Rendering:
    """Return the rendering inputs of SGLang, for chat completions only: the conversion of its other APIs to a chat has
    not been checked. Raises UnsupportedForTemplate."""
    if given.api != "chat":
        raise UnsupportedForTemplate(f"sglang {given.api}")
    messages = [_sglang_message(message, parts=traits.parts) for message in given.messages or []]
    effort, kwargs = given.reasoning_effort, {**defaults, **given.kwargs}
    if effort is not None:
        kwargs.setdefault("thinking", effort != "none")
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs.setdefault("reasoning_effort", effort)
    suffix = ""
    if messages and messages[-1]["role"] == "assistant" and isinstance(content := messages[-1].get("content"), str):
        if given.continue_final_message:
            suffix = content
            messages.pop()
        else:
            messages[-1] = {"role": "user", "content": content}
    return Rendering(messages, _sglang_tools(given), kwargs, add_generation_prompt=True, suffix=suffix)


_SGLANG_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")


def _sglang_message(message: Message, *, parts: bool) -> Message:
    role, content = message["role"], message.get("content")
    role = role if role == "user" else role.lower()
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") in ("text", "input_text") for part in content):
            raise UnsupportedForTemplate("content part")
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        content = [{"type": "text", "text": text} for text in texts] if parts and role != "tool" else " ".join(texts)
    made: Message = {"role": role, "content": "" if content is None else content}
    if role == "user":
        return made
    if message.get("tools") is not None:
        raise UnsupportedForTemplate("tools of a message")
    made |= {name: message[name] for name in _SGLANG_FIELDS if message.get(name) is not None}
    if "tool_calls" in made:
        made["tool_calls"] = [_sglang_call(call, parsed=role == "assistant") for call in made["tool_calls"]]
    if parts and isinstance(message.get("content"), list):
        made["content"] = made.pop("content")  # SGLang then puts the content after the other fields
    return made


def _sglang_call(call: dict[str, Any], *, parsed: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if parsed and isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise UnsupportedForTemplate("arguments") from error  # SGLang refuses such arguments
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _sglang_tools(given: TemplateInput) -> list[dict[str, Any]] | None:
    """Return the tools that may be called: None if there are no such tools, a single one if the request names it."""
    if not given.tools or given.tool_choice == "none":
        return None
    tools = given.tools
    if isinstance(given.tool_choice, dict):
        name = (given.tool_choice.get("function") or {}).get("name")
        tools = [tool for tool in tools if (tool.get("function") or {}).get("name") == name]
    return [_sglang_tool(tool) for tool in tools] or None


_SGLANG_FUNCTION = ("description", "name", "parameters", "strict", "defer_loading")


def _sglang_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise UnsupportedForTemplate("tool")
    deferred = tool.get("defer_loading")
    made = {name: function.get(name) for name in _SGLANG_FUNCTION} | {
        "defer_loading": function.get("defer_loading", deferred)
    }
    made = {name: made[name] for name in _SGLANG_FUNCTION if made[name] is not None or name not in _SGLANG_FUNCTION[3:]}
    # Fields that were not sent follow those that were, as null.
    ordered = in_order(made, tuple(name for name in function if name in made))
    return {"type": tool.get("type", "function"), "function": ordered, "defer_loading": deferred}
