"""Prefill-only requests: the same prompt, sent to fill an engine's cache, with a minimal answer.

All content that a chat template sees is unchanged, byte by byte. Fields for the length and the form of the answer are
replaced: one token, no stream, no more than one choice. (The Responses API takes no fewer than 16 tokens at OpenAI, and
engines copy its checks.) Fields that request other work are left out, since log probabilities of a prompt are computed
without the cache. Fields that name state of the original request are left out too. Fields as in vLLM 0.32
(entrypoints/openai/*/protocol.py, anthropic/protocol.py) and SGLang 0.5.23 (srt/entrypoints/openai/protocol.py,
srt/managers/io_struct.py).
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from router.core.prompts.json_fields import UNREADABLE

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)
RESPONSE_TOKENS = 16

_LEFT_OUT = (
    "stream_options", "min_tokens", "n", "best_of", "use_beam_search", "echo", "logprobs", "top_logprobs",
    "prompt_logprobs", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_hidden_states", "background",
    "request_id", "rid", "session_params", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip
_LIMITS = ("max_tokens", "max_completion_tokens")
_ONE, _FALSE = Raw(b"1"), Raw(b"false")

Fields = dict[str, Raw]  # the fields of a body: their values in their original JSON


class _Said(msgspec.Struct):
    role: str = ""


_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_said = msgspec.json.Decoder(_Said).decode


class NotWarmable(ValueError):
    """The request has no prompt with which an engine can be warmed. The message is for humans."""


def fields_of(body: bytes | Raw) -> Fields:
    """Return the fields of a body. Raises NotWarmable if it is not a JSON object."""
    try:
        return _decode_fields(body)
    except UNREADABLE as error:
        raise NotWarmable("the body must be a JSON object") from error


def prefill_only(path: str, fields: Fields) -> bytes:
    """Return the body to be sent. Raises NotWarmable."""
    if path not in PATHS:
        raise NotWarmable(f"the path must be one of {', '.join(PATHS)}")
    made = {name: value for name, value in fields.items() if name not in _LEFT_OUT and name not in _LIMITS}
    made["stream"] = _FALSE
    if path == RESPONSES:
        made |= {"max_output_tokens": Raw(b"%d" % RESPONSE_TOKENS), "store": _FALSE}
    elif path == GENERATE:
        made["sampling_params"] = _one_token(fields.get("sampling_params"))
    else:  # the field has the name that the client used
        made[_LIMITS[1] if _LIMITS[1] in fields and path == CHAT else _LIMITS[0]] = _ONE
    return msgspec.json.encode(made)


def shorter(path: str, fields: Fields, messages_min: int) -> list[Fields]:
    """Return the same request cut after one of the user's messages, shortest first, with at least `messages_min`
    messages. The whole request is not in the list. Empty for a request that has no messages or cannot be read."""
    if path not in (CHAT, MESSAGES) or "messages" not in fields:
        return []
    try:
        messages = _decode_items(fields["messages"])
        ends = [n for n in range(max(1, messages_min), len(messages)) if _decode_said(messages[n - 1]).role == "user"]
    except UNREADABLE:
        return []
    return [fields | {"messages": Raw(msgspec.json.encode(messages[:end]))} for end in ends]


def _one_token(given: Raw | None) -> Raw:
    try:
        sampling = _decode_fields(given) if given is not None and given != b"null" else {}
    except UNREADABLE as error:
        raise NotWarmable("'sampling_params' must be a JSON object") from error
    kept = {name: value for name, value in sampling.items() if name not in ("min_new_tokens", "n")}
    return Raw(msgspec.json.encode(kept | {"max_new_tokens": _ONE}))
