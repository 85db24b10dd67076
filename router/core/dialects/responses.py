"""The Responses dialect of OpenAI as vLLM speaks it.

`instructions` and `input` become the chat that vLLM 0.32 makes of them (entrypoints/openai/responses/utils.py), where
reasoning, text and tool calls that follow each other are one assistant message; so a conversation is one chain
through either API. What an engine continues from its own store (`previous_response_id`) is unknown here.

Streams begin with `response.created` and `response.in_progress`, before any prefill, and end with
`response.completed`, which holds the whole response and its usage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from router.core.dialects import sse
from router.core.dialects.openai import OpenAI
from router.core.facts.placements import Ending, Usage
from router.core.facts.requests import Ask, Prompt, TemplateInput
from router.core.prompts import bodies
from router.core.prompts.beginnings import Seen
from router.core.prompts.bodies import ABSENT, UNREADABLE, USAGE_BODY_BYTES_MAX
from router.core.prompts.canonical import Chat, arguments, call, calls
from router.core.prompts.canonical_openai import content_parts
from router.core.prompts.template_responses import responses_input


class _Unknown(ValueError):
    """Something of which it is not known what the engine makes."""


class _Body(msgspec.Struct):
    model: Raw = ABSENT
    stream: Raw = ABSENT
    input: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    reasoning: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    prompt: Raw = ABSENT
    previous_input_messages: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    metadata: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    store: Raw = ABSENT


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


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int | None = 0
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    response: _Answer | None = None


class _Assistant:
    """The message that the items behind each other make."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.reasoning: str | None = None

    def write(self, chat: Chat) -> None:
        fields = [("tool_calls", calls(self.calls))] if self.calls else []
        if self.reasoning:
            fields.append(("reasoning", msgspec.json.encode(self.reasoning)))
        chat.message("assistant", () if self.text is None else (self.text,), fields)


_BODY = msgspec.json.Decoder(_Body)
_decode_input = msgspec.json.Decoder(str | list[_Item]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_text = msgspec.json.Decoder(_Text).decode

_EARLY = frozenset((b"response.created", b"response.queued", b"response.in_progress"))
_LAST = ("response.completed", "response.incomplete", "response.failed")
_FAILED = ("error", "response.failed")
_NAMED_LAST = re.compile(rb"^event: ?response\.(completed|incomplete|failed)\r?\n[^\n]*\n\r?\n", re.MULTILINE)
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')


class Responses(OpenAI):
    """Responses; errors are those of OpenAI's other paths."""

    name = "responses"
    says_done = False

    def parse(self, path: str, body: bytes, *, keep: bool = True, seen: Seen | None = None) -> Ask:
        """Read what placement needs. Raises BadBody for what is not a JSON object, or a model that is no string."""
        fields = bodies.decode_body(_BODY, body)
        return Ask(
            model=bodies.model_of(fields.model),
            prompt=_prompt(fields),
            stream=bodies.as_type(bool, fields.stream) or False,
            salt=bodies.salt_of(fields.cache_salt),
            session=bodies.as_type(str, fields.prompt_cache_key),
            output_tokens_max=bodies.positive(fields.max_output_tokens),
            stored=bodies.as_type(bool, fields.store),
            response_id=bodies.as_type(str, fields.previous_response_id),
            wants_usage=True,
            metadata=bodies.metadata_of(fields.metadata),
        )

    def template_input(self, path: str, body: bytes, decoded: object = None) -> TemplateInput | None:
        """The chat that vLLM makes of it; None for what continues an answer that an engine keeps."""
        return responses_input(body)

    def usage(self, body: bytes) -> Usage | None:
        """Token counts of an answer that did not stream."""
        answer = bodies.decoded(_decode_answer, body) if len(body) <= USAGE_BODY_BYTES_MAX else None
        return _counts(answer.usage) if answer else None

    def stream_usage(self, tail: bytes) -> Usage | None:
        """Token counts of the last event, of which a long answer leaves only the end in the tail."""
        for data in sse.payloads_backwards(tail):
            if b'"usage"' not in data:
                continue
            event = bodies.decoded(_decode_event, data)
            if event is None:
                return _counts(bodies.cut_usage(_Usage, data))
            if event.type in _LAST and event.response:
                return _counts(event.response.usage)
        return None

    def event_error(self, chunk: bytes) -> int | None:
        """An event `error` or `response.failed`, or OpenAI's error object as engines send it."""
        event = bodies.decoded(_decode_event, sse.first_payload(chunk))
        if event is None:
            return None
        return 500 if event.type in _FAILED else super().event_error(b"data: " + sse.first_payload(chunk))

    def begun(self, chunk: bytes) -> bool:
        """Not by the events that say only that the request has come."""
        return bodies.has_event_besides(_EARLY, chunk)

    def ended(self, tail: bytes) -> Ending | None:
        """By the last event, of which the name is enough: a long answer makes it long. Or by an error."""
        if found := _NAMED_LAST.findall(tail):
            return Ending.FAILED if found[-1] == b"failed" else Ending.OK
        for data in sse.payloads_backwards(tail):
            if self.event_error(b"data: " + data) is not None:
                return Ending.FAILED
            event = bodies.decoded(_decode_event, data)
            if event is not None and event.type in _LAST:
                return Ending.OK
        return None

    def with_usage(self, body: bytes) -> bytes:
        """Streams carry usage anyway."""
        return body

    def is_usage_event(self, event: bytes) -> bool:
        """Never: nothing was asked for."""
        return False

    def error_event(self, status: int, code: str, message: str, tail: bytes) -> bytes:
        """OpenAI's event `error`, numbered on, with the object `error` besides, by which its own clients know one."""
        numbers = _NUMBER.findall(tail)
        error = msgspec.json.decode(self.error(status, code, message))["error"]
        event: dict[str, Any] = {"type": "error", "code": code, "message": message, "param": None}
        event |= {"sequence_number": int(numbers[-1]) + 1 if numbers else 0, "error": error}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _counts(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.input_tokens_details
    return bodies.counts(usage.input_tokens, usage.output_tokens, details.cached_tokens if details else None)


def _prompt(fields: _Body) -> Prompt | None:
    elsewhere = (fields.previous_response_id, fields.previous_input_messages, fields.prompt)
    if not fields.input or any(map(bodies.given, elsewhere)):
        return None
    try:
        chat = Chat()
        if bodies.given(fields.mm_processor_kwargs):
            chat.media = arguments(fields.mm_processor_kwargs)
        _head(chat, fields)
        if instructions := bodies.as_type(str, fields.instructions):
            chat.message("system", (instructions,))
        given = _decode_input(fields.input)
        if isinstance(given, str):
            chat.message("user", (given,))
        else:
            _items(chat, given)
        return chat.prompt()
    except (*UNREADABLE, _Unknown):
        return None


def _head(chat: Chat, fields: _Body) -> None:
    if bodies.given(fields.tools):
        chat.tools(
            [made for tool in msgspec.json.decode(fields.tools, type=list[dict[str, Any]]) for made in _tool(tool)]
        )
    if bodies.given(fields.chat_template_kwargs):
        chat.argument("chat_template_kwargs", arguments(fields.chat_template_kwargs))
    chat.effort((bodies.as_type(dict, fields.reasoning) or {}).get("effort"))


def _tool(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """What the model is shown of a tool: functions, flat or in a namespace. The engine's own tools are not shown."""
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
        if _of_assistant(item):
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
            raise _Unknown(item.type)
    if open_ is not None:
        open_.write(chat)


def _of_assistant(item: _Item) -> bool:
    return item.type in ("function_call", "custom_tool_call", "reasoning") or item.role == "assistant"


def _join(chat: Chat, open_: _Assistant | None, item: _Item) -> _Assistant:
    """Add an item to the assistant's message, or to a new one where the field is taken; returns the open message."""
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
        raise _Unknown("encrypted reasoning")
    if item.content:
        return item.content if isinstance(item.content, str) else _first_text(item)
    return item.summary[0].text if item.summary else ""


def _first_text(item: _Item) -> str:
    """vLLM takes the first part of what an assistant said."""
    return _decode_text(item.content[0]).text if isinstance(item.content, list) and item.content else ""
