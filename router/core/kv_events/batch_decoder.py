"""Decoder for one message of an engine's KV event stream.

vLLM and SGLang publish batches `[time, events, rank]` in msgpack. Both changed the format of an event, from positional
arrays (vLLM up to 0.23, older SGLang) to maps named by field (`vllm/distributed/kv_events.py` of 0.32,
`sglang/srt/disaggregation/kv_events.py` of 0.5.23). Both formats are accepted at any time and result in the same three
events. Unreadable events are skipped and counted, so one odd event does not affect others.

A batch is decoded to plain lists and maps in one step. Half of the time is spent on integers, with any schema, and a
schema would reject a whole batch for one bad field.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from router.core.types.tiers import REMOTE

BATCH_BYTES_MAX = 32 << 20  # a prompt of a million tokens, published once for each of four groups, is 22 MB
EVENTS_MAX = 1 << 18  # vLLM removes one block per event, at most a whole pool in a batch
BLOCKS_MAX = 1 << 20  # maximum number of blocks of one event
BLOCK_TOKENS_MAX = 1 << 16  # hybrid models have blocks of 2,000 tokens
NAME_CHARS_MAX = 4_096  # longest name of a medium, an adapter or a salt

_MASK = (1 << 64) - 1
_MIN_BYTES = 8  # shortest hash in bytes: sha256 has 32, xxh3-128 has 16
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED = ("block_hashes", "medium", "group_idx", "locality")
# Kinds of layer groups (vLLM 0.32 v1/kv_cache_interface.py, KVCacheSpecKind) with blocks that, from the first on, are
# all that a prefix needs.
_WHOLE_PREFIX = ("full_attention", "mla", "sink_full")


class MalformedBatch(ValueError):
    """The payload is not a batch of KV events."""


class Stored(msgspec.Struct, frozen=True):  # a frozen dataclass takes 1.2 µs to make, this 0.2
    """Event: the engine now has these blocks, each the child of the one before it."""

    hashes: list[int]  # the engine's hashes: opaque, unsigned 64 bit
    parent: int | None  # None: the first block is a root
    tokens: bytes  # uint32 little-endian ids of all blocks; b"" if the event has only hashes (tiers)
    block_tokens: int
    adapter: str  # "" is the base model
    salt: bytes  # salt of a root block; b"" for all other blocks
    extras: tuple[bytes | None, ...] | None  # per block, other inputs of its hash; None if no block has any
    medium: str  # in capitals; a store that several replicas share ends in REMOTE (types/tiers.py)
    group: int
    prefix: bool  # True if this layer group covers a whole prefix
    again: bool | None = False  # True if the event repeats blocks that were stored before; None if that is unknown


class Removed(msgspec.Struct, frozen=True):
    """Event: the engine removed one copy of each of these blocks."""

    hashes: list[int]
    medium: str
    group: int


class Cleared(msgspec.Struct, frozen=True):
    """Event: the engine dropped all blocks."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class EventBatch:
    """One decoded message. `at_s` is the engine's clock, `rank` its data-parallel rank, `skipped` the unreadable
    events."""

    at_s: float | None
    rank: int | None
    events: list[Event]
    skipped: int


def decode(payload: bytes) -> EventBatch:
    """Decode a batch. Raises MalformedBatch for any payload that is not one, and no other error."""
    if len(payload) > BATCH_BYTES_MAX:
        raise MalformedBatch(f"a batch of {len(payload)} bytes is over the limit of {BATCH_BYTES_MAX}")
    try:
        whole = msgspec.msgpack.decode(payload)
    except Exception as error:  # msgspec's own, RecursionError, UnicodeError, MemoryError: all mean the same
        raise MalformedBatch(f"not msgpack: {error}") from error
    if isinstance(whole, dict):
        rank = whole.get("data_parallel_rank", whole.get("attn_dp_rank"))
        whole = [whole.get("ts"), whole.get("events"), rank]
    if not isinstance(whole, list) or len(whole) < 2 or not isinstance(whole[1], list):
        raise MalformedBatch("neither [time, events, rank] nor a map of these")
    if len(whole[1]) > EVENTS_MAX:
        raise MalformedBatch(f"{len(whole[1])} events are over the limit of {EVENTS_MAX}")
    events, skipped = _events(whole[1])
    at_s, rank = whole[0], whole[2] if len(whole) > 2 else None
    return EventBatch(
        float(at_s) if type(at_s) in (float, int) and isfinite(at_s) else None,
        rank if type(rank) is int and rank >= 0 else None,
        events,
        skipped,
    )


def slices(event: Event, blocks_max: int) -> Iterator[Event]:
    """Split an event into events of at most `blocks_max` blocks (positive), so that none blocks the event loop for
    long."""
    if isinstance(event, Cleared) or len(event.hashes) <= blocks_max:
        yield event
        return
    for start in range(0, len(event.hashes), blocks_max):
        end = start + blocks_max
        hashes = event.hashes[start:end]
        if isinstance(event, Removed):
            yield Removed(hashes, event.medium, event.group)
            continue
        width = 4 * event.block_tokens
        yield Stored(
            hashes,
            event.hashes[start - 1] if start else event.parent,
            event.tokens[start * width : end * width],
            event.block_tokens,
            event.adapter,
            b"" if start else event.salt,
            event.extras[start:end] if event.extras else None,
            event.medium,
            event.group,
            event.prefix,
            event.again,
        )


def _events(listed: list[Any]) -> tuple[list[Event], int]:
    events: list[Event] = []
    skipped = 0
    for said in listed:
        try:
            event = _event(said)
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError, RecursionError):
            skipped += 1
        else:
            events.append(event)
    return events, skipped


def _event(said: dict[str, Any] | list[Any]) -> Event:
    """Decode one event. Raises any of the errors caught above if it is unreadable."""
    if isinstance(said, dict):
        tag, fields = said["type"], said
    else:
        tag = said[0]
        fields = _name_fields(said[1:]) if tag == "BlockStored" else dict(zip(_REMOVED, said[1:], strict=False))
    if tag == "AllBlocksCleared":
        return Cleared()
    if tag != "BlockStored" and tag != "BlockRemoved":
        raise ValueError("an event of unknown type")
    medium = fields.get("medium")
    if medium != "GPU":
        medium = "GPU" if medium is None else _name(medium).upper() or "GPU"  # vLLM's Mooncake store writes "cpu"
    if fields.get("locality") == "REMOTE":
        medium += REMOTE
    group = fields.get("group_idx") or 0
    if type(group) is not int or group < 0:
        raise ValueError("a group must be an integer of at least 0")
    hashes = _hashes(fields["block_hashes"])
    if tag == "BlockRemoved":
        return Removed(hashes, medium, group)
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not kind.startswith(_WHOLE_PREFIX):
        # Masked blocks of such a group have tokens but no hash (vLLM block_pool.cache_full_blocks); they are not used.
        return Stored(hashes, None, b"", 0, "", b"", None, medium, group, prefix=False)
    return _parse_stored(fields, hashes, medium, group)


def _name_fields(listed: list[Any]) -> dict[str, Any]:
    """Return the fields of a positional BlockStored under vLLM's names.

    After the medium, vLLM has an adapter's name and one list of extra keys for each block. SGLang has a map of metadata
    and, in an open pull request (32514), a list of the cached components (strings), at either position. A list of
    components is dropped.
    """
    fields = dict(zip(_STORED, listed, strict=False))
    if type(fields.get("lora_name")) not in (str, dict):
        fields["lora_name"] = None
    keys = fields.get("extra_keys")
    if type(keys) is list and any(type(each) is str for each in keys):
        fields["extra_keys"] = None
    return fields


def _parse_stored(fields: dict[str, Any], hashes: list[int], medium: str, group: int) -> Stored:
    parent = fields["parent_block_hash"]
    if parent is not None:
        parent = parent & _MASK if type(parent) is int else _hashes([parent])[0]
    tokens, block_tokens = _tokens(fields["token_ids"]), fields["block_size"]
    if type(block_tokens) is not int or not 0 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise ValueError("a block size must be a number of tokens")
    if tokens and (not block_tokens or len(tokens) != 4 * block_tokens * len(hashes)):
        raise ValueError("the number of tokens does not match the blocks")
    at_seven = fields.get("lora_name")
    # SGLang's arrays have a map of metadata at the position of vLLM's adapter name.
    named = at_seven if isinstance(at_seven, dict) else fields
    adapter, salt = named.get("lora_name"), named.get("cache_salt")
    if not adapter:
        number = fields.get("lora_id")  # vLLM up to 0.13 sends only the number
        adapter = f"#{number:d}" if number else ""
    else:
        _name(adapter)
    salted = b"" if salt is None else _name(salt).encode()
    extras = None
    listed = fields.get("extra_keys")
    if listed and any(listed):
        if len(listed) != len(hashes):
            raise ValueError("extra keys must have one list per block")
        adapter, salted, extras = _extras(listed, adapter, salted, root=parent is None)
    if parent is not None:
        salted = b""
    again = _is_repeat(fields, medium, root=parent is None)
    return Stored(hashes, parent, tokens, block_tokens, adapter, salted, extras, medium, group, True, again)


def _is_repeat(fields: dict[str, Any], medium: str, *, root: bool) -> bool | None:
    """Return True if the event repeats an older one, as vLLM sends it for a request with `kv_cache_report_mode: full`.
    None if that is unknown.

    Such a report is one event with all blocks that the prompt hit. It begins with the first block, so it looks like the
    event of a prompt without a hit (vLLM 0.32 v1/core/block_pool.py, emit_cached_block_events). An event with a parent
    is always a new copy. vLLM's pull request 51699 adds the field `origin`, which distinguishes the two. SGLang repeats
    no events, and names no groups.
    """
    origin = fields.get("origin")
    if origin is not None:
        return bool(origin == "REUSED")
    return None if root and medium == "GPU" and fields.get("group_idx") is not None else False


def _hashes(given: list[Any]) -> list[int]:
    """Return hashes as unsigned 64-bit integers: vLLM's integers are the last 8 bytes of its digests, SGLang's are
    signed."""
    if type(given) is not list or len(given) > BLOCKS_MAX:
        raise ValueError("hashes must be a list of limited length")
    if set(map(type, given)) <= {int}:
        return [value & _MASK for value in given]
    if any(type(value) is not int and (type(value) is not bytes or len(value) < _MIN_BYTES) for value in given):
        raise ValueError("a hash must be an integer or bytes")
    return [(value if type(value) is int else int.from_bytes(value[-8:], "big")) & _MASK for value in given]


def _tokens(given: list[Any]) -> bytes:
    if type(given) is not list:
        raise TypeError("token ids must be a list")
    if given and type(given[0]) is list:
        # Under EAGLE SGLang caches bigrams such as [t0, t1] and [t1, t2]. The first of each is the prompt's own token.
        given = [first for first, _ in given]
    ids = array("I", given)  # rejects values that are not integers in the range of uint32
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _extras(
    listed: list[Any], adapter: str, salt: bytes, *, root: bool
) -> tuple[str, bytes, tuple[bytes | None, ...] | None]:
    """Return the adapter, the salt, and the remaining extra keys of vLLM for each block.

    A block's list has in this order the adapter's name, pairs for images, the salt (root block only) and digests of
    prompt embeddings. vLLM 0.32 builds it in v1/core/kv_cache_utils.py (to_event_extra_keys). In the hash each is
    tagged with its source, such as ("lora", name, path), so both formats are accepted. A single string in the root
    block is the salt. A release that names images by bare strings is then salted by them; no plain prompt matches in
    either case.
    """
    extras: list[bytes | None] = [None] * len(listed)
    for index, given in enumerate(listed):
        keys = list(given or ())
        if keys and isinstance(keys[0], list) and len(keys[0]) == 3 and keys[0][0] == "lora":
            adapter = adapter or _name(keys[0][1])
            keys[0] = keys[0][1]
        if keys and adapter and keys[0] == adapter:
            del keys[0]
        if root and index == 0 and len(keys) == 1:
            lone = keys[0]
            if isinstance(lone, list) and len(lone) == 2 and lone[0] == "cache_salt":
                lone = lone[1]
            if isinstance(lone, str):
                salt = _name(lone).encode()
                continue
        if keys:
            extras[index] = msgspec.msgpack.encode(keys)
    return adapter, salt, tuple(extras) if any(extras) else None


def _name(given: str) -> str:
    if type(given) is not str or len(given) > NAME_CHARS_MAX:
        raise ValueError("a name must be a string of limited length")
    return given
