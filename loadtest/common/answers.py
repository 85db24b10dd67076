"""Answers of fake engines, and patterns that such engines look for in headers and bodies.

Events, pages and whole responses have the shapes of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

CREATED = 1_770_000_000
ID = "chatcmpl-7f3c9a52d1e84b06a1c4e95f20b7d863"
CONTEXT_TOKENS = 4_000_000
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
ASKS_STREAM = re.compile(rb'"stream":\s*true')
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def data_event(fields: dict[str, Any]) -> bytes:
    """Return a server-sent event without a name, as in OpenAI's chat completions."""
    return b"data: " + _json(fields) + b"\n\n"


def named_event(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - JSON of any kind
    """Return a server-sent event of the Messages and Responses APIs: named, with the name as `type` in its data."""
    return f"event: {kind}\n".encode() + data_event({"type": kind, **fields})


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def completion(kind: str, model: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a completion, or one event of it; `kind` is the field `object`."""
    return {"id": ID, "object": kind, "created": CREATED, "model": model, "choices": choices, **more}


def choice(said: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """Return the only choice of a completion; `said` has its message, delta or text."""
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the field `usage` of a completion."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def models(
    *names: str, owned_by: str = "vllm", created: int = CREATED, context_tokens: int = CONTEXT_TOKENS
) -> dict[str, Any]:
    """Return the page `/v1/models`."""
    kind = {"object": "model", "created": created, "owned_by": owned_by}
    cards = [{"id": name, **kind, "root": name, "parent": None, "max_model_len": context_tokens} for name in names]
    return {"object": "list", "data": cards}


def metrics(
    model: str, running: int = 0, waiting: int = 0, prompt_tokens: int = 0, generation_tokens: int = 0
) -> bytes:
    """Return the page `/metrics`, with only the metrics that routers read."""
    labels = f'{{engine="0",model_name="{model}"}}'
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
vllm:cache_config_info{{{cache},prefix_caching_hash_algo="sha256"}} 1.0
""".encode()


def chunk(data: bytes) -> bytes:
    """Return one HTTP chunk (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: str, body: bytes = b"", kind: str = "application/json", headers: str = "") -> bytes:
    """Return a whole response; `headers` are lines, each with its CR LF."""
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {len(body)}\r\ncontent-type: {kind}\r\n{headers}"
    return head.encode() + b"\r\n" + body


NOT_FOUND = plain("404 Not Found", b'{"detail":"Not Found"}')
METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
