"""Messages that are continued by their text: as the chat that vLLM 0.32 makes of them (entrypoints/anthropic).

The Messages API reports no ids, and vLLM would close a last message of the assistant's and begin another. So the next
request is a chat with its last message left open. Its events become those of Messages again: the text continues in the
open block, a call is a separate block, and the token counts are those of the whole answer. Without ids the text may be
tokenised differently, so this is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.core.dialects import sse
from router.core.dialects.failover.plan import APPROXIMATE, FailoverPlan, FailoverRefused
from router.core.dialects.failover.recorder import AlreadyComplete, FailoverMismatch
from router.core.dialects.tenant_isolation import CHAT, MESSAGES
from router.core.prompts import json_fields
from router.core.prompts.json_fields import ABSENT, UNREADABLE
from router.core.prompts.template_messages import messages_input
from router.core.types.requests import TemplateInput

# Fields of the next request that a chat has under the same name, and fields without effect on it.
_SAME = ("model", "temperature", "top_p", "top_k", "cache_salt", "watermarking", "priority")
_LEFT_OUT = frozenset(
    (
        "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "metadata", "thinking", "output_config",
        "stop_sequences", "chat_template_kwargs", "betas", "service_tier", "prompt_cache_key", "context_management",
        "mm_payload", "cache_control",
    )
)  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STOP_EVENT = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class _Kind(Struct):
    type: str = ""
    text: str | None = None


class _Started(Struct):
    usage: dict[str, Any] | None = None


class _Event(Struct):
    type: str = ""
    index: int = 0
    delta: _Kind | None = None
    content_block: _Kind | None = None
    message: _Started | None = None
    error: Raw = ABSENT


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_chunk = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


def messages_plan(body: bytes, engines: frozenset[str], mode: str) -> FailoverPlan:
    """Return the plan of a streaming Messages request. Raises FailoverRefused."""
    if engines != {"vllm"}:
        raise FailoverRefused("engine")
    if mode != APPROXIMATE:
        raise FailoverRefused("no_ids")
    try:
        fields = _decode_fields(body)
        if any(name not in _SAME and name not in _LEFT_OUT and bytes(raw) != b"null" for name, raw in fields.items()):
            raise FailoverRefused("field")
        thinking = json_fields.decode_as(_Kind, fields.get("thinking", ABSENT))
        if thinking is not None and thinking.type != "disabled":
            raise FailoverRefused("reasoning")
        choice = json_fields.decode_as(_Kind, fields.get("tool_choice", ABSENT))
        if choice is not None and choice.type not in ("auto", "none"):
            raise FailoverRefused("tools")
        if b'"format"' in bytes(fields.get("output_config", b"")):
            raise FailoverRefused("grammar")
        given = fields.get("max_tokens", ABSENT)
        most = json_fields.number(given)
        if most is None and json_fields.has_value(given):
            raise FailoverRefused("field")
    except UNREADABLE as error:
        raise FailoverRefused("body") from error
    plan = FailoverPlan(MESSAGES, "vllm", True, b"", most, 0, 0, 0, wants_usage=True)
    plan.asks_ids, plan.by_text, plan.takes_approximate = False, True, True
    return plan


class MessagesRecorder:
    """One stream of Messages, carried to a chat on another replica. Feed it whole events. `body` returns its request's
    body again."""

    next_path = CHAT
    approximate = True

    def __init__(self, plan: FailoverPlan, body: Callable[[], bytes]) -> None:
        self.plan = plan
        self.broken = False  # the engine reported a failure, or an end of the stream before its finish reason
        self.given_up = b""  # always empty: an answer that was aborted cannot be distinguished from a broken one
        self.usage: dict[str, Any] = {}  # usage in the first event
        self.said_tokens = 0  # pieces of text: the tokens are not reported
        self.blocks = 0  # blocks that have begun
        self.open = False  # the last one has not ended
        self._text: list[str] = []
        self._body = body
        self._why_not = "answer"
        self.finished = self.done = False  # its stop reason was sent; its end was sent

    def take(self, event: bytes) -> bytes:
        """Return the event as sent to the client, b"" if it is not sent."""
        if self.broken:
            return b""
        data = sse.payload(event)
        told = json_fields.decode_or_none(_decode_event, data) if data.startswith(b"{") else None
        if told is None:
            return event
        if told.type == "error" or json_fields.has_value(told.error):
            self.broken = True
            return b""
        if told.type == "message_stop":
            self.broken, self.done = not self.finished, self.finished
            return b"" if self.broken else event
        self._note(told)
        return event

    def _note(self, told: _Event) -> None:
        if told.type == "message_start" and told.message is not None:
            self.usage, self._why_not = told.message.usage or {}, ""
        elif told.type == "content_block_start" and told.content_block is not None:
            self.blocks, self.open = told.index + 1, True
            if told.content_block.type == "tool_use":
                self.calls()
            elif told.content_block.type != "text" or self._text:
                self._why_not = "reasoning"
        elif told.type == "content_block_stop":
            self.open, self._why_not = False, self._why_not or "answer"  # the stop reason comes next, and is not known
        elif told.type == "message_delta":
            self.finished = True  # for any stop reason, which may be null
        elif told.delta is not None and told.delta.text:
            self.note(told.delta.text)

    def note(self, text: str) -> None:
        """Record a piece of text."""
        self._text.append(text)
        self.said_tokens += 1

    def calls(self) -> None:
        """Record that the answer calls a tool: only the engine's parser can continue that."""
        self._why_not = "tool_call"

    @property
    def can_go_on(self) -> bool:
        """True if the answer has more to come, and another replica can generate it."""
        return not (self.finished or self._why_not or self._spent)

    @property
    def _spent(self) -> bool:
        return self.plan.tokens_max is not None and self.plan.tokens_max <= self.said_tokens

    def next_body(self) -> bytes:
        """Return the request for the next replica. Raises AlreadyComplete if no further request is needed, and
        FailoverRefused."""
        if self.finished:
            raise AlreadyComplete(b"" if self.done else _STOP_EVENT)
        if self._why_not or self._spent:
            raise FailoverRefused(self._why_not or "spent")
        body = self._body()
        given = messages_input(body, None)
        if given is None or given.messages is None:
            raise FailoverRefused("media")
        return _encode(self._chat(_decode_fields(body), given))

    def _chat(self, fields: dict[str, Raw], given: TemplateInput) -> dict[str, Any]:
        messages = list(given.messages or ())
        chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
        if text := "".join(self._text):
            messages.append({"role": "assistant", "content": text})
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        chat |= {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        if self.plan.tokens_max is not None:
            chat["max_tokens"] = self.plan.tokens_max - self.said_tokens
        if given.tools:
            choice = json_fields.decode_as(_Kind, fields.get("tool_choice", ABSENT))
            chat |= {"tools": given.tools, "tool_choice": "auto" if choice is None else choice.type}
        if given.thinking_off or given.reasoning_effort is not None:
            chat["reasoning_effort"] = "none" if given.thinking_off else given.reasoning_effort
        if given.kwargs:
            chat["chat_template_kwargs"] = given.kwargs
        if "stop_sequences" in fields:
            chat["stop"] = fields["stop_sequences"]
        return chat


class MessagesStitcher:
    """Converts the events of the chat that continues to events of Messages. Feed it whole events."""

    def __init__(self, carried: MessagesRecorder) -> None:
        self._carried = carried
        self._open, self._blocks = ("text" if carried.open else ""), carried.blocks
        self._before = carried.said_tokens
        self._finish: tuple[str, object] | None = None
        self._told = False
        self.broken, self.given_up = False, b""

    def take(self, event: bytes) -> bytes:
        """Return the event as sent to the client, b"" if it is not sent. Raises FailoverMismatch."""
        if self.broken:
            return b""
        data = sse.payload(event)
        if data == b"[DONE]":
            self.broken = not self._told
            self._carried.done = self._told
            return b"" if self.broken else _STOP_EVENT
        if not data.startswith(b"{"):
            return event
        try:
            chunk = _decode_chunk(data)
            if "error" in chunk:
                self.broken = True
                return b""
            said = b"".join(map(self._choice, chunk["choices"]))
            usage = chunk.get("usage")
            return said + self._end(usage) if usage and not chunk["choices"] else said
        except (*UNREADABLE, TypeError, KeyError, AttributeError) as error:
            raise FailoverMismatch("an invalid event") from error

    def _choice(self, choice: dict[str, Any]) -> bytes:
        delta, made = choice.get("delta") or {}, b""
        if delta.get("reasoning") or delta.get("reasoning_content"):
            raise FailoverMismatch("reasoning starts again")
        if text := delta.get("content"):
            made += self._begin("text", {"type": "text", "text": ""})
            self._carried.note(text)
            made += self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id") and function.get("name"):
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                made += self._begin(f"call {call['id']}", block)
                self._carried.calls()
            if function.get("arguments"):
                made += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        if choice.get("finish_reason"):
            self._finish = choice["finish_reason"], choice.get("stop_reason")
        return made

    def _begin(self, what: str, block: dict[str, Any]) -> bytes:
        if self._open == what:
            return b""
        stop = self._stop()
        self._open, self._blocks = what, self._blocks + 1
        self._carried.open, self._carried.blocks = True, self._blocks
        return stop + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._blocks - 1)

    def _end(self, usage: dict[str, Any]) -> bytes:
        if self._finish is None:
            raise FailoverMismatch("it ends without a stop reason")
        reason, matched = self._finish
        stopped = isinstance(matched, str)
        delta = {"stop_reason": "stop_sequence" if stopped else _REASONS.get(reason, "end_turn")}
        said = self._before
        prompt = self._carried.usage.get("input_tokens", max(0, usage["prompt_tokens"] - said))
        counts = self._carried.usage | {"input_tokens": prompt, "output_tokens": usage["completion_tokens"] + said}
        self._told = self._carried.finished = True
        return self._stop() + _event(
            "message_delta", delta=delta | {"stop_sequence": matched if stopped else None}, usage=counts
        )


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
