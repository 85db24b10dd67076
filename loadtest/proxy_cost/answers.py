"""Responses of the cheap upstream of `python -m loadtest overhead`, as precomputed bytes.

A stream has events of about 240 bytes, each in its own chunk. Its last three events (finish, usage, [DONE]) follow each
other directly, as in vLLM 0.32.
"""

from __future__ import annotations

import json

from loadtest.common.answers import (
    DONE,
    LAST_CHUNK,
    METRICS_KIND,
    STREAM_HEAD,
    choice,
    chunk,
    completion,
    data_event,
    metrics,
    models,
    plain,
    usage,
)

MODEL = "overhead-model"
FLOOD_PIECE_EVENTS = 256
PROMPT_TOKENS = 128
_WORDS = "the quick brown fox jumps over a lazy dog and then goes home to sleep"
_CHUNK = "chat.completion.chunk"


def _event(
    delta: dict[str, str], finish: str | None = None, ids: list[int] | None = None, **more: list[int] | None
) -> bytes:
    return data_event(completion(_CHUNK, MODEL, [choice({"delta": delta}, finish) | {"token_ids": ids}], **more))


def _first(prompt: list[int] | None = None) -> bytes:
    return _event({"role": "assistant", "content": ""}, prompt_token_ids=prompt)


FIRST = _first()
TOKENS = tuple(_event({"content": f" {word}"}) for word in _WORDS.split(" "))
_USAGE = data_event(completion(_CHUNK, MODEL, [], usage=usage(PROMPT_TOKENS, 100)))
LAST = (_event({"content": ""}, "stop"), _USAGE, DONE)


def _answer(prompt_tokens: int) -> bytes:
    message = {"role": "assistant", "content": _WORDS, "tool_calls": []}
    said = completion("chat.completion", MODEL, [choice({"message": message}, "stop")], usage=usage(prompt_tokens, 15))
    return json.dumps(said).encode()


# Key: maximum size of a request body in bytes. Value: a response with the approximate usage, for any rewriting of the
# body by a router.
_ANSWERS = {size: _answer(tokens) for size, tokens in ((4 << 10, 128), (64 << 10, 4_096), (1 << 20, 50_000))}
_LONGEST = _answer(2_000_000)
_RESPONSES = {size: plain("200 OK", body) for size, body in _ANSWERS.items()}
_LONGEST_RESPONSE = plain("200 OK", _LONGEST)


def answer(body_bytes: int) -> bytes:
    """Return the response body for a request body of `body_bytes` bytes."""
    return next((found for size, found in _ANSWERS.items() if body_bytes <= size), _LONGEST)


def response(body_bytes: int) -> bytes:
    """Return the whole response to a request that does not stream."""
    return next((found for size, found in _RESPONSES.items() if body_bytes <= size), _LONGEST_RESPONSE)


def stream_body(tokens: int) -> bytes:
    """Return the whole body of a stream, as a client must receive it without the chunk framing."""
    return b"".join((FIRST, *(TOKENS[i % len(TOKENS)] for i in range(tokens)), *LAST))


# A stream for a request with `return_token_ids` starts with the token ids of the prompt; the ids of the words follow.
ID_START = STREAM_HEAD + chunk(_first(list(range(PROMPT_TOKENS))))
ID_CHUNKS = tuple(chunk(_event({"content": f" {word}"}, ids=[n])) for n, word in enumerate(_WORDS.split(" ")))
START = STREAM_HEAD + chunk(FIRST)
TOKEN_CHUNKS = tuple(chunk(event) for event in TOKENS)
END = b"".join(map(chunk, LAST)) + LAST_CHUNK
FLOOD_PIECE = b"".join(TOKEN_CHUNKS[i % len(TOKENS)] for i in range(FLOOD_PIECE_EVENTS))
PAGES = {
    b"/health": plain("200 OK", kind="text/plain"),
    b"/v1/models": plain("200 OK", json.dumps(models(MODEL)).encode()),
    b"/metrics": plain("200 OK", metrics(MODEL), METRICS_KIND),
}
ASKED = (b"/v1/chat/completions", b"/v1/completions")
# vllm-router 0.1.17 requests a prompt's token ids from one replica after another until one returns them. So the first
# replica returns a minimal list that distinguishes prompts, which is the cheapest for that router.
RENDERED = (b"/v1/chat/completions/render", b"/v1/completions/render", b"/tokenize")
