"""What of a request's body decides whose cache it uses: salts, adapters, and what engines keep by a name.

An isolated tenant's prompts are salted: the salt is an HMAC of the tenant's name under a secret of the router's, so
nobody makes another's, and the caller's own salt goes into it, so it refines and never replaces. Engines hash it into
the first block (vLLM) or keep a tree of their own for it (SGLang), and the router's own keys begin with it.

It is spliced in before the closing brace, behind whatever the body says under the same name: of two equal keys the
JSON parsers of vLLM and SGLang take the last (as for `with_usage`). Other fields by which cached blocks are reached
past the salt are spliced as null, which is what they are where nobody gives them.

Read in vLLM 0.32 (`cache_salt` in entrypoints/openai/*/protocol.py, anthropic/protocol.py, pooling/base/protocol.py)
and SGLang 0.5.23 (`cache_salt` in srt/entrypoints/openai/protocol.py and srt/managers/io_struct.py; its embeddings and
Messages have no such field). Any other engine may ignore the field, and would share the cache without a word.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Raw

from router.core.prompts.bodies import ABSENT, UNREADABLE, given

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, RESPONSES, GENERATE = "/v1/messages", "/v1/responses", "/generate"

# Paths on which each kind of engine heeds `cache_salt`; kinds as /v1/models says.
SALTED: dict[str, frozenset[str]] = {
    "vllm": frozenset((CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES)),
    "sglang": frozenset((CHAT, COMPLETIONS, RESPONSES, GENERATE)),
}
# `extra_key` is SGLang's second salt (it went into ours); a session of SGLang's continues what somebody said, and
# transfer parameters name blocks to be fetched from elsewhere.
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_NULLED: dict[str, tuple[str, ...]] = {
    CHAT: ("extra_key", "session_params", *_TRANSFERS),
    COMPLETIONS: ("extra_key", "session_params", *_TRANSFERS),
    RESPONSES: ("extra_key", *_TRANSFERS),
    MESSAGES: ("kv_transfer_params",),
    GENERATE: ("extra_key", "session_params"),
}
_NULLS = {path: "".join(f',"{name}":null' for name in names).encode() for path, names in _NULLED.items()}
_LENGTH = struct.Struct(">I")


class _Adapter(msgspec.Struct):
    lora_path: Raw = ABSENT


_decode_adapter = msgspec.json.Decoder(_Adapter).decode


def isolates(path: str, engines: Iterable[str]) -> bool:
    """Whether every one of these kinds of engine heeds a salt on this path; False for none."""
    kinds = list(engines)
    return bool(kinds) and all(path in SALTED.get(kind, ()) for kind in kinds)


def tenant_salt(secret: bytes, tenant: str, own: bytes) -> bytes:
    """64 hexadecimal digits for a tenant's prompts; `own` is what the caller gave to keep its caches apart."""
    name = tenant.encode()
    said = b"".join((_LENGTH.pack(len(name)), name, _LENGTH.pack(len(own)), own))
    return hmac.new(secret, said, sha256).hexdigest().encode()


def with_salt(path: str, body: bytes, salt: bytes) -> bytes:
    """The same request with this salt, which needs no escapes in JSON. `body` is a JSON object."""
    return _spliced(body, b'"cache_salt":"%b"%b' % (salt, _NULLS.get(path, b"")))


def with_request_id(body: bytes, id_: str) -> bytes:
    """The same request under this id, where it may name one: engines store a response under it, and who names
    another's id would have it stored over that."""
    if b"request_id" not in body and b"\\u" not in body:
        return body
    return _spliced(body, b'"request_id":"%b"' % id_.encode())


def adapters(body: bytes) -> list[str]:
    """LoRA adapters that a body names besides its model, as SGLang takes them on every path. One that is no string
    is told as ""."""
    if b"lora_path" not in body and b"\\u" not in body:
        return []
    try:
        raw = _decode_adapter(body).lora_path
        if not given(raw):
            return []
        named = msgspec.json.decode(raw)
    except UNREADABLE:
        return [""]
    listed = named if isinstance(named, list) else [named]
    return [each if isinstance(each, str) else "" for each in listed if each is not None]


def _spliced(body: bytes, fields: bytes) -> bytes:
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b"".join((body[:end], comma, fields, body[end:]))
