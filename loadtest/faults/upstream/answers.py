"""What the fault upstream says when nothing is wrong with it: answers of four APIs, as vLLM 0.32 gives them.

A stream is kept in parts, so that a fault can leave out the right one: what comes before the tokens, a token, the
events that say why it ended, and what comes behind them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MODEL = "fault-model"
CREATED = 1_770_000_000
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Api:
    """One API: where it is, and what a stream and an answer of it look like."""

    name: str
    path: str
    before: tuple[bytes, ...]
    """Events before the first token."""
    token: str
    """An event with one token, as a template: `%TEXT%`."""
    finish: tuple[bytes, ...]
    """Events that say why it ended; without them a stream is not whole."""
    done: tuple[bytes, ...]
    """What comes behind them."""
    whole: dict[str, Any]
    """An answer that does not stream."""

    def tokens(self, n: int) -> list[bytes]:
        """So many token events."""
        return [self.token.replace("%TEXT%", f" w{i}").encode() for i in range(n)]

    def stream(self, n: int) -> list[bytes]:
        """All events of a healthy stream."""
        return [*self.before, *self.tokens(n), *self.finish, *self.done]

    def request(self, prompt: str, *, stream: bool, tokens: int = 8) -> dict[str, Any]:
        """A request's body."""
        common: dict[str, Any] = {"model": MODEL, "stream": stream}
        match self.name:
            case "completions":
                return {**common, "prompt": prompt, "max_tokens": tokens}
            case "responses":
                return {**common, "input": prompt, "max_output_tokens": tokens}
            case _:
                return {**common, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}


def _data(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def _named(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON of any kind
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def _openai(name: str, path: str, kind: str, text: dict[str, Any], first: dict[str, Any], whole: dict[str, Any]) -> Api:
    head = {"id": "cmpl-1", "object": kind, "created": CREATED, "model": MODEL}

    def event(delta: dict[str, Any], finish: str | None) -> bytes:
        return _data({**head, "choices": [{"index": 0, **delta, "logprobs": None, "finish_reason": finish}]})

    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": PROMPT_TOKENS + 8}
    answer = {**head, "object": kind.removesuffix(".chunk"), "usage": usage}
    answer["choices"] = [{"index": 0, **whole, "logprobs": None, "finish_reason": "stop"}]
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
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": PROMPT_TOKENS + 8,
    },
}
_WHERE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_MESSAGE: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL}
_MESSAGE |= {"content": [{"type": "text", "text": "words"}], "stop_reason": "end_turn", "stop_sequence": None}
_MESSAGE["usage"] = {"input_tokens": PROMPT_TOKENS, "output_tokens": 8}

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
                _named("response.created", sequence_number=0, response=_BEGUN),
                _named("response.output_item.added", sequence_number=1, output_index=0, item={**_ITEM, "content": []}),
                _named("response.content_part.added", sequence_number=2, **_WHERE, part=_PART),
            ),
            _named("response.output_text.delta", sequence_number=3, **_WHERE, delta="%TEXT%", logprobs=[]).decode(),
            (_named("response.completed", sequence_number=9, response=_RESPONSE),),
            (),
            _RESPONSE,
        ),
        Api(
            "messages",
            "/v1/messages",
            (
                _named("message_start", message={**_MESSAGE, "content": [], "stop_reason": None}),
                _named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            ),
            _named("content_block_delta", index=0, delta={"type": "text_delta", "text": "%TEXT%"}).decode(),
            (
                _named("content_block_stop", index=0),
                _named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 8}),
            ),
            (_named("message_stop"),),
            _MESSAGE,
        ),
    )
}
BY_PATH = {api.path.encode(): api for api in APIS.values()}


def chunk(data: bytes) -> bytes:
    """One HTTP chunk (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: str, body: bytes = b"", kind: str = "application/json", headers: str = "") -> bytes:
    """A whole response; `headers` are lines, each with its CR LF."""
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n{headers}"
    return head.encode() + b"\r\n" + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
FLOOD_PIECE = chunk(b"".join(APIS["chat"].tokens(256)))
MODELS = json.dumps(
    {
        "object": "list",
        "data": [
            {
                "id": MODEL,
                "object": "model",
                "created": CREATED,
                "owned_by": "vllm",
                "root": MODEL,
                "parent": None,
                "max_model_len": 4_000_000,
            }
        ],
    }
).encode()


def metrics(running: int, waiting: int, prompt_tokens: int, generation_tokens: int) -> bytes:
    """vLLM's page, as much of it as routers look at."""
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    cache = 'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="65536"'
    return f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{labels} {waiting}.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{labels} 0.1
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{labels} {prompt_tokens}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{labels} {generation_tokens}.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{cache}}} 1.0
""".encode()
