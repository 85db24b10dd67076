"""Responses of the fault upstream without a fault: four APIs, in the format of vLLM 0.32.

A stream is kept in parts, so that a fault can omit the right one. The parts are events before the tokens, a token,
events with the finish reason, and events after them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from loadtest.common.answers import (
    CREATED,
    DONE,
    choice,
    completion,
    data_event,
    models,
    named_event,
    plain,
    usage,
)

MODEL = "fault-model"
PROMPT_TOKENS, ANSWER_TOKENS = 64, 8


@dataclass(frozen=True, slots=True)
class Api:
    """One API: its path, and the format of its streams and responses."""

    name: str
    path: str
    before: tuple[bytes, ...]
    """Events before the first token."""
    token: str
    """An event with one token, as a template: `%TEXT%`."""
    finish: tuple[bytes, ...]
    """Events with the finish reason; without them a stream is incomplete."""
    done: tuple[bytes, ...]
    """Events after the finish reason."""
    whole: dict[str, Any]
    """A response that does not stream."""

    def tokens(self, n: int) -> list[bytes]:
        """Return the events of `n` tokens."""
        return [self.token.replace("%TEXT%", f" w{i}").encode() for i in range(n)]

    def stream(self, n: int) -> list[bytes]:
        """Return all events of a healthy stream."""
        return [*self.before, *self.tokens(n), *self.finish, *self.done]

    def request(self, prompt: str, *, stream: bool, tokens: int = 8) -> dict[str, Any]:
        """Return the body of a request."""
        common: dict[str, Any] = {"model": MODEL, "stream": stream}
        match self.name:
            case "completions":
                return {**common, "prompt": prompt, "max_tokens": tokens}
            case "responses":
                return {**common, "input": prompt, "max_output_tokens": tokens}
            case _:
                return {**common, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}


def _openai(name: str, path: str, kind: str, text: dict[str, Any], first: dict[str, Any], whole: dict[str, Any]) -> Api:
    def event(delta: dict[str, Any], finish: str | None) -> bytes:
        return data_event(completion(kind, MODEL, [choice(delta, finish)]))

    said = [choice(whole, "stop")]
    answer = completion(kind.removesuffix(".chunk"), MODEL, said, usage=usage(PROMPT_TOKENS, ANSWER_TOKENS))
    before = (event(first, None),) if first else ()
    return Api(name, path, before, event(text, None).decode(), (event(first or {"text": ""}, "stop"),), (DONE,), answer)


_BEGUN = {"id": "resp_1", "object": "response", "created_at": CREATED, "model": MODEL, "status": "in_progress"}
_PART = {"type": "output_text", "text": "", "annotations": []}
_ITEM: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
_ITEM["content"] = [{**_PART, "text": "words"}]
_RESPONSE = {
    **_BEGUN,
    "status": "completed",
    "output": [_ITEM],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": ANSWER_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
    },
}
_EMPTY_ITEM = {**_ITEM, "content": []}
_WHERE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_DELTA = {**_WHERE, "delta": "%TEXT%", "logprobs": []}
_MESSAGE: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL}
_MESSAGE |= {"content": [{"type": "text", "text": "words"}], "stop_reason": "end_turn", "stop_sequence": None}
_MESSAGE["usage"] = {"input_tokens": PROMPT_TOKENS, "output_tokens": ANSWER_TOKENS}

APIS = {
    api.name: api
    for api in (
        _openai(
            "chat",
            "/v1/chat/completions",
            "chat.completion.chunk",
            {"delta": {"content": "%TEXT%"}},
            {"delta": {"role": "assistant", "content": ""}},
            {"message": {"role": "assistant", "content": "words"}},
        ),
        _openai("completions", "/v1/completions", "text_completion", {"text": "%TEXT%"}, {}, {"text": "words"}),
        Api(
            "responses",
            "/v1/responses",
            (
                named_event("response.created", sequence_number=0, response=_BEGUN),
                named_event("response.output_item.added", sequence_number=1, output_index=0, item=_EMPTY_ITEM),
                named_event("response.content_part.added", sequence_number=2, **_WHERE, part=_PART),
            ),
            named_event("response.output_text.delta", sequence_number=3, **_DELTA).decode(),
            (named_event("response.completed", sequence_number=9, response=_RESPONSE),),
            (),
            _RESPONSE,
        ),
        Api(
            "messages",
            "/v1/messages",
            (
                named_event("message_start", message={**_MESSAGE, "content": [], "stop_reason": None}),
                named_event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            ),
            named_event("content_block_delta", index=0, delta={"type": "text_delta", "text": "%TEXT%"}).decode(),
            (
                named_event("content_block_stop", index=0),
                named_event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": ANSWER_TOKENS}),
            ),
            (named_event("message_stop"),),
            _MESSAGE,
        ),
    )
}
BY_PATH = {api.path.encode(): api for api in APIS.values()}


def page_of_models(model: str) -> bytes:
    """Return the response to /v1/models of a replica with this model."""
    return plain("200 OK", json.dumps(models(model)).encode())
