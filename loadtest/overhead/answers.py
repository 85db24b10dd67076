"""What the cheap upstream of `python -m loadtest overhead` says, as bytes that are made once.

The shapes were taken from vLLM 0.32's chat completions: header order, events of about 240 bytes, a chunk each, and the
last three events (finish, usage, [DONE]) behind each other.
"""

from __future__ import annotations

import json

MODEL = "overhead-model"
ID = "chatcmpl-7f3c9a52d1e84b06a1c4e95f20b7d863"
CREATED = 1_770_000_000
FLOOD_PIECE_EVENTS = 256
_WORDS = "the quick brown fox jumps over a lazy dog and then goes home to sleep"


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    return _data({"choices": [choice]})


def _data(fields: dict[str, object]) -> bytes:
    head = {"id": ID, "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}
    return b"data: " + json.dumps(head | fields, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST = _event({"role": "assistant", "content": ""})
TOKENS = tuple(_event({"content": f" {word}"}) for word in _WORDS.split(" "))
USAGE = {"prompt_tokens": 128, "total_tokens": 228, "completion_tokens": 100}
LAST = (_event({"content": ""}, "stop"), _data({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n")
LAST_CHUNK = b"0\r\n\r\n"


def _answer(prompt_tokens: int) -> bytes:
    message = {"role": "assistant", "content": _WORDS, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + 15, "completion_tokens": 15}
    head = {"id": ID, "object": "chat.completion", "created": CREATED, "model": MODEL}
    return json.dumps({**head, "choices": [choice], "usage": usage}).encode()


def plain(status: str, kind: str, body: bytes) -> bytes:
    """A whole response."""
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n\r\n"
    return head.encode() + body


# Bytes of a body at most -> what its answer reports of tokens is right to a factor, whatever a router made of the body.
_ANSWERS = {size: _answer(tokens) for size, tokens in ((4 << 10, 128), (64 << 10, 4_096), (1 << 20, 50_000))}
_LONGEST = _answer(2_000_000)
_RESPONSES = {size: plain("200 OK", "application/json", body) for size, body in _ANSWERS.items()}
_LONGEST_RESPONSE = plain("200 OK", "application/json", _LONGEST)


def answer(body_bytes: int) -> bytes:
    """The answer's body to a request's body of so many bytes."""
    return next((found for size, found in _ANSWERS.items() if body_bytes <= size), _LONGEST)


def response(body_bytes: int) -> bytes:
    """The whole response to a request that does not stream."""
    return next((found for size, found in _RESPONSES.items() if body_bytes <= size), _LONGEST_RESPONSE)


def stream_body(tokens: int) -> bytes:
    """The whole body of a stream, as a client must see it once its chunks are taken apart."""
    return b"".join((FIRST, *(TOKENS[i % len(TOKENS)] for i in range(tokens)), *LAST))


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
START = _STREAM_HEAD + chunk(FIRST)
TOKEN_CHUNKS = tuple(chunk(event) for event in TOKENS)
END = b"".join(map(chunk, LAST)) + LAST_CHUNK
FLOOD_PIECE = b"".join(TOKEN_CHUNKS[i % len(TOKENS)] for i in range(FLOOD_PIECE_EVENTS))
NOT_FOUND = plain("404 Not Found", "application/json", b'{"detail":"Not Found"}')
_CACHE = (
    'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="65536",'
    'prefix_caching_hash_algo="sha256"'
)
_METRICS = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{_CACHE}}} 1.0
"""
_MODELS = json.dumps(
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
PAGES = {
    b"/health": plain("200 OK", "text/plain", b""),
    b"/v1/models": plain("200 OK", "application/json", _MODELS),
    b"/metrics": plain("200 OK", "text/plain; version=0.0.4; charset=utf-8", _METRICS.encode()),
}
ASKED = (b"/v1/chat/completions", b"/v1/completions")
# vllm-router 0.1.17 asks each replica in turn for a prompt's token ids until one has them; so the first has some, the
# fewest that tell prompts apart, which costs it least.
RENDERED = (b"/v1/chat/completions/render", b"/v1/completions/render", b"/tokenize")
