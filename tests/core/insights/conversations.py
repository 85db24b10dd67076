"""Prompts before anybody speaks a dialect: what a conversation holds, how clients write it down, where things stand.

`Talk` is what an agent has in hand. `body` writes it as one of three APIs' requests, `pieces` as canonical bytes, by
the rules of DESIGN and in as few lines as possible: the corpus does not ask the router for its own truth. scoring.py
holds them against the router's dialects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, MESSAGES, RESPONSES)
Keys = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str
    schema: dict[str, Any]

    def parts(self) -> dict[str, Any]:
        """As templates print it."""
        return {"name": self.name, "description": self.description, "parameters": self.schema}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model made."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `call_id` is set for what a tool gave back."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Talk:
    """A whole prompt. Message 0 is the system prompt; its parts are joined as the dialect does."""

    tools: tuple[Tool, ...]
    system: tuple[str, ...]
    messages: tuple[Message, ...]

    def with_system(self, text: str) -> Talk:
        """The same with this in place of the first part of the system prompt."""
        return replace(self, system=(text, *self.system[1:]))

    def with_message(self, index: int, message: Message) -> Talk:
        """The same with another message at `index` of `messages`."""
        return replace(self, messages=(*self.messages[:index], message, *self.messages[index + 1 :]))

    def with_tools(self, tools: Sequence[Tool]) -> Talk:
        """The same with these tools."""
        return replace(self, tools=tuple(tools))


@dataclass(frozen=True, slots=True)
class Style:
    """How one client writes what it has to say: nothing of it reaches the template."""

    path: str
    parts: bool = False  # contents as lists of parts
    escaped: bool = False  # every character beyond ASCII as \\uXXXX
    spaced: bool = False  # white space between JSON's tokens
    marked: bool = False  # Anthropic's cache_control on the last message, so it wanders
    billed: bool = False  # Claude Code's attribution line, another for each request
    key: str = ""  # prompt_cache_key


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands: in a tool, in a message's text, in a call's arguments, or a message as a whole."""

    kind: str  # "tool", "text", "call", "message"
    index: int  # of the tool, or of the message, the system prompt being 0
    part: int = 0  # of the system prompt, or which call
    keys: Keys = field(default=())  # within the tool or the arguments

    @property
    def message(self) -> int:
        """As `Difference.message` has it."""
        return -1 if self.kind == "tool" else self.index


def dense(value: object) -> bytes:
    """JSON as the template's printer has it in canonical bytes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def pieces(talk: Talk, style: Style) -> list[bytes]:
    """Canonical bytes: the head, then one piece a message, the system prompt first."""
    head = b""
    if talk.tools:
        head = b"\x1dtools\x1f" + dense([{"type": "function", "function": tool.parts()} for tool in talk.tools])
    out = [head, b"\x1esystem\x1f" + ("" if style.path == MESSAGES else "\n").join(talk.system).encode()]
    for message in talk.messages:
        piece = b"\x1e" + message.role.encode() + b"\x1f" + message.text.encode()
        if message.calls:
            made = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls]
            piece += b"\x1dtool_calls\x1f" + dense(made)
        out.append(piece)
    return out


# Bodies


def body(talk: Talk, style: Style, request: int, noise: str) -> bytes:
    """The request. `noise` goes where no template looks; no two requests have the same."""
    made = {CHAT: _chat, MESSAGES: _anthropic, RESPONSES: _responses}[style.path](talk, style, noise)
    if style.key:
        made["prompt_cache_key"] = style.key
    made["metadata"] = {"user_id": noise, "sequence": str(request)}
    gaps = (", ", ": ") if style.spaced else (",", ":")
    return json.dumps(made, ensure_ascii=style.escaped, separators=gaps).encode()


def _chat(talk: Talk, style: Style, noise: str) -> dict[str, Any]:
    system = [_text(part) for part in talk.system] if len(talk.system) > 1 else talk.system[0]
    made: dict[str, Any] = {"model": "m", "messages": [{"role": "system", "content": system}], "stream": True}
    for message in talk.messages:
        content: Any = [_text(message.text)] if style.parts and message.role == "user" else message.text
        row: dict[str, Any] = {"role": message.role, "content": content}
        if message.calls:
            row["content"] = message.text or None
            row["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in message.calls
            ]
        if message.call_id:
            row["tool_call_id"] = message.call_id
        made["messages"].append(row)
    if talk.tools:
        made["tools"] = [{"type": "function", "function": tool.parts()} for tool in talk.tools]
    return made


def _anthropic(talk: Talk, style: Style, noise: str) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "m", "max_tokens": 1024, "messages": []}
    if talk.tools:
        made["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema} for tool in talk.tools
        ]
    system: Any = [_text(part) for part in talk.system] if _listed(talk, style) else talk.system[0]
    if style.billed:
        system = [_text(f"x-anthropic-billing-header: cc_version=2.1; cch={noise[:5]};"), *system]
    made["system"] = system
    for message, (index, part) in zip(talk.messages, _blocks(talk.messages), strict=True):
        content: list[dict[str, Any]] = [_text(message.text)] if message.text and not message.call_id else []
        content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.calls]
        if message.call_id:
            given: Any = [_text(message.text)] if style.parts else message.text
            content.append({"type": "tool_result", "tool_use_id": message.call_id, "content": given})
        if part:
            made["messages"][index]["content"] += content
            continue
        plain = not style.parts and not message.calls and not message.call_id
        role = "assistant" if message.role == "assistant" else "user"
        made["messages"].append({"role": role, "content": message.text if plain else content})
    last = made["messages"][-1]["content"]
    if style.marked and isinstance(last, list):
        last[-1]["cache_control"] = {"type": "ephemeral"}
    return made


def _responses(talk: Talk, style: Style, noise: str) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "m", "instructions": talk.system[0], "input": [], "store": False}
    if talk.tools:
        made["tools"] = [{"type": "function", **tool.parts()} for tool in talk.tools]
    for message in talk.messages:
        made["input"] += _items(message, style)
    return made


def _items(message: Message, style: Style) -> list[dict[str, Any]]:
    if message.call_id:
        return [{"type": "function_call_output", "call_id": message.call_id, "output": message.text}]
    items: list[dict[str, Any]] = []
    if message.role == "assistant" and message.text:
        part = {"type": "output_text", "text": message.text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    elif message.role != "assistant":
        content: Any = [{"type": "input_text", "text": message.text}] if style.parts else message.text
        items.append({"type": "message", "role": message.role, "content": content})
    items += [
        {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": json.dumps(c.arguments)}
        for c in message.calls
    ]
    return items


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _listed(talk: Talk, style: Style) -> bool:
    return style.billed or style.parts or len(talk.system) > 1


def _blocks(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Of each message, which of Anthropic's it goes into, and which block of that it begins: results of tools that
    follow each other are one message of the user's."""
    found: list[tuple[int, int]] = []
    index = -1
    for position, message in enumerate(messages):
        if message.call_id and position and messages[position - 1].call_id:
            found.append((index, found[-1][1] + 1))
        else:
            index += 1
            found.append((index, 0))
    return found


# Paths


def path_of(place: Place, talk: Talk, style: Style) -> str:
    """The JSON path of a place in `body(talk, style)`."""
    if place.kind == "tool":
        return _tool_path(place, style)
    if place.index == 0:
        return _system_path(place.part, talk, style)
    message = talk.messages[place.index - 1]
    if style.path == CHAT:
        base = f"messages[{place.index}]"
        text = ".content[0].text" if style.parts and message.role == "user" else ".content"
        call = f".tool_calls[{place.part}].function.arguments"
    elif style.path == MESSAGES:
        return _anthropic_path(place, message, talk, style)
    else:
        return _responses_path(place, message, talk, style)
    return base + {"text": text, "call": call, "message": ""}[place.kind]


def _tool_path(place: Place, style: Style) -> str:
    keys = list(place.keys)
    if keys and keys[0] == "parameters" and style.path == MESSAGES:
        keys[0] = "input_schema"
    if keys and style.path == CHAT:
        keys.insert(0, "function")
    return f"tools[{place.index}]" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def _system_path(part: int, talk: Talk, style: Style) -> str:
    if style.path == RESPONSES:
        return "instructions"
    if style.path == MESSAGES:
        return f"system[{part + style.billed}].text" if _listed(talk, style) else "system"
    return f"messages[0].content[{part}].text" if len(talk.system) > 1 else "messages[0].content"


def _anthropic_path(place: Place, message: Message, talk: Talk, style: Style) -> str:
    index, block = _blocks(talk.messages)[place.index - 1]
    base = f"messages[{index}]"
    if message.call_id:
        base += f".content[{block}]"
        return base if place.kind == "message" else base + (".content[0].text" if style.parts else ".content")
    if place.kind == "message":
        return base
    if place.kind == "call":
        return f"{base}.content[{place.part + bool(message.text)}].input"
    return base + (".content[0].text" if style.parts or message.calls else ".content")


def _responses_path(place: Place, message: Message, talk: Talk, style: Style) -> str:
    item = sum(len(_items(each, style)) for each in talk.messages[: place.index - 1])
    if place.kind == "call":
        return f"input[{item + place.part + bool(message.text)}].arguments"
    if place.kind == "message":
        return f"input[{item}]"
    if message.call_id:
        return f"input[{item}].output"
    return f"input[{item}]" + (".content[0].text" if style.parts or message.role == "assistant" else ".content")
