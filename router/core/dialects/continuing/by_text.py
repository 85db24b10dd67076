"""Chats that are continued by their text: the same chat again, with what was said as its last message, left open.

Tools that may be called are one reason: only the engine's parser takes a call out of the text, so the next request must
be a chat as well. The other is an engine that tells no ids. The request says `continue_final_message` and no
`add_generation_prompt`, without which the turn would be closed and another answer begun (vLLM 0.32 and SGLang 0.5.23).

The text may be cut into other tokens than those that were said, and a template may trim it. Where ids are told, that is
found out: the next replica tells the ids of its prompt, and only if they are those of the first prompt and of what was
said is the continuation exact. Otherwise it is approximate, or refused. A stream that has said nothing yet is asked
for again as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from router.core.dialects.continuing.carried import CarriedStream, StreamDiffers
from router.core.dialects.continuing.plan import ContinuationPlan
from router.core.dialects.continuing.resumed import ResumedStream
from router.core.dialects.tenancy import CHAT

_decode_ids = msgspec.json.Decoder(list[int]).decode


class CarriedChat(CarriedStream):
    """A chat that is continued as a chat. `body` gives its request's body once more."""

    next_path = CHAT

    def __init__(self, plan: ContinuationPlan, body: Callable[[], bytes]) -> None:
        super().__init__(plan)
        self.approximate = not plan.asks_ids
        self._body = body
        self._text: list[str] = []

    def note(self, ids: Sequence[int], text: str, shown: str) -> None:
        """Note tokens, the text that came with them, and that part of it which the client did not have."""
        if shown:
            self._text.append(shown)
        super().note(ids, text, shown)

    def go_on_from(self, tokens: int) -> None:
        """Another replica goes on behind so many tokens of the answer, which make all that was said."""
        self._behind = ""
        super().go_on_from(tokens)

    def calls(self) -> None:
        """The answer calls a tool, or reasons: only the engine's parser can go on with that."""
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
        return "spent" if most is not None and most <= self._said() else ""

    def _said(self) -> int:
        """Tokens that count as said, from which the limits of the next request are reckoned: those of the text, as far
        as that is known. Without ids one for each piece of text."""
        if not self._ids or not self._points:
            return len(self._text)
        return len(self._ids) if self._behind else self._points[0][0]

    def _request(self) -> bytes:
        self.said_tokens = self._said()
        return self.plan.next_chat(self._body(), "".join(self._text), self.said_tokens)

    def meets(self, prompt: list[int]) -> bool:
        """Whether a prompt of these ids is the first prompt with the tokens that count as said. Their text is then all
        that was said, and the limits are those of the whole."""
        if self._behind and self.plan.held_chars:
            return False  # the tokens made more text, which is held back
        return prompt == [*_decode_ids(self._prompt or b"[]"), *self._ids[: self.said_tokens]]


class ResumedChat(ResumedStream):
    """Rewrites the events of a chat that goes on."""

    def __init__(self, carried: CarriedChat) -> None:
        super().__init__(carried)
        self._chat = carried
        self._expected = ""  # nothing is said again

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        prompt = chunk.pop("prompt_token_ids", None)
        if not self._begun:
            self._begun = True
            exact = prompt is not None and self._chat.meets(prompt)
            self._tokens = self._chat.said_tokens
            self._chat.go_on_from(self._tokens)
            self._chat.approximate = self._chat.approximate or not exact
            if not exact and not self._chat.plan.takes_approximate:
                raise StreamDiffers("the text is cut into other tokens")
        return super()._rewritten(chunk)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """A choice as the client is to get it; None for one that only tells the role, or only tokens."""
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
