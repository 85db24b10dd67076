"""Chats that are continued by their text: the same chat again, with the text so far as its last message, left open.

There are two reasons for this form. If tools may be called, only the engine's parser takes a call out of the text, so
the next request must be a chat as well. The other reason is an engine that reports no ids. The request sets
`continue_final_message`, and sets `add_generation_prompt` to false. Otherwise the turn would be closed and another
answer begun (vLLM 0.32 and SGLang 0.5.23).

The text may be tokenised differently from the original tokens, and a template may trim it. If ids are reported, this is
detected: the next replica reports the ids of its prompt. Only if they are those of the first prompt and of the text so
far is the continuation exact. Otherwise it is approximate, or refused. A stream without any text so far is requested
again unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from router.core.dialects.failover.plan import FailoverPlan
from router.core.dialects.failover.recorder import FailoverMismatch, StreamRecorder
from router.core.dialects.failover.stitcher import StreamStitcher
from router.core.dialects.tenant_isolation import CHAT

_decode_ids = msgspec.json.Decoder(list[int]).decode


class ChatRecorder(StreamRecorder):
    """A chat that is continued as a chat. `body` returns its request's body again."""

    next_path = CHAT

    def __init__(self, plan: FailoverPlan, body: Callable[[], bytes]) -> None:
        super().__init__(plan)
        self.approximate = not plan.asks_ids
        self._body = body
        self._text: list[str] = []

    def note(self, ids: Sequence[int], text: str, shown: str) -> None:
        """Record tokens, the text that came with them, and the part of that text that is new to the client."""
        if shown:
            self._text.append(shown)
        super().note(ids, text, shown)

    def go_on_from(self, tokens: int) -> None:
        """Continue on another replica after this number of tokens of the answer, which make up all text so far."""
        self._behind = ""
        super().go_on_from(tokens)

    def calls(self) -> None:
        """Record that the answer calls a tool, or reasons: only the engine's parser can continue that."""
        self._why_not = "tool_call"

    @property
    def _against(self) -> str:
        if not self._names:
            return "answer"
        if self._why_not and not (self._why_not == "no_ids" and self.plan.takes_approximate):
            return self._why_not
        if self._reasoned:
            return "reasoning"
        most = self.plan.tokens_max
        return "spent" if most is not None and most <= self._count_sent_tokens() else ""

    def _count_sent_tokens(self) -> int:
        """Count the tokens sent so far, from which the limits of the next request are computed: those of the text, if
        they are known. Without ids, each piece of text counts as one."""
        if not self._ids or not self._points:
            return len(self._text)
        return len(self._ids) if self._behind else self._points[0][0]

    def _request(self) -> bytes:
        self.said_tokens = self._count_sent_tokens()
        return self.plan.next_chat(self._body(), "".join(self._text), self.said_tokens)

    def meets(self, prompt: list[int]) -> bool:
        """True if a prompt of these ids is the first prompt with the tokens that count as sent. Their text is then all
        text so far, and the limits are those of the whole answer."""
        if self._behind and self.plan.held_chars:
            return False  # the tokens contain more text, which is held back
        return prompt == [*_decode_ids(self._prompt or b"[]"), *self._ids[: self.said_tokens]]


class ResumedChat(StreamStitcher):
    """Rewrites the events of a chat that continues."""

    def __init__(self, carried: ChatRecorder) -> None:
        super().__init__(carried)
        self._chat = carried
        self._expected = ""  # no text is repeated

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        prompt = chunk.pop("prompt_token_ids", None)
        if not self._begun:
            self._begun = True
            exact = prompt is not None and self._chat.meets(prompt)
            self._tokens = self._chat.said_tokens
            self._chat.go_on_from(self._tokens)
            self._chat.approximate = self._chat.approximate or not exact
            if not exact and not self._chat.plan.takes_approximate:
                raise FailoverMismatch("the text has different token boundaries")
        return super()._rewritten(chunk)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return a choice as sent to the client. None for a choice with only the role, or only tokens."""
        ids = choice.pop("token_ids", None)
        delta = choice.get("delta") or {}
        delta.pop("role", None)
        told = bool(delta.get("content") or delta.get("tool_calls") or delta.get("reasoning"))
        self._tokens += len(ids) if ids is not None else told
        finish = choice.get("finish_reason")
        if delta.get("tool_calls") or delta.get("reasoning"):
            self._chat.calls()
        text = delta.get("content") or ""
        self._chat.note(ids or (), text, text)
        if not told and not finish:
            return None
        self._chat.finished = self._chat.finished or bool(finish)
        return choice | {"delta": delta} | ({"token_ids": None} if self._carried.has_fields else {})
