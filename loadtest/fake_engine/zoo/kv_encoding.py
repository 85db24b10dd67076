"""Encoding of the pool's KV events, by engine: maps with a type name.

Sources: frames recorded from vLLM 0.32 and SGLang 0.5.23 (tests/data/kv). For several groups: vLLM 0.32.0,
v1/core/block_pool.py and v1/core/kv_cache_manager.py (take_events). There, groups with the same block size share a
block's hash, and a group with smaller blocks has its own hashes. Unlike in vLLM, all groups evict a block together with
the first group: none evicts blocks outside its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from loadtest.fake_engine import tokens
from loadtest.fake_engine.kv_pool import BlocksRemoved, BlockStored, KvEvent
from loadtest.fake_engine.zoo.member import Family, Group, Member

GPU = "GPU"
FIRST = Group("full_attention")
SIGN = 1 << 63


class VllmEvents:
    """vLLM's events. The field order is vLLM's; each removed block has its own event, as in vLLM."""

    def __init__(self, block_tokens: int, groups: Sequence[Group] = ()) -> None:
        self._block_tokens = block_tokens
        self._groups = (FIRST, *groups)
        self._parts: dict[tuple[int, int], list[int]] = {}  # (group, key) -> hashes of its parts, while it is cached

    def encode_event(self, event: KvEvent) -> list[dict[str, Any]]:
        """Return the events of all groups for an event of the pool."""
        if isinstance(event, BlocksRemoved):
            return self._encode_removed(event)
        if not isinstance(event, BlockStored):
            self._parts.clear()
            return [{"type": "AllBlocksCleared"}]
        if event.medium != GPU:
            return self._encode_offloaded(event)
        return [
            self._encode_stored(event),
            *(self._encode_for_group(event, each) for each in range(1, len(self._groups))),
        ]

    def _encode_removed(self, event: BlocksRemoved) -> list[dict[str, Any]]:
        common = {"medium": event.medium, "group_idx": 0}
        if event.medium != GPU:  # events of the offloading manager contain several blocks
            return [{"type": "BlockRemoved", "block_hashes": list(event.keys), **common}]
        removed = []
        for key in event.keys:
            for number, group in enumerate(self._groups):
                hashes = [key] if group.parts == 1 else self._parts.pop((number, key), [])
                removed += [
                    {"type": "BlockRemoved", "block_hashes": [each], "medium": event.medium, "group_idx": number}
                    for each in hashes
                ]
        return removed

    def _encode_offloaded(self, event: BlockStored) -> list[dict[str, Any]]:
        """Return an event for each block, which is a chunk of the offloading manager.

        The events lack the extra keys of a block (offloading/events.py of vLLM 0.32, `self_describing_kv_events`).
        """
        told, parent = [], event.parent
        for number, key in enumerate(event.keys):
            one = BlockStored(event.tag, event.first_block + number, [key], parent, event.medium)
            told.append(self._encode_stored(one) | {"extra_keys": None})
            parent = key
        return told

    def _encode_stored(self, event: BlockStored) -> dict[str, Any]:
        text = _text(event)
        extra_keys: list[list[str] | None] = [None] * len(event.keys)
        if text.salt and not event.first_block:
            extra_keys[0] = [text.salt]
        return {
            "type": "BlockStored",
            "block_hashes": event.keys,
            "parent_block_hash": event.parent,
            "token_ids": _ids(event, self._block_tokens),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": FIRST.kind,
        }

    def _encode_for_group(self, event: BlockStored, number: int) -> dict[str, Any]:
        """Return the event of the same blocks in another group."""
        group, stored = self._groups[number], self._encode_stored(event)
        stored |= {"group_idx": number, "kv_cache_spec_kind": group.kind}
        if group.window_tokens is not None:
            stored["kv_cache_spec_sliding_window"] = group.window_tokens
        if group.parts == 1:
            return stored
        text, parts, count = _text(event), group.parts, len(event.keys)
        size = self._block_tokens // parts
        end = (event.first_block + count) * self._block_tokens * tokens.BYTES_PER_TOKEN
        chain = tokens.chain(text.data[:end], size, text.salt)
        hashes = chain[event.first_block * parts :]
        for block, key in enumerate(event.keys):
            self._parts[number, key] = hashes[block * parts : (block + 1) * parts]
        extra_keys = [keys if not part else None for keys in stored["extra_keys"] for part in range(parts)]
        parent = chain[event.first_block * parts - 1] if event.first_block else None
        return stored | {
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "block_size": size,
            "extra_keys": extra_keys,
        }


class SglangEvents:
    """SGLang's events: signed hashes, no groups, and one event for all blocks that are removed together.

    Unlike in SGLang, blocks of an answer are reported when they are full, not when the request ends.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def encode_event(self, event: KvEvent) -> list[dict[str, Any]]:
        """Return the events for an event of the pool."""
        if isinstance(event, BlocksRemoved):
            return [{"type": "BlockRemoved", "block_hashes": [*map(_to_signed, event.keys)], "medium": event.medium}]
        if not isinstance(event, BlockStored):
            return [{"type": "AllBlocksCleared"}]
        stored = {
            "type": "BlockStored",
            "block_hashes": [*map(_to_signed, event.keys)],
            "parent_block_hash": None if event.parent is None else _to_signed(event.parent),
            "token_ids": _ids(event, self._block_tokens),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": event.medium,
        }
        salt = _text(event).salt
        return [stored | ({"cache_salt": salt} if salt else {})]


Encoded = Callable[[KvEvent], list[dict[str, Any]]]
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_REMOVED = ("block_hashes", "medium")


def encoding_of(member: Member, block_tokens: int) -> Callable[[KvEvent], Sequence[dict[str, Any] | list[Any]]]:
    """Return the function that encodes an event of the pool for a member."""
    sglang = member.family is Family.SGLANG
    encoded = (
        SglangEvents(block_tokens).encode_event if sglang else VllmEvents(block_tokens, member.groups).encode_event
    )
    if not member.earlier:
        return encoded
    return partial(_sglang_arrays if sglang else _vllm_arrays, encoded)


def _vllm_arrays(encoded: Encoded, event: KvEvent) -> list[list[Any]]:
    """Return events as in vLLM 0.15.1 (distributed/kv_events.py): arrays that begin with their type."""
    return [_array(told, len(_STORED), len(_REMOVED)) for told in encoded(event)]


def _sglang_arrays(encoded: Encoded, event: KvEvent) -> list[list[Any]]:
    """Return events as in SGLang 0.5.8 (srt/mem_cache/radix_cache.py): an event for each block, without a medium."""
    return [_array(told, _STORED.index("medium"), 1) for one in _each_block(event) for told in encoded(one)]


def _each_block(event: KvEvent) -> list[KvEvent]:
    if isinstance(event, BlocksRemoved):
        return [BlocksRemoved([key], event.medium) for key in event.keys]
    if not isinstance(event, BlockStored):
        return [event]
    parents = [event.parent, *event.keys]
    return [
        BlockStored(event.tag, event.first_block + number, [key], parents[number], event.medium)
        for number, key in enumerate(event.keys)
    ]


def _array(told: dict[str, Any], stored_n: int, removed_n: int) -> list[Any]:
    names = {"BlockStored": _STORED[:stored_n], "BlockRemoved": _REMOVED[:removed_n]}.get(told["type"], ())
    return [told["type"], *(told.get(name) for name in names)]


def _text(event: BlockStored) -> tokens.Text:
    if not isinstance(event.tag, tokens.Text):
        raise TypeError("requests with published events are tagged with their text")
    return event.tag


def _ids(event: BlockStored, block_tokens: int) -> list[int]:
    size = block_tokens * tokens.BYTES_PER_TOKEN
    start = event.first_block * size
    return tokens.ids(_text(event).data[start : start + len(event.keys) * size])


def _to_signed(key: int) -> int:
    return key - 2 * SIGN if key >= SIGN else key
