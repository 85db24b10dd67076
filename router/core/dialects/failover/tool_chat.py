"""Chats that may call tools: continued as the same chat, with the text so far as its last message, left open.

Only the engine's parser takes a call out of the text, so the next request must be a chat as well. It sets
`continue_final_message`, and sets `add_generation_prompt` to false. Otherwise the turn would be closed and another
answer begun (vLLM 0.32). If no text was sent, the chat is requested again unchanged.

The text may be tokenised differently from the original tokens, and a template may trim it. So the next replica's first
event is checked: the ids of its prompt must be those of the first prompt and of the text so far. If they are not, the
answer would be another one, and nothing of it is sent.
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


class ToolChatRecorder(StreamRecorder):
    """A chat that may call tools. `body` returns its request's body again."""

    next_path = CHAT

    def __init__(self, plan: FailoverPlan, body: Callable[[], bytes]) -> None:
        super().__init__(plan)
        self._body = body
        self._text: list[str] = []

    def note(self, ids: Sequence[int], text: str, shown: str) -> None:
        """Record tokens as in StreamRecorder, and the text itself."""
        if shown:
            self._text.append(shown)
        super().note(ids, text, shown)

    def continue_from(self, tokens: int) -> None:
        """Continue on another replica after this number of tokens of the answer, which make up all text so far."""
        self._behind = ""
        super().continue_from(tokens)

    def note_call(self) -> None:
        """Record that the answer calls a tool, or reasons: only the engine's parser can continue that."""
        self._obstacle = "tool_call"

    @property
    def _refusal(self) -> str:
        return super()._refusal or ("reasoning" if self._reasoned else "")

    @property
    def _sent_tokens(self) -> int:
        return len(self._ids) if self._behind else super()._sent_tokens

    def _request(self) -> bytes:
        return self.plan.next_chat(self._body(), "".join(self._text), self.said_tokens)

    def is_continued_by(self, prompt: list[int]) -> bool:
        """True if a prompt of these ids is the first prompt with the tokens that count as sent. Their text is then all
        text so far, and the limits are those of the whole answer."""
        if self._behind and self.plan.held_chars:
            return False  # the tokens contain more text, which is held back
        return prompt == [*_decode_ids(self._prompt), *self._ids[: self.said_tokens]]


class ToolChatStitcher(StreamStitcher):
    """Rewrites the events of a chat that continues."""

    def __init__(self, recorder: ToolChatRecorder) -> None:
        super().__init__(recorder)
        self._chat = recorder

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        if not self._begun:
            self._begun = True
            prompt = chunk.get("prompt_token_ids")
            if prompt is None or not self._chat.is_continued_by(prompt):
                raise FailoverMismatch("the text has different token boundaries")
            self._chat.continue_from(self._chat.said_tokens)
        return super()._rewritten(chunk)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return a choice as sent to the client. None for a choice with only the role, or only tokens."""
        ids = choice.pop("token_ids", None) or ()
        delta = choice.get("delta") or {}
        delta.pop("role", None)
        text, called = delta.get("content") or "", delta.get("tool_calls") or delta.get("reasoning")
        self._tokens += len(ids)
        if called:
            self._chat.note_call()
        self._chat.note(ids, text, text)
        finish = choice.get("finish_reason")
        if not (text or called or finish):
            return None
        self._chat.finished = self._chat.finished or bool(finish)
        return choice | {"delta": delta} | ({"token_ids": None} if self._chat.has_null_ids else {})
