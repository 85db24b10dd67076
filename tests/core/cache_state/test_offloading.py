"""What vLLM's offloading says of its CPU memory, replayed: the events of its own classes against its own state."""

from __future__ import annotations

import base64
import gzip
import json
from array import array
from typing import Any

import msgspec
import pytest

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.cache_state.tier_blocks import TierMatch
from router.core.kv_events.batch_decoder import Removed, Stored, decode
from router.core.prompts.block_keys import token_chain, token_root
from tests.core.kv_events.kv_data import FOLDER

RECORDED = msgspec.json.decode(gzip.decompress((FOLDER / "vllm_offloading.json.gz").read_bytes()))


def _lines(name: str) -> list[dict[str, Any]]:
    """What a vLLM on a GPU published, and what it was asked meanwhile."""
    text = gzip.decompress((FOLDER / "tiers" / f"{name}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in text.splitlines()][1:]


def _apply(ledger: EngineBlocks, line: dict[str, Any]) -> None:
    batch = decode(base64.b64decode(line["payload"]))
    assert not batch.skipped
    for event in batch.events:
        ledger.apply(event)


def _keys(line: dict[str, Any]) -> tuple[list[int], int]:
    """Keys of a request's whole blocks of 16, and its tokens."""
    ids = [first + n for first, count in line["prompts"][0]["runs"] for n in range(count)]
    return token_chain(array("I", ids).tobytes(), 16, token_root("", line.get("salt", "").encode(), 16)), len(ids)


def _replayed(recorded: dict[str, Any]) -> tuple[HolderBitmap, EngineBlocks]:
    masks = HolderBitmap()
    ledger = EngineBlocks(masks, "r", blocks_max=1_000, aside_max=100, names_max=100)
    for batch in recorded["batches"]:
        for event in decode(base64.b64decode(batch)).events:
            ledger.apply(event)
    return masks, ledger


def _hashes(masks: HolderBitmap, ledger: EngineBlocks, bit: int) -> list[int]:
    """The engine's names of the blocks whose keys have the bit."""
    return sorted(given for given, key in ledger._held.items() if key is not None and masks.of.get(key, 0) & bit)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["name"]))
def test_a_recording_replays_to_the_engines_own_state(recorded: dict[str, Any]) -> None:
    """Chunks of one and of several blocks that share blocks and are evicted, with their tokens and as placeholders:
    what is believed to be in the tier is what vLLM's manager has there, and no removal was of something unknown."""
    masks, ledger = _replayed(recorded)
    assert _hashes(masks, ledger, ledger.tiers["cpu"].bit) == recorded["in_tier"]
    assert _hashes(masks, ledger, ledger._credit._bit) == recorded["on_gpu"]
    assert ledger.unknown_removals == ledger.conflicts == 0
    assert ledger.gpu_blocks == len(recorded["on_gpu"])
    assert ledger.complete


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: str(recorded["name"]))
def test_who_joins_late_believes_too_little(recorded: dict[str, Any]) -> None:
    """Without the first batches placeholders have no key and removals are of unknown blocks: none of that is credited,
    and none of it harms what is known."""
    masks = HolderBitmap()
    ledger = EngineBlocks(masks, "r", blocks_max=1_000, aside_max=100, names_max=100)
    for batch in recorded["batches"][4:]:
        for event in decode(base64.b64decode(batch)).events:
            ledger.apply(event)
    tier = ledger.tiers.get("cpu")
    assert tier is None or set(_hashes(masks, ledger, tier.bit)) <= set(recorded["in_tier"])
    assert set(_hashes(masks, ledger, ledger._credit._bit)) <= set(recorded["on_gpu"])


def test_the_recordings_have_what_is_hard() -> None:
    """Placeholders, blocks announced again by another chunk, and evictions are all in them."""
    events = [
        event for each in RECORDED for batch in each["batches"] for event in decode(base64.b64decode(batch)).events
    ]
    in_tier = [event for event in events if isinstance(event, Stored) and event.medium == "CPU"]
    assert any(not event.tokens for event in in_tier)
    assert any(len(event.hashes) > 1 for event in in_tier)
    assert any(isinstance(event, Removed) and event.medium == "CPU" for event in events)
    told = [given for event in in_tier for given in event.hashes]
    assert len(told) > len(set(told))


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_gpu_loads_what_was_foretold(chunk: int) -> None:
    """Of each request to a vLLM on a GPU: how much its GPU has and how much it loads, by its own counters, where CPU
    memory keeps blocks one by one or three together."""
    masks = HolderBitmap()
    ledger = EngineBlocks(masks, "r", blocks_max=1_000, aside_max=100, names_max=1_000)
    wrong, loaded = [], 0
    for line in _lines(f"vllm_chunks_of_{chunk}"):
        if line["kind"] == "batch":
            _apply(ledger, line)
            continue
        keys, tokens = _keys(line)
        keys = keys[: (tokens - 1) // 16]
        depth = masks.match(keys).get("r", 0)
        behind = sum(TierMatch(masks, keys).count_loadable(depth, [bit for _, bit in ledger.tier_bits()], ledger.chunk))
        loaded += line["loaded"]
        if (16 * depth, 16 * behind) != (line["gpu"], line["loaded"]):
            wrong.append((line["label"], tokens, 16 * depth, 16 * behind, line["gpu"], line["loaded"]))
    assert wrong == []
    assert loaded > 1_000
    assert ledger.chunk == chunk
    assert ledger.unknown_removals == ledger.conflicts == 0


def test_a_gpu_counts_a_whole_prompt_as_cached_where_its_last_block_is_in_a_tier() -> None:
    """A prompt that ends with a block is cached to its end if that block can be loaded, and computed from that block
    on otherwise, whatever the GPU has."""
    masks = HolderBitmap()
    ledger = EngineBlocks(masks, "r", blocks_max=10_000, aside_max=100, names_max=1_000)
    seen = []
    for line in _lines("vllm_whole_prompts"):
        if line["kind"] == "batch":
            _apply(ledger, line)
            continue
        keys, tokens = _keys(line)
        in_tier = bool(masks.of.get(keys[-1], 0) & ledger.tiers["cpu"].bit) if ledger.tiers else False
        seen.append((line["cached"] == tokens, in_tier))
    assert seen == [(False, False), (True, True), (True, True)]
