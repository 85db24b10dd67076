"""State of a stream, recorded event by event, and its events as sent to the client.

vLLM 0.32 and SGLang 0.5.23 report the prompt's ids in the first event and the ids of its tokens in each. They are
removed, so that the client gets the same events as without them. vLLM then has the fields as null, SGLang does not have
them.

Ids and text are not in step. An event may have ids and no text: half a character, or the possible beginning of a stop
string. An event of several tokens may end with half a character. So the stream does not continue after its last id, but
from its last *point*: after an event of one token that carried text. At a point, every character of the ids was sent,
except those that the engine holds back for stop strings (`FailoverPlan.held_chars`). These are sent at a later
point. Text that was sent after the point is generated again by the next replica, compared, and left out. Output after
the point that was never sent is dropped without harm. Every stop string still to come begins after the point, so that
the next replica finds it. Characters that may begin one are held back. If they are sent, the point lies before them
(`FailoverPlan.open_chars`).

An error event, an answer that the engine aborts, or a `[DONE]` before a finish reason is not sent to the client: the
stream counts as broken there. The client gets the end of an aborted answer if its replica stays, since an operator
aborted the request then.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.core.dialects import sse
from router.core.dialects.failover.plan import FailoverPlan, FailoverRefused
from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS
from router.core.prompts import json_fields
from router.core.prompts.json_fields import ABSENT

SAID_TOKENS_MAX = 1 << 20  # tokens that are remembered of an answer; 4 MB
PROMPT_BYTES_MAX = 16 << 20  # bytes of a prompt's ids as JSON: two million tokens
# finish reason of requests that vLLM ends at shutdown, and of requests that are aborted in either engine
ABORT = "abort"
GIVEN_UP_BYTES_MAX = 64 << 10  # bytes kept of the end of an answer that was aborted
BEHIND_CHARS_MAX = 64 << 10  # characters sent after the last point

_IDS, _PROMPT_IDS = b'"token_ids":[', b'"prompt_token_ids":['


class _Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw = ABSENT
    refusal: str | None = None


class _Choice(Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = ABSENT


class _Chunk(Struct):
    id: str = ""
    object: str = ""
    created: Raw = ABSENT
    model: str = ""
    choices: list[_Choice] = []
    usage: Raw = ABSENT
    prompt_token_ids: Raw = ABSENT
    error: Raw = ABSENT


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class FailoverMismatch(Exception):
    """The next replica did not repeat the text sent so far: the two do not make one answer."""


class AlreadyComplete(Exception):
    """The whole answer was sent, and only its end is missing. `events` are the end as the engine would have sent it."""

    def __init__(self, events: bytes) -> None:
        super().__init__("the answer was already complete")
        self.events = events


class StreamRecorder:
    """One answer, carried from replica to replica. Feed it whole events."""

    next_path = COMPLETIONS

    def __init__(self, plan: FailoverPlan) -> None:
        self.plan = plan
        self.broken = False  # the engine reported a failure, or an end of the stream before its finish reason
        self.given_up = b""  # events by which the engine aborted the answer, and those after them
        self.prompt_tokens = 0
        self.said_tokens = 0  # tokens that the next replica is given, once `next_body` was called
        self.said_chars = 0
        self._made_chars = 0  # characters sent by the current replica and those before it
        self._prompt = b""  # JSON array of the prompt's ids
        self._ids = array("I")
        self._points = deque([(0, 0)])  # (ids, characters that they make); the first is the one to continue from
        self._behind = ""  # the text that was sent after the first point
        self._obstacle = ""  # the reason for which it cannot be continued
        self.names: dict[str, Any] = {}  # the fields of every event: `id`, `object`, `created`, `model`
        self.has_null_ids = False  # choices of streams without ids have the field `token_ids`, as null
        self.finished = self.has_usage = self.done = False  # its finish reason was sent; its usage; its end
        self._reasoned = False  # the answer has reasoned

    # -- first replica -------------------------------------------------------------------------------------------

    def take(self, event: bytes) -> bytes:
        """Return the event as sent to the client, its blank line included. b"" if it is not sent."""
        if self.broken:
            if self.given_up and len(self.given_up) < GIVEN_UP_BYTES_MAX:
                self.given_up += event
            return b""
        data = sse.payload(event)
        if data == b"[DONE]":
            self.broken, self.done = not self.finished, self.finished
            return b"" if self.broken else event
        if not data.startswith(b"{"):
            return event
        chunk = json_fields.decode_or_none(_decode_chunk, data)
        if chunk is None:
            self._obstacle = "answer"
            return event
        if any(choice.finish_reason == ABORT for choice in chunk.choices):
            self.given_up = self._strip_ids(event)
        if json_fields.has_value(chunk.error) or self.given_up:
            self.broken = True
            return b""
        if not self.names:
            self._begin(chunk)
        self.has_usage = self.has_usage or (json_fields.has_value(chunk.usage) and not chunk.choices)
        for choice in chunk.choices:
            self._note(choice)
        if self.plan.path == CHAT and b'"delta":{}' in event and not self.finished:
            return b""  # vLLM sends such an event only because ids were requested
        return self._strip_ids(event)

    def _begin(self, chunk: _Chunk) -> None:
        raw = chunk.prompt_token_ids
        if not json_fields.has_value(raw) and chunk.choices:
            raw = chunk.choices[0].prompt_token_ids
        created = msgspec.json.decode(chunk.created) if json_fields.has_value(chunk.created) else 0
        self.names = {"id": chunk.id, "object": chunk.object, "created": created, "model": chunk.model}
        if not json_fields.has_value(raw) or len(raw) > PROMPT_BYTES_MAX or not bytes(raw).startswith(b"["):
            self._obstacle = "no_ids"
            return
        self._prompt = bytes(raw)
        self.prompt_tokens = 0 if self._prompt[1:-1].strip() == b"" else self._prompt.count(b",") + 1
        self.has_null_ids = self.plan.engine == "vllm"

    def _note(self, choice: _Choice) -> None:
        """Record the output of a choice."""
        text, ids = choice.text or "", choice.token_ids or []
        delta = choice.delta
        if delta is not None:
            text = delta.content or ""
            if json_fields.has_value(delta.tool_calls) and bytes(delta.tool_calls) != b"[]":
                self._obstacle = "tool_call"
            if delta.reasoning or delta.reasoning_content:
                self._points.clear()  # only the engine's parser can continue this
                self._behind, self._reasoned = "", True
        if text and not ids:
            self._obstacle = self._obstacle or "no_ids"
        self.note(ids, text, text)
        if choice.finish_reason:
            self.finished = True

    def note(self, ids: Sequence[int], text: str, shown: str) -> None:
        """Record tokens, the text that came with them, and the part of that text that is new to the client."""
        self._ids.extend(ids)
        if len(self._ids) > SAID_TOKENS_MAX:
            self._obstacle, self._ids = "too_long", array("I")
        if not text:
            return
        self._made_chars += len(text)
        self.said_chars += len(shown)
        points = self._points
        if points:
            self._behind += shown
        if len(ids) == 1:  # at most as many points are kept as characters are held back
            points.append((len(self._ids), self._made_chars + self.plan.held_chars))
        while len(points) > 1 and points[1][1] <= self._sure_chars:
            points.popleft()
        if points:
            behind = self.said_chars - points[0][1]
            self._behind = self._behind[-behind:] if behind > 0 else ""
        if len(self._behind) > BEHIND_CHARS_MAX:
            self._obstacle, self._behind = "no_point", ""

    @property
    def _sure_chars(self) -> int:
        """Number of characters sent in which no incomplete stop string has begun."""
        return max(0, self.said_chars - self.plan.open_chars)

    def _strip_ids(self, event: bytes) -> bytes:
        event = _cut_out(event, _PROMPT_IDS, null=self.has_null_ids)
        return _cut_out(event, _IDS, null=self.has_null_ids)

    # -- in between ----------------------------------------------------------------------------------------------

    def continue_from(self, tokens: int) -> None:
        """Continue on another replica after this number of tokens of the answer: those at which `next_body` ended."""
        del self._ids[tokens:]
        self._made_chars = self.said_chars - len(self._behind)
        self._points = deque([(tokens, self._made_chars)])

    def next_body(self) -> bytes:
        """Return the request for the next replica. Raises AlreadyComplete if no further request is needed, and
        FailoverRefused."""
        if self.finished:
            raise AlreadyComplete(self._end())
        if reason := self._refusal:
            raise FailoverRefused(reason)
        self.said_tokens = self._sent_tokens
        return self._request()

    def _request(self) -> bytes:
        said = ",".join(map(str, self._ids[: self.said_tokens])).encode()
        inside = self._prompt.strip()[1:-1]
        prompt = b"[%b]" % b",".join(part for part in (inside, said) if part)
        return self.plan.next_body(prompt, self.prompt_tokens, self.said_tokens)

    @property
    def can_continue(self) -> bool:
        """True if the answer has more to come, and another replica can generate it."""
        return not (self.finished or self._refusal)

    @property
    def _refusal(self) -> str:
        """Reason for which another replica cannot continue, "" if it can."""
        if not self.names:
            return "answer"
        if self._obstacle:
            return self._obstacle
        if not self._points or self._points[0][1] > self._sure_chars:
            return "reasoning"
        return "spent" if self.plan.most(self.prompt_tokens) <= self._sent_tokens else ""

    @property
    def _sent_tokens(self) -> int:
        """Number of tokens that count as sent: those before the point from which the stream is continued."""
        return self._points[0][0]

    @property
    def replayed_text(self) -> str:
        """Text that was sent after the point from which the stream is continued, so that it is generated again."""
        return self._behind

    def _end(self) -> bytes:
        """Return the missing events of an answer that was sent up to its finish reason."""
        if self.done:
            return b""
        end = b"data: [DONE]\n\n"
        if self.has_usage or not self.plan.wants_usage or self._obstacle:
            return end
        said = len(self._ids)
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + said,
            "completion_tokens": said,
        }
        return data_event(self.names | {"choices": [], "usage": usage}) + end


def data_event(chunk: dict[str, Any]) -> bytes:
    """Return an event with this data."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _cut_out(event: bytes, name: bytes, *, null: bool) -> bytes:
    """Return the event with this list of ids as null, or without it. In JSON strings the quotes have backslashes, so a
    match is the field. There is one choice, so it occurs once."""
    start = event.find(name)
    if start < 0:
        return event
    end = event.index(b"]", start) + 1
    if null:
        return event[: start + len(name) - 1] + b"null" + event[end:]
    if event[start - 1 : start] == b",":
        start -= 1
    elif event[end : end + 1] == b",":
        end += 1
    return event[:start] + event[end:]
