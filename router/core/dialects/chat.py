"""The canonical bytes of a chat: what the template will see, whatever API the chat came through.

They stand in the order most templates use: tools and template arguments, then each message as

    RS role US content [GS field US json]...

with generation parameters left out. vLLM 0.32 turns every API's request into one list of OpenAI messages before it
renders the template (entrypoints/anthropic/serving.py, entrypoints/openai/responses/utils.py); the dialects do as it
does and write the result here, so that a conversation is one chain however it is spoken.

JSON that the template prints is decoded and encoded again: white space and escapes do not matter, but the order of
keys does, as it does to `tojson` in a template, except where the engine builds the object anew (the outer fields of
tools and of calls). A message adds bytes only at the end: an appended conversation extends its own canonical bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from router.core.dialects.wire import UNREADABLE
from router.core.facts import Prompt

RS, US, GS = b"\x1e", b"\x1f", b"\x1d"
# An image is hundreds of tokens, not its URL's length: it stands as 1,024 bytes, about 256 tokens.
OPAQUE_REPEATS = 64
# Claude Code's attribution line changes with every request; vLLM drops it from system prompts, so that they match.
BILLING_HEADER = "x-anthropic-billing-header"

Part = str | bytes  # text, or the identity of something that is not text


class Chat:
    """Writes one prompt: head fields first, then messages, then `prompt`."""

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._size = 0
        self._first_user_end = 0
        self._spans: list[tuple[int, int]] = []
        self._opaque_bytes = 0

    def head(self, name: str, value: bytes) -> None:
        """A field of the request that the template sees, such as its arguments."""
        self._put((GS, name.encode(), US, value))

    def tools(self, tools: object) -> None:
        """The tools, each put together as the engine does; none leave no trace."""
        if isinstance(tools, list):
            tools = [_tool(tool) for tool in tools]
        if tools:
            self.head("tools", msgspec.json.encode(tools))

    def message(self, role: str, parts: Iterable[Part], fields: Sequence[tuple[str, bytes]] = ()) -> None:
        """One message: its content's parts, and those of its fields that are given, as JSON."""
        start, out = self._size, [RS, role.encode(), US]
        if role == "system":
            parts = [part for given in parts if (part := _without_billing(given))]
        for position, part in enumerate(parts):
            if position:
                out.append(b"\n")  # vLLM joins text parts so where the template takes a string
            if isinstance(part, str):
                out.append(part.encode())
            else:
                filler = xxh3_128_digest(part) * OPAQUE_REPEATS
                out.append(filler)
                self._opaque_bytes += len(filler)
        for name, value in fields:
            out += (GS, name.encode(), US, value)
        self._put(out)
        if role == "assistant":
            self._spans.append((start, self._size))
        elif role == "user" and not self._first_user_end:
            self._first_user_end = self._size

    def prompt(self) -> Prompt:
        """All that was written."""
        end = self._first_user_end or self._size
        return Prompt(b"".join(self._out), end, tuple(self._spans), self._opaque_bytes)

    def _put(self, pieces: Sequence[bytes]) -> None:
        self._out += pieces
        self._size += sum(map(len, pieces))


def _tool(tool: object) -> object:
    """As vLLM's FunctionDefinition prints it: name, description, parameters, then the rest; no nulls."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        return tool
    ordered = {name: function.get(name) for name in ("name", "description", "parameters")} | function
    fields = {name: value for name, value in ordered.items() if value is not None}
    return {"type": "function", "function": fields} | {
        k: v for k, v in tool.items() if v is not None and k not in _TOOL
    }


_TOOL = ("type", "function")


def calls(tool_calls: object) -> bytes:
    """Tool calls in one order of keys: engines rebuild them, vLLM in another order for every API."""
    return msgspec.json.encode([_call(each) for each in tool_calls] if isinstance(tool_calls, list) else tool_calls)


def call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """A tool call as a chat has it; `arguments` is JSON or what it decodes to."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(given: object) -> object:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    made = call(given.get("id", ""), function.get("name", ""), _arguments(function.get("arguments")))
    return made | {name: value for name, value in given.items() if name not in made and value is not None}


def _arguments(arguments: object) -> object:
    """As the template sees them: vLLM parses arguments that are a string, and takes "" and null for {}."""
    if not arguments:
        return {}
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except UNREADABLE:
        return arguments


def canonical(raw: Raw) -> bytes:
    """JSON without white space and needless escapes, keys in their order."""
    return msgspec.json.encode(msgspec.json.decode(raw))


def _without_billing(part: Part) -> Part:
    if isinstance(part, str) and part.startswith(BILLING_HEADER):
        return part.partition("\n")[2]
    return part
