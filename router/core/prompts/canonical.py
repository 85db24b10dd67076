"""Canonical bytes of a chat: the content that the template will see, independent of the API of the request.

The order is that of most templates: tools and template arguments, then each message as

    RS role US content [GS field US json]...

Generation parameters are left out. Two more kinds of data are left out because they carry no information about the
start of a prompt: template arguments that act only after it (LATE_ARGUMENTS), and the ids of tool calls. vLLM 0.32
turns every API's request into one list of OpenAI messages before it renders the template
(entrypoints/anthropic/serving.py, openai/responses/utils.py there). The dialects do the same and write the result here,
so that a conversation is one chain in every API.

JSON that the template prints is decoded and encoded again, so white space and escapes do not matter. The order of keys
does matter, as it does to `tojson` in a template. There are two exceptions: objects that the engine builds anew (the
outer fields of tools and of calls), and template arguments, which are variables and are sorted. A message adds bytes
only at the end: an appended conversation extends its own canonical bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, overload

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from router.core.prompts import gil_release, sliced_json
from router.core.prompts.block_keys import SPANS_MAX
from router.core.prompts.json_fields import UNREADABLE
from router.core.prompts.sliced_json import SLICE_BYTES, utf8
from router.core.types.requests import OPAQUE_BYTES, Heading, MessageBoundary, MessagePrefix, Prompt

RS, US, GS = b"\x1e", b"\x1f", b"\x1d"
# The token count of an image does not depend on the length of its URL: the image is written as OPAQUE_REPEATS digests.
# The number of tokens is learned (core/estimators/token_ratio.py). Bytes that are already hashed must not change with
# it.
OPAQUE_REPEATS = OPAQUE_BYTES // 16
# Claude Code's attribution line changes with every request; vLLM drops it from system prompts, so that they match.
BILLING_HEADER = "x-anthropic-billing-header"
# Template arguments that are not part of a chain, since they act after a conversation's beginning. They act on the
# generation prompt (Qwen3, DeepSeek V3.1), on user messages (GLM 4.5 appends `/nothink`), or on the selection of past
# reasoning that is shown. If they are switched on and off, a conversation stays in one cache, and the engine reuses
# blocks up to the point at which they act. Some templates use the same names at their beginning (SmolLM3, Granite 3,
# Gemma 4). For these, a replica is credited with a prefix that it holds under the other value only. This happens once
# for each value and replica, since the replica holds both afterwards.
LATE_ARGUMENTS = frozenset((
    "add_generation_prompt", "clear_thinking", "continue_final_message", "drop_thinking", "enable_thinking",
    "preserve_thinking", "thinking", "truncate_history_thinking",
))  # fmt: skip
OTHERS_AFTER = 0xFE  # every 128 messages, which take a tenth of a millisecond, other threads have a turn
PIECES_MAX = 4_096  # pieces of one message that are kept apart
NO_EFFORT = "none"  # thinking switched off: engines also pass `enable_thinking` to templates

Part = str | bytes  # text, or the identity of content that is not text


class Chat:
    """Writes one prompt: head fields first, then messages, then `prompt`."""

    __slots__ = (
        "_arguments", "_before", "_fewer_tools", "_first_user_end", "_head", "_head_hint", "_hint", "_opaque_bytes",
        "_out", "_size", "_spans", "begins", "media",
    )  # fmt: skip

    def __init__(self, before: MessagePrefix | None = None) -> None:
        """`before`: messages written with an earlier prompt, which this one extends."""
        self._head: list[bytes] = []
        self._out: list[bytes] = []
        self._before = before
        self._size, self._first_user_end, self._opaque_bytes = 0, 0, 0  # counted over messages, without the head
        self._head_hint, self._hint = 0, 0  # offsets after the last breakpoint in the head and in the messages
        self._arguments = (0, 0)
        self._fewer_tools: tuple[int, bytes] | None = None
        self.media = b""  # options for the engine's processing of images and sound; it hashes them together with this
        self.begins = True  # no user message yet: content marked by breakpoints still matters
        self._spans: list[tuple[int, int]] = []
        if before is not None:
            self._size, self._first_user_end = before.size, before.first_user_end
            self.begins = not before.first_user_end
            self._spans, self._opaque_bytes, self._hint = list(before.spans), before.opaque_bytes, before.hint_bytes

    def head(self, name: str, value: bytes) -> None:
        """Write a field of the request that the template sees, such as its arguments."""
        self._head += (GS, name.encode(), US, value)

    def argument(self, name: str, value: bytes) -> None:
        """Write an argument of the template. Arguments follow each other in the head. Empty bytes write nothing."""
        if not value:
            return
        start = sum(map(len, self._head))
        self.head(name, value)
        self._arguments = (self._arguments[0] if self._arguments[1] else start, sum(map(len, self._head)))

    def effort(self, effort: object) -> None:
        """Write the requested reasoning effort. Templates that know it state it at their beginning (gpt-oss); all other
        templates only receive a flag for thinking."""
        if effort and effort != NO_EFFORT:
            self.argument("reasoning_effort", msgspec.json.encode(effort))

    def tools(self, tools: object, choice: object = None) -> None:
        """Write the tools, before all other content, each put together as the engine does. An empty list writes
        nothing. `choice` is the request's `tool_choice`: some engines leave out tools that may not be called
        (`Prompt.fewer_tools`)."""
        if isinstance(tools, list):
            tools = [_tool(tool) for tool in tools]
        if not tools:
            return
        self.head("tools", msgspec.json.encode(tools))
        if choice == "none" or isinstance(choice, dict):
            named = choice.get("function") if isinstance(choice, dict) else None
            name = named.get("name") if isinstance(named, dict) else None
            left = [tool for tool in tools if _name(tool) == name] if name and isinstance(tools, list) else []
            fewer = GS + b"tools" + US + msgspec.json.encode(left) if left else b""
            self._fewer_tools = (sum(map(len, self._head)), fewer)

    def system(self, text: str) -> None:
        """Write a system prompt that the request has apart from its messages."""
        self._head += (RS, b"system", US, utf8(_strip_billing(text)))

    def head_breakpoint(self, behind_bytes: int = 0) -> None:
        """Record a client's cache breakpoint at the current end of the head, except for its last `behind_bytes`
        bytes."""
        self._head_hint = sum(map(len, self._head)) - behind_bytes

    def set_head(self, heading: Heading) -> None:
        """Set the whole head to a result of `heading`."""
        head, self._head_hint, self._arguments, self._fewer_tools = heading
        self._head = [head]

    def get_heading(self) -> Heading:
        """Return the whole head."""
        return b"".join(self._head), self._head_hint, self._arguments, self._fewer_tools

    def texts(self, messages: Sequence[dict[str, Any]], at: int = 0) -> int:
        """Write messages from `at` on, up to the first that has other fields or is not a text. Most messages are plain
        texts. Returns the index of the first message that was not written. It is one loop because a conversation has up
        to hundreds."""
        out, end, before, long = self._out, self._size, len(self._out), SLICE_BYTES
        for message in islice(messages, at, None):
            role, text = message.get("role"), message.get("content")
            if len(message) != 2 or not isinstance(text, str) or not isinstance(role, str):
                break
            if role == "system":
                text = _strip_billing(text)
            lead = _LEADS.get(role) or RS + role.encode() + US
            data = text.encode() if len(text) <= long else utf8(text)
            out += lead, data
            if not len(out) & OTHERS_AFTER:
                gil_release.release_gil()
            start = end
            end += len(lead) + len(data)
            if role == "assistant":
                self._spans.append((start, end))
            elif role == "user" and self.begins:
                self._first_user_end, self.begins = end, False
        self._size = end
        return at + (len(out) - before) // 2

    def text(self, role: str, text: str) -> None:
        """Write one message that is a text and has no other fields."""
        if role == "system":
            text = _strip_billing(text)
        lead = _LEADS.get(role) or RS + role.encode() + US
        data = text.encode() if len(text) <= SLICE_BYTES else utf8(text)
        self._out += (lead, data)
        self._end(role, len(lead) + len(data))

    def message(
        self,
        role: str,
        parts: Sequence[Part],
        fields: Sequence[tuple[str, bytes]] = (),
        breakpoints: Sequence[int] = (),
    ) -> None:
        """Write one message: the parts of its content, and its given fields as JSON. `breakpoints`: for each cache
        breakpoint of the client, the number of parts before it."""
        out = [RS, role.encode(), US]
        if role == "system":
            kept = [_strip_billing(part) for part in parts]
            breakpoints = [sum(map(bool, kept[:marked])) for marked in breakpoints]
            parts = [part for part in kept if part]
        for position, part in enumerate(parts):
            if not position % PIECES_MAX:
                gil_release.release_gil()
            if position:
                out.append(b"\n")  # vLLM joins text parts this way if the template takes a string
            if isinstance(part, str):
                out.append(utf8(part))
            else:
                filler = xxh3_128_digest(part + self.media) * OPAQUE_REPEATS
                out.append(filler)
                self._opaque_bytes += len(filler)
        if breakpoints and self.begins:
            self._mark(role, len(parts), breakpoints, out)
        for name, value in fields:
            out += (GS, name.encode(), US, value)
        if len(out) > PIECES_MAX:
            out = _merge_pieces(out)
        self._out += out
        self._end(role, sum(map(len, out)))

    def _mark(self, role: str, parts: int, breakpoints: Iterable[int], out: list[bytes]) -> None:
        """Keep the last of these breakpoints that may end a template. A breakpoint at the end of the first user message
        does not. `out` is the lead (three pieces), then the parts, with a separator between any two."""
        marked = max((n for n in breakpoints if 0 < n <= parts - (role == "user")), default=0)
        if marked:
            self._hint = self._size + sum(map(len, out[: 2 + 2 * marked]))

    def _end(self, role: str, size: int) -> None:
        start = self._size
        self._size = end = start + size
        if role == "assistant":
            self._spans.append((start, end))
        elif role == "user" and self.begins:
            self._first_user_end, self.begins = end, False

    def get_beginning(self) -> MessagePrefix:
        """Return the messages written up to now, for prompts that extend them."""
        spans = tuple(self._spans[-SPANS_MAX:])
        return MessagePrefix(self._size, self._first_user_end, spans, self._opaque_bytes, self._hint)

    def prompt(self) -> Prompt:
        """Return the prompt that was written."""
        gil_release.release_gil()
        return self._prompt(b"".join([*self._head, *self._out]), sum(map(len, self._head)))

    def build_linked_prompt(self, ends: list[MessagePrefix], whole: Callable[[], Prompt | None]) -> Prompt:
        """Return the content written after `before`, as a prompt linked to others."""
        head, before = self.get_heading()[0], self._before
        prompt = self._prompt(b"".join(self._out if before else [head, *self._out]), len(head))
        prompt.skipped_bytes = len(head) + before.size if before else 0
        prompt.joint = MessageBoundary(head, before, ends, whole)
        return prompt

    def _prompt(self, text: bytes, head: int) -> Prompt:
        spans = tuple([(start + head, end + head) for start, end in self._spans])
        prompt = Prompt(text, head + (self._first_user_end or self._size), spans, self._opaque_bytes)
        prompt.arguments, prompt.fewer_tools = self._arguments, self._fewer_tools
        hint = head + self._hint if self._hint else self._head_hint
        if 0 < hint < prompt.first_user_end:
            prompt.hint_bytes = hint
        return prompt


_LEADS = {role: RS + role.encode() + US for role in ("system", "user", "assistant", "tool", "developer")}


def _tool(tool: object) -> object:
    """Return the tool as vLLM's FunctionDefinition prints it: name, description, parameters, then the rest; no
    nulls."""
    gil_release.release_gil()
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        return tool
    ordered = {name: function.get(name) for name in ("name", "description", "parameters")} | function
    fields = {name: value for name, value in ordered.items() if value is not None}
    return {"type": "function", "function": fields} | {
        k: v for k, v in tool.items() if v is not None and k not in _TOOL
    }


_TOOL = ("type", "function")


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def calls(tool_calls: object) -> bytes:
    """Return tool calls in one order of keys: engines rebuild them, vLLM in another order for every API.

    The ids are left out. Most templates do not print them (Mistral's and Kimi's do), and some clients make new ids for
    each turn: then a conversation would be another one from its first call on. If a template prints ids, the content
    after the first call of such a client is credited by mistake. The placement is still the same, since the content
    before that call is cached there.
    """
    return msgspec.json.encode([_call(each) for each in tool_calls] if isinstance(tool_calls, list) else tool_calls)


def call(name: str, arguments: object) -> dict[str, Any]:
    """Return a tool call as a chat has it. `arguments` is JSON or its decoded value."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _call(given: object) -> object:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    made = call(function.get("name", ""), _arguments(function.get("arguments")))
    return made | {n: value for n, value in given.items() if n not in made and n != "id" and value is not None}


def _arguments(arguments: object) -> object:
    """Return the arguments as the template sees them: vLLM parses a string, and takes "" and null for {}."""
    if not arguments:
        return {}
    try:
        return sliced_json.value(utf8(arguments)) if isinstance(arguments, str) else arguments
    except UNREADABLE:
        return arguments


def _merge_pieces(pieces: list[bytes]) -> list[bytes]:
    """Return the same bytes in fewer pieces: joining a million of them takes tens of milliseconds."""
    made: list[bytes] = []
    for at in range(0, len(pieces), PIECES_MAX):
        gil_release.release_gil()
        made.append(b"".join(pieces[at : at + PIECES_MAX]))
    return made


def canonical(raw: Raw) -> bytes:
    """Return JSON without white space and needless escapes, keys in their order."""
    return msgspec.json.encode(sliced_json.value(raw))


def arguments(raw: Raw) -> bytes:
    """Return named arguments as JSON, sorted by name, without those that act late. b"" if no argument is left."""
    given = sliced_json.value(raw)
    if isinstance(given, dict):
        given = {name: given[name] for name in sorted(given) if name not in LATE_ARGUMENTS}
    return msgspec.json.encode(given) if given else b""


@overload
def _strip_billing(part: str) -> str: ...
@overload
def _strip_billing(part: bytes) -> bytes: ...
def _strip_billing(part: Part) -> Part:
    if isinstance(part, str) and part.startswith(BILLING_HEADER):
        return part.partition("\n")[2]
    return part
