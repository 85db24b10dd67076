"""Fields of a request's body that decide which cache it uses: salts, adapters, and names of state in engines.

An isolated tenant's prompts are salted. The salt is an HMAC of the tenant's name under a secret of the router's, so no
tenant can make another's salt. The caller's own salt is part of the input, so it refines the salt and never replaces
it. Engines hash it into the first block (vLLM) or keep a separate tree for it (SGLang), and the router's own keys begin
with it.

It is spliced in before the closing brace, after any field of the same name: of two equal keys the JSON parsers of vLLM
and SGLang take the last (as for `with_usage`). Other fields by which cached blocks are reached past the salt are
spliced as null, which is their value if they are absent.

For every tenant, isolated or not, fields that name state shared by all tenants of an engine are removed. These are ids
under which an engine keeps a request, sessions of SGLang's, ranks of a server, and parameters of transfers. With such
parameters an engine with a connector would connect to a host of the client's choice. A form with such fields is
refused.

Read in vLLM 0.32 (`cache_salt` in entrypoints/openai/*/protocol.py, anthropic/protocol.py, pooling/base/protocol.py)
and SGLang 0.5.23 (`cache_salt` in srt/entrypoints/openai/protocol.py and srt/managers/io_struct.py; its embeddings and
Messages have no such field). Any other engine may ignore the field, and would share the cache silently.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Raw

from router.core.prompts import sliced_json
from router.core.prompts.json_fields import ABSENT, UNREADABLE, InvalidBody, has_value

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, RESPONSES, GENERATE = "/v1/messages", "/v1/responses", "/generate"

# Paths on which each kind of engine supports `cache_salt`; kinds as in /v1/models.
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
# Each rank of a server has a separate cache, and is chosen by the router.
_RANKS = ("routed_dp_rank", "data_parallel_rank")
_SHARED = (*_TRANSFERRED, *_RANKS, "session_params")
_ARGUMENTS = "vllm_xargs"  # vLLM puts its entries next to `kv_transfer_params`, under any name
_SAMPLING, _EXTRA = "sampling_params", "extra_args"  # /inference/v1/generate of vLLM: the same, within these
# `extra_key` is SGLang's second salt (it is part of the router's salt). A session of SGLang's continues an earlier
# request of any tenant, and transfer parameters name blocks to be fetched from another engine.
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
    """Fields of a body that name state shared by tenants in an engine. All other fields are skipped."""

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
"""Names of the fields for which a tenant's form is checked."""
_decode_named = msgspec.json.Decoder(Named).decode
_NOTHING = Named()
_decode_arguments = msgspec.json.Decoder(dict[str, Raw]).decode


def can_isolate(path: str, engines: Iterable[str]) -> bool:
    """True if every one of these kinds of engine supports a salt on this path. False for an empty set."""
    kinds = list(engines)
    return bool(kinds) and all(path in SALTED.get(kind, ()) for kind in kinds)


def tenant_salt(secret: bytes, tenant: str, own: bytes) -> bytes:
    """Return 64 hexadecimal digits for a tenant's prompts. `own` is the caller's own salt."""
    name = tenant.encode()
    said = b"".join((_LENGTH.pack(len(name)), name, _LENGTH.pack(len(own)), own))
    return hmac.new(secret, said, sha256).hexdigest().encode()


def with_salt(path: str, body: bytes, salt: bytes) -> bytes:
    """Return the same request with this salt, which needs no escapes in JSON. `body` is a JSON object."""
    return with_fields(body, b'"cache_salt":"%b"%b' % (salt, _NULLS.get(path, b"")))


def read_isolation_fields(body: bytes) -> Named:
    """Return these fields of a JSON object. An empty body has no such field. A body that cannot be read has all of
    them, with an invalid value."""
    if not body:
        return _NOTHING
    try:
        return sliced_json.read(_decode_named, body)
    except UNREADABLE:
        return Named(*[Raw(b'"') for _ in Named.__struct_fields__])


def strip_shared_fields(body: bytes, found: Named, id_: str) -> bytes:
    """Return the same request without transfers and sessions. An id under which an engine would keep it is replaced by
    `id_`. `found` are the fields of the body. A body without any of them is unchanged."""
    fields = [f'"{name}":"{id_}"' for name in ("request_id", "rid") if has_value(getattr(found, name))]
    return _replace_fields(body, found, _SHARED, fields)


def strip_transfers(body: bytes) -> bytes:
    """Return the same request without transfers: if the router splits requests, only its own transfer fields may count.
    A body that has no transfers, or cannot be read, is unchanged."""
    if not body:
        return body
    try:
        return _replace_fields(body, sliced_json.read(_decode_named, body), _TRANSFERRED, [])
    except UNREADABLE:
        return body


def _replace_fields(body: bytes, found: Named, names: Iterable[str], fields: list[str]) -> bytes:
    """Return the same request with these fields after its own, and without those of these names that it has."""
    fields += [f'"{name}":null' for name in names if has_value(getattr(found, name))]
    if has_value(found.vllm_xargs) and (arguments := _arguments(found.vllm_xargs)) is not None:
        fields.append(f'"{_ARGUMENTS}":{arguments}')
    if has_value(found.sampling_params) and (sampling := _strip_sampling(found.sampling_params)) is not None:
        fields.append(f'"{_SAMPLING}":{sampling}')
    return with_fields(body, ",".join(fields).encode()) if fields else body


def _strip_sampling(raw: Raw) -> str | None:
    """Return vLLM's sampling parameters without transfers, as JSON. None if they have no transfers; a list (SGLang) has
    none either."""
    if bytes(raw).startswith(b"["):
        return None
    try:
        told = sliced_json.read(_decode_arguments, raw)
        if not has_value(extra := told.get(_EXTRA, ABSENT)) or (kept := _arguments(extra)) is None:
            return None
        return msgspec.json.encode(told | {_EXTRA: Raw(kept.encode())}).decode()
    except UNREADABLE:
        return "null"


def _arguments(raw: Raw) -> str | None:
    """Return vLLM's further arguments without transfers, as JSON. None if they have no transfers."""
    try:
        told = sliced_json.read(_decode_arguments, raw)
        kept = {name: value for name, value in told.items() if name not in _SHARED}
        return None if len(kept) == len(told) else msgspec.json.encode(kept).decode()
    except UNREADABLE:
        return "null"


def check_form(fields: Iterable[tuple[str, bytes]]) -> None:
    """Raise InvalidBody if a form has fields of this kind, which cannot be removed from it. `fields` are those of the
    form that `FORM_FIELDS` names. vLLM reads its further arguments in a form as JSON."""
    for name, value in fields:
        if name != _ARGUMENTS or (value and _arguments(Raw(value)) is not None):
            raise InvalidBody(
                "invalid_form",
                f"The form must not set the field '{name}', which concerns data shared by tenants or engines.",
            )


def adapters(found: Named) -> list[str]:
    """Return the LoRA adapters that a body names apart from its model, as SGLang takes them on every path. An adapter
    that is not a string is returned as ""."""
    if not has_value(found.lora_path):
        return []
    try:
        told = sliced_json.value(found.lora_path)
    except UNREADABLE:
        return [""]
    listed = told if isinstance(told, list) else [told]
    return [each if isinstance(each, str) else "" for each in listed if each is not None]


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Return the same JSON object with these fields after its own."""
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip().endswith(b"{") else b","
    return b"".join((body[:end], comma, fields, body[end:]))
