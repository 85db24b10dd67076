"""Events of the next replica, a completion's, rewritten as if the first replica had continued to send its own.

All events carry the names of the first one. Text that was sent already is compared and left out. Token counts are those
of the whole answer: the prompt is the client's, and tokens sent before count as completion tokens. The number of cached
tokens is that of the replica that continues, and at most the length of the client's prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.core.dialects import sse
from router.core.dialects.failover.recorder import (
    ABORT,
    GIVEN_UP_BYTES_MAX,
    FailoverMismatch,
    StreamRecorder,
    data_event,
)
from router.core.dialects.tenant_isolation import CHAT
from router.core.prompts.json_fields import UNREADABLE

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_OWN = ("id", "object", "created", "model", "choices", "usage", "prompt_token_ids")


class StreamStitcher:
    """Rewrites the events of the replica that continues. Feed it whole events."""

    def __init__(self, recorder: StreamRecorder) -> None:
        """`recorder` has made the request that the replica got."""
        self._recorder = recorder
        self._names = recorder.names
        self._expected = recorder.replayed_text
        self._begun = False
        self._tokens = recorder.said_tokens
        self.broken = False  # the engine reported a failure, or an end of the stream before its finish reason
        self.given_up = b""  # as in StreamRecorder

    def take(self, event: bytes) -> bytes:
        """Return the event as sent to the client, b"" if it is not sent. Raises FailoverMismatch."""
        if self.broken:
            if self.given_up and len(self.given_up) < GIVEN_UP_BYTES_MAX:
                self.given_up += self._rewrite_after_abort(event)
            return b""
        data = sse.payload(event)
        if data == b"[DONE]":
            recorder = self._recorder
            self.broken, recorder.done = not recorder.finished, recorder.finished
            return b"" if self.broken else event
        if not data.startswith(b"{"):
            return event
        try:
            chunk = _decode(data)
            if "error" not in chunk and any(choice.get("finish_reason") == ABORT for choice in chunk["choices"]):
                self.given_up = self._rewritten(chunk)
            if "error" in chunk or self.given_up:
                self.broken = True
                return b""
            return self._rewritten(chunk)
        except (*UNREADABLE, TypeError, KeyError, AttributeError) as error:
            raise FailoverMismatch("an invalid event") from error

    def _rewrite_after_abort(self, event: bytes) -> bytes:
        data = sse.payload(event)
        try:
            return self._rewritten(_decode(data)) if data.startswith(b"{") else event
        except (*UNREADABLE, TypeError, KeyError, AttributeError, FailoverMismatch):
            return b""

    def _rewritten(self, chunk: dict[str, Any]) -> bytes:
        said = [made for each in chunk["choices"] if (made := self._choice(each)) is not None]
        if chunk["choices"] and not said:
            return b""
        made = self._names | {"choices": said}
        if chunk.get("usage"):
            made["usage"] = self._usage(chunk["usage"])
            self._recorder.has_usage = self._recorder.has_usage or not said
        return data_event(made | {name: value for name, value in chunk.items() if name not in _OWN})

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return a choice as the first replica would have sent it. None if the client already has it. Raises
        FailoverMismatch."""
        recorder, ids = self._recorder, choice.pop("token_ids", None) or ()
        prompt = choice.pop("prompt_token_ids", None)
        if not self._begun:
            self._begun = True
            if prompt is not None and len(prompt) != recorder.prompt_tokens + recorder.said_tokens:
                raise FailoverMismatch("another prompt")
            recorder.continue_from(recorder.said_tokens)
        self._tokens += len(ids)
        text, finish = choice.pop("text", None) or "", choice.get("finish_reason")
        again = self._expected[: len(text)]
        if not text.startswith(again) or (finish and len(again) < len(self._expected)):
            raise FailoverMismatch("the repeated part of the answer differs")
        self._expected = self._expected[len(again) :]
        made_text, text = text, text[len(again) :]
        recorder.note(ids, made_text, text)
        if again and not text and not finish:
            return None
        recorder.finished = recorder.finished or bool(finish)
        if recorder.plan.path == CHAT:
            made = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
            if finish and "stop_reason" in choice:
                made["stop_reason"] = choice["stop_reason"]
            return made | ({"token_ids": None} if recorder.has_null_ids else {})
        made = {"index": 0, "text": text, "logprobs": None} | choice
        made |= {"index": 0, "text": text}
        return made | ({"prompt_token_ids": None, "token_ids": None} if recorder.has_null_ids else {})

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt = self._recorder.prompt_tokens
        made = usage | {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self._tokens,
            "completion_tokens": self._tokens,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            made["prompt_tokens_details"] = details | {"cached_tokens": min(details["cached_tokens"], prompt)}
        return made
