"""What of a request's body decides whose cache it uses: salts, adapters, and what engines keep by a name.

An isolated tenant's prompts are salted: the salt is an HMAC of the tenant's name under a secret of the router's, so
nobody makes another's, and the caller's own salt goes into it, so it refines and never replaces. Engines hash it into
the first block (vLLM) or keep a tree of their own for it (SGLang), and the router's own keys begin with it.

It is spliced in before the closing brace, behind whatever the body says under the same name: of two equal keys the
JSON parsers of vLLM and SGLang take the last (as for `with_usage`). Other fields by which cached blocks are reached
past the salt are spliced as null, which is what they are where nobody gives them.

Of every tenant, isolated or not, that which names what all tenants share in an engine is taken out likewise: ids under
which an engine keeps a request, sessions of SGLang's, ranks of a server, and parameters of transfers, for which an
engine with a connector would connect to a host of the client's choice. A form with such fields is refused.

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

from router.core.prompts import slices
from router.core.prompts.bodies import ABSENT, UNREADABLE, BadBody, given

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, RESPONSES, GENERATE = "/v1/messages", "/v1/responses", "/generate"

# Paths on which each kind of engine heeds `cache_salt`; kinds as /v1/models says.
SALTED: dict[str, frozenset[str]] = {
    "vllm": frozenset((CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES)),
    "sglang": frozenset((CHAT, COMPLETIONS, RESPONSES, GENERATE)),
}
# Fields of transfers: vLLM's connectors; SGLang's prefill and decode on different servers.
_TRANSFERRED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
)
# Ranks of a server are caches of their own, and are chosen by the router.
_RANKS = ("routed_dp_rank", "data_parallel_rank")
_SHARED = (*_TRANSFERRED, *_RANKS, "session_params")
_ARGUMENTS = "vllm_xargs"  # vLLM puts what it has next to `kv_transfer_params`, under any name
_SAMPLING, _EXTRA = "sampling_params", "extra_args"  # /inference/v1/generate of vLLM: the same, within these
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


class Named(msgspec.Struct):
    """Fields of a body that name what tenants share in an engine; all but these are passed over."""

    lora_path: Raw = ABSENT
    request_id: Raw = ABSENT
    rid: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    ec_transfer_params: Raw = ABSENT
    bootstrap_host: Raw = ABSENT
    bootstrap_port: Raw = ABSENT
    bootstrap_room: Raw = ABSENT
    bootstrap_pair_key: Raw = ABSENT
    decode_tp_size: Raw = ABSENT
    disagg_prefill_dp_rank: Raw = ABSENT
    session_params: Raw = ABSENT
    routed_dp_rank: Raw = ABSENT
    data_parallel_rank: Raw = ABSENT
    vllm_xargs: Raw = ABSENT
    sampling_params: Raw = ABSENT


FORM_FIELDS = frozenset(Named.__struct_fields__)
"""Fields that a form of a tenant's is looked through for."""
_decode_named = msgspec.json.Decoder(Named).decode
_NOTHING = Named()
_decode_arguments = msgspec.json.Decoder(dict[str, Raw]).decode


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
    return spliced(body, b'"cache_salt":"%b"%b' % (salt, _NULLS.get(path, b"")))


def named(body: bytes) -> Named:
    """What a JSON object names of this; nothing of a body that is empty. What cannot be read names everything, with a
    value that is none."""
    if not body:
        return _NOTHING
    try:
        return slices.read(_decode_named, body)
    except UNREADABLE:
        return Named(*[Raw(b'"') for _ in Named.__struct_fields__])


def without_shared(body: bytes, found: Named, id_: str) -> bytes:
    """The same request under this id, where it names one, and without transfers and sessions. `found` is what the body
    names. A body that has none of it stays as it is."""
    fields = [f'"{name}":"{id_}"' for name in ("request_id", "rid") if given(getattr(found, name))]
    return _without(body, found, _SHARED, fields)


def without_transfers(body: bytes) -> bytes:
    """The same request without transfers, of which the router's word is the only one where it splits requests. A body
    that has none of them, or cannot be read, stays as it is."""
    if not body:
        return body
    try:
        return _without(body, slices.read(_decode_named, body), _TRANSFERRED, [])
    except UNREADABLE:
        return body


def _without(body: bytes, found: Named, names: Iterable[str], fields: list[str]) -> bytes:
    """The same request with these fields behind its own, and without those of these names that it has."""
    fields += [f'"{name}":null' for name in names if given(getattr(found, name))]
    if given(found.vllm_xargs) and (arguments := _arguments(found.vllm_xargs)) is not None:
        fields.append(f'"{_ARGUMENTS}":{arguments}')
    if given(found.sampling_params) and (sampling := _sampling(found.sampling_params)) is not None:
        fields.append(f'"{_SAMPLING}":{sampling}')
    return spliced(body, ",".join(fields).encode()) if fields else body


def _sampling(raw: Raw) -> str | None:
    """vLLM's sampling parameters without transfers, as JSON; None where they have none, as a list (SGLang) has not."""
    if bytes(raw).startswith(b"["):
        return None
    try:
        told = slices.read(_decode_arguments, raw)
        if not given(extra := told.get(_EXTRA, ABSENT)) or (kept := _arguments(extra)) is None:
            return None
        return msgspec.json.encode(told | {_EXTRA: Raw(kept.encode())}).decode()
    except UNREADABLE:
        return "null"


def _arguments(raw: Raw) -> str | None:
    """vLLM's further arguments without transfers, as JSON; None where they have none."""
    try:
        told = slices.read(_decode_arguments, raw)
        kept = {name: value for name, value in told.items() if name not in _SHARED}
        return None if len(kept) == len(told) else msgspec.json.encode(kept).decode()
    except UNREADABLE:
        return "null"


def check_form(fields: Iterable[tuple[str, bytes]]) -> None:
    """Raises BadBody if a form has fields of this kind, which cannot be taken out of it. `fields` are those of the form
    that `FORM_FIELDS` names. vLLM reads its further arguments in a form as JSON."""
    for name, value in fields:
        if name != _ARGUMENTS or (value and _arguments(Raw(value)) is not None):
            raise BadBody("invalid_form", f"The field '{name}' of a form may not name what tenants or engines share.")


def adapters(found: Named) -> list[str]:
    """LoRA adapters that a body names besides its model, as SGLang takes them on every path. One that is no string
    is told as ""."""
    if not given(found.lora_path):
        return []
    try:
        told = slices.value(found.lora_path)
    except UNREADABLE:
        return [""]
    listed = told if isinstance(told, list) else [told]
    return [each if isinstance(each, str) else "" for each in listed if each is not None]


def spliced(body: bytes, fields: bytes) -> bytes:
    """The same JSON object with these fields behind its own."""
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b"".join((body[:end], comma, fields, body[end:]))
