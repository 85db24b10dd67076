"""The canonical bytes of a chat: what the template will see, whatever API the chat came through.

They stand in the order most templates use: tools and template arguments, then each message as

    RS role US content [GS field US json]...

with generation parameters left out, and with them what tells nothing of a prompt's beginning: template arguments that
act only behind it (LATE_ARGUMENTS), and the ids of tool calls. vLLM 0.32 turns every API's request into one list of
OpenAI messages before it renders the template (entrypoints/anthropic/serving.py, openai/responses/utils.py there);
the dialects do as it does and write the result here, so that a conversation is one chain however it is spoken.

JSON that the template prints is decoded and encoded again: white space and escapes do not matter, but the order of
keys does, as it does to `tojson` in a template, except where the engine builds the object anew (the outer fields of
tools and of calls) and among template arguments, which are variables and are sorted. A message adds bytes only at the
end: an appended conversation extends its own canonical bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, overload

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from router.core.facts.requests import OPAQUE_BYTES, Beginning, Heading, Joint, Prompt
from router.core.prompts import interpreter, slices
from router.core.prompts.blocks import SPANS_MAX
from router.core.prompts.bodies import UNREADABLE
from router.core.prompts.slices import SLICE_BYTES, utf8

RS, US, GS = b"\x1e", b"\x1f", b"\x1d"
# An image is hundreds of tokens, not its URL's length: it stands as so many digests. How many tokens that are is
# learned (core/learned/token_ratio.py); what is already hashed must not change with it.
OPAQUE_REPEATS = OPAQUE_BYTES // 16
# Claude Code's attribution line changes with every request; vLLM drops it from system prompts, so that they match.
BILLING_HEADER = "x-anthropic-billing-header"
# Template arguments that are not part of a chain, since they act behind a conversation's beginning: on the generation
# prompt (Qwen3, DeepSeek V3.1), on what users said (GLM 4.5 puts `/nothink` behind it), or on which reasoning of past
# answers is shown. Turned on and off they leave a conversation in one cache, which the engine reuses up to where they
# act. Some templates use the same names at their beginning (SmolLM3, Granite 3, Gemma 4). There a replica is credited
# with a beginning that it holds under the other value only: once for each value and replica, since it holds both then.
LATE_ARGUMENTS = frozenset((
    "add_generation_prompt", "clear_thinking", "continue_final_message", "drop_thinking", "enable_thinking",
    "preserve_thinking", "thinking", "truncate_history_thinking",
))  # fmt: skip
OTHERS_AFTER = 0xFE  # every 128 messages, which take a tenth of a millisecond, other threads have a turn
PIECES_MAX = 4_096  # of one message that are kept apart
NO_EFFORT = "none"  # thinking switched off: engines tell templates that by `enable_thinking` too

Part = str | bytes  # text, or the identity of something that is not text


class Chat:
    """Writes one prompt: head fields first, then messages, then `prompt`."""

    __slots__ = (
        "_arguments", "_before", "_fewer_tools", "_first_user_end", "_head", "_head_hint", "_hint", "_opaque_bytes",
        "_out", "_size", "_spans", "begins", "media",
    )  # fmt: skip

    def __init__(self, before: Beginning | None = None) -> None:
        """`before`: messages written with an earlier prompt, behind which this one goes on."""
        self._head: list[bytes] = []
        self._out: list[bytes] = []
        self._before = before
        self._size, self._first_user_end, self._opaque_bytes = 0, 0, 0  # counted over messages, without the head
        self._head_hint, self._hint = 0, 0  # offsets behind the last breakpoint in the head and in the messages
        self._arguments = (0, 0)
        self._fewer_tools: tuple[int, bytes] | None = None
        self.media = b""  # how the engine is to process images and sound; it hashes them together with this
        self.begins = True  # no message yet was the user's: what is marked by breakpoints is still wanted
        self._spans: list[tuple[int, int]] = []
        if before is not None:
            self._size, self._first_user_end = before.size, before.first_user_end
            self.begins = not before.first_user_end
            self._spans, self._opaque_bytes, self._hint = list(before.spans), before.opaque_bytes, before.hint_bytes

    def head(self, name: str, value: bytes) -> None:
        """A field of the request that the template sees, such as its arguments."""
        self._head += (GS, name.encode(), US, value)

    def argument(self, name: str, value: bytes) -> None:
        """An argument of the template; arguments follow each other in the head. Empty bytes write nothing."""
        if not value:
            return
        start = sum(map(len, self._head))
        self.head(name, value)
        self._arguments = (self._arguments[0] if self._arguments[1] else start, sum(map(len, self._head)))

    def effort(self, effort: object) -> None:
        """How much the model is asked to reason. Templates that know it say so to it at their beginning (gpt-oss); all
        others are told only whether to think."""
        if effort and effort != NO_EFFORT:
            self.argument("reasoning_effort", msgspec.json.encode(effort))

    def tools(self, tools: object, choice: object = None) -> None:
        """The tools, before all else, each put together as the engine does; none leave no trace. `choice` is the
        request's `tool_choice`: some engines leave out what may not be called (`Prompt.fewer_tools`)."""
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
        """A system prompt that the request has beside its messages."""
        self._head += (RS, b"system", US, utf8(_without_billing(text)))

    def head_breakpoint(self, behind_bytes: int = 0) -> None:
        """The client marks what the head has up to now, but for its last bytes, as worth caching."""
        self._head_hint = sum(map(len, self._head)) - behind_bytes

    def rendered(self, heading: Heading) -> None:
        """All of the head, as `heading` gave it."""
        head, self._head_hint, self._arguments, self._fewer_tools = heading
        self._head = [head]

    def heading(self) -> Heading:
        """All of the head."""
        return b"".join(self._head), self._head_hint, self._arguments, self._fewer_tools

    def texts(self, messages: Sequence[dict[str, Any]], at: int = 0) -> int:
        """Messages from `at` on, as long as each is a text and has no other fields, as most are; returns how many there
        are up to the first other one. All in one loop: a conversation has up to hundreds."""
        out, end, before, long = self._out, self._size, len(self._out), SLICE_BYTES
        for message in islice(messages, at, None):
            role, text = message.get("role"), message.get("content")
            if len(message) != 2 or not isinstance(text, str) or not isinstance(role, str):
                break
            if role == "system":
                text = _without_billing(text)
            lead = _LEADS.get(role) or RS + role.encode() + US
            data = text.encode() if len(text) <= long else utf8(text)
            out += lead, data
            if not len(out) & OTHERS_AFTER:
                interpreter.let_others()
            start = end
            end += len(lead) + len(data)
            if role == "assistant":
                self._spans.append((start, end))
            elif role == "user" and self.begins:
                self._first_user_end, self.begins = end, False
        self._size = end
        return at + (len(out) - before) // 2

    def text(self, role: str, text: str) -> None:
        """One message that is a text and has no other fields."""
        if role == "system":
            text = _without_billing(text)
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
        """One message: its content's parts, and those of its fields that are given, as JSON. `breakpoints`: before how
        many of its parts the client marked what is worth caching."""
        out = [RS, role.encode(), US]
        if role == "system":
            kept = [_without_billing(part) for part in parts]
            breakpoints = [sum(map(bool, kept[:marked])) for marked in breakpoints]
            parts = [part for part in kept if part]
        for position, part in enumerate(parts):
            if not position % PIECES_MAX:
                interpreter.let_others()
            if position:
                out.append(b"\n")  # vLLM joins text parts so where the template takes a string
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
            out = _joined(out)
        self._out += out
        self._end(role, sum(map(len, out)))

    def _mark(self, role: str, parts: int, breakpoints: Iterable[int], out: list[bytes]) -> None:
        """Keep the last of these breakpoints that may end a template; one at the end of the first user message does
        not. `out` is the lead (three pieces), then the parts, with a separator between any two."""
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

    def beginning(self) -> Beginning:
        """The messages written up to now, for prompts that go on behind them."""
        spans = tuple(self._spans[-SPANS_MAX:])
        return Beginning(self._size, self._first_user_end, spans, self._opaque_bytes, self._hint)

    def prompt(self) -> Prompt:
        """All that was written."""
        interpreter.let_others()
        return self._prompt(b"".join([*self._head, *self._out]), sum(map(len, self._head)))

    def joined(self, ends: list[Beginning], whole: Callable[[], Prompt | None]) -> Prompt:
        """What was written behind `before`, as a prompt that hangs together with others."""
        head, before = self.heading()[0], self._before
        prompt = self._prompt(b"".join(self._out if before else [head, *self._out]), len(head))
        prompt.skipped_bytes = len(head) + before.size if before else 0
        prompt.joint = Joint(head, before, ends, whole)
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
    """The tool as vLLM's FunctionDefinition prints it: name, description, parameters, then the rest; no nulls."""
    interpreter.let_others()
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
    """Tool calls in one order of keys: engines rebuild them, vLLM in another order for every API. Without their ids,
    which most templates do not print (Mistral's and Kimi's do), and which some clients make anew each turn: then a
    conversation would be another from its first call on. What is credited by mistake is, where a template prints them,
    what follows the first call of such a client; its place is the same, since what is before that call is there."""
    return msgspec.json.encode([_call(each) for each in tool_calls] if isinstance(tool_calls, list) else tool_calls)


def call(name: str, arguments: object) -> dict[str, Any]:
    """A tool call as a chat has it; `arguments` is JSON or what it decodes to."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _call(given: object) -> object:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    made = call(function.get("name", ""), _arguments(function.get("arguments")))
    return made | {n: value for n, value in given.items() if n not in made and n != "id" and value is not None}


def _arguments(arguments: object) -> object:
    """The arguments as the template sees them: vLLM parses a string, and takes "" and null for {}."""
    if not arguments:
        return {}
    try:
        return slices.value(utf8(arguments)) if isinstance(arguments, str) else arguments
    except UNREADABLE:
        return arguments


def _joined(pieces: list[bytes]) -> list[bytes]:
    """The same bytes in fewer pieces: to join a million of them takes tens of milliseconds."""
    made: list[bytes] = []
    for at in range(0, len(pieces), PIECES_MAX):
        interpreter.let_others()
        made.append(b"".join(pieces[at : at + PIECES_MAX]))
    return made


def canonical(raw: Raw) -> bytes:
    """JSON without white space and needless escapes, keys in their order."""
    return msgspec.json.encode(slices.value(raw))


def arguments(raw: Raw) -> bytes:
    """Named arguments as JSON, by name, without those that act late; b"" where none is left."""
    given = slices.value(raw)
    if isinstance(given, dict):
        given = {name: given[name] for name in sorted(given) if name not in LATE_ARGUMENTS}
    return msgspec.json.encode(given) if given else b""


@overload
def _without_billing(part: str) -> str: ...
@overload
def _without_billing(part: bytes) -> bytes: ...
def _without_billing(part: Part) -> Part:
    if isinstance(part, str) and part.startswith(BILLING_HEADER):
        return part.partition("\n")[2]
    return part
