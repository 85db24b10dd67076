"""Whatever bytes arrive, decoding refuses them in one way, and the ledger neither raises nor grows without limit."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.kv_events.batch_decoder import EventBatch, MalformedBatch, decode, slices
from tests.core.kv_events.kv_data import EVENTS, NAMES, encoded, recording

pytestmark = pytest.mark.promise("No bytes of an event stream crash the router or take unbounded memory.", "engines")

FRAMES = 100_000  # mutated frames
LEDGER_BLOCKS = 200  # small, so that its limits are reached
BIG = [struct.pack(">BI", kind, 0xFFFFFFFF) for kind in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)]  # bin ext str array map, 4 GiB
DEEP = [b"\x91" * 2_000, b"\x81\xa1a" * 2_000, b"\xdc\x00\x01" * 2_000]


def _small_ledger() -> tuple[HolderBitmap, EngineBlocks]:
    masks = HolderBitmap()
    return masks, EngineBlocks(masks, "r", blocks_max=LEDGER_BLOCKS, aside_max=50, names_max=100)


def _decoded(payload: bytes) -> EventBatch | None:
    try:
        return decode(payload)
    except MalformedBatch:
        return None


def _apply(ledger: EngineBlocks, batch: EventBatch) -> None:
    for event in batch.events:
        for part in slices(event, 16):
            ledger.apply(part)


def _bounded(masks: HolderBitmap, ledger: EngineBlocks) -> None:
    assert 0 <= ledger.blocks <= LEDGER_BLOCKS
    while masks.pending_sweep:
        masks.sweep(1_000)
    assert len(masks.of) <= LEDGER_BLOCKS


def _frames() -> list[bytes]:
    """Real frames, short ones for speed, in every encoding that holds for them."""
    frames: list[bytes] = []
    for name in NAMES:
        for batch in recording(name).batches:
            for how in EVENTS:
                payload = encoded(batch.payload, how, as_map=len(frames) % 7 == 0)
                if len(payload) < 700:
                    frames.append(payload)
    return frames


def _mutated(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """One to four changes: bits, bytes, cuts, copies, lengths, depth, pieces of another frame."""
    data = bytearray(frame)
    for _ in range(1 + int(rng.random() * 4)):
        at = int(rng.random() * (len(data) + 1))
        kind = int(rng.random() * 9)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.random() * 8)
        elif kind <= 2 and at < len(data):
            data[at] = int(rng.random() * 256)
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + int(rng.random() * 9)]
        elif kind == 5:
            data[at:at] = data[int(rng.random() * 40) : at]
        elif kind == 6:
            data[at:] = other[int(rng.random() * len(other)) :]
        elif kind == 7:
            data[at : at + 5] = BIG[int(rng.random() * len(BIG))]
        elif rng.random() < 0.02:
            data[at:at] = DEEP[int(rng.random() * len(DEEP))]
    return bytes(data)


@pytest.mark.long
def test_mutated_frames() -> None:
    """100,000 damaged frames: each is decoded or refused, and what is decoded can be applied."""
    rng = random.Random(3)
    frames = _frames()
    masks, ledger = _small_ledger()
    good = 0
    for count in range(FRAMES):
        frame = frames[int(rng.random() * len(frames))]
        batch = _decoded(_mutated(rng, frame, frames[count % len(frames)]))
        if batch is None:
            continue
        good += bool(batch.events)
        _apply(ledger, batch)
        if count % 1_000 < 2:
            _bounded(masks, ledger)
        if count % 20_000 == 0:
            ledger.clear()
    _bounded(masks, ledger)
    assert FRAMES / 100 < good < FRAMES  # damage that leaves something to apply, and damage that does not
    ledger.close()
    _bounded(masks, ledger)
    assert masks.held == 0


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes(payload: bytes) -> None:
    """Bytes of no meaning are refused or, by chance, mean something."""
    _decoded(payload)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40)
    | st.sampled_from(["GPU", "CPU", "full_attention", "sliding_window", "REMOTE", "tenant-1"])
)
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
HASHES = st.lists(st.integers(0, 9) | st.binary(max_size=33) | ANY, max_size=4)
IDS = st.lists(st.integers(0, 3), max_size=8) | st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4) | ANY
FIELDS = {
    "block_hashes": HASHES | ANY,
    "parent_block_hash": st.none() | st.integers(0, 9) | ANY,
    "token_ids": IDS,
    "block_size": st.integers(-1, 4) | ANY,
    "lora_id": st.none() | ANY,
    "medium": st.none() | ANY,
    "lora_name": st.none() | ANY,
    "extra_keys": st.none() | ANY,
    "group_idx": st.none() | st.integers(-1, 2) | ANY,
    "kv_cache_spec_kind": st.none() | ANY,
    "cache_salt": st.none() | ANY,
    "locality": st.none() | ANY,
}
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | ANY
AS_MAP = st.fixed_dictionaries({"type": TAGS}, optional=FIELDS)
AS_ARRAY = st.tuples(TAGS, *list(FIELDS.values())[:10]).flatmap(
    lambda event: st.integers(0, len(event)).map(lambda length: list(event[:length]))
)
SHAPES = st.tuples(st.floats() | ANY, st.lists(AS_MAP | AS_ARRAY | ANY, max_size=4) | ANY, ANY)


@given(st.lists(SHAPES, max_size=6), st.booleans())
@settings(deadline=None)
def test_any_shape(batches: list[tuple[object, object, object]], as_map: bool) -> None:
    """Well-formed msgpack of nearly the right shape, with wrong types anywhere, harms nothing."""
    masks, ledger = _small_ledger()
    for at_s, events, rank in batches:
        shape = {"ts": at_s, "events": events, "data_parallel_rank": rank} if as_map else [at_s, events, rank]
        batch = _decoded(msgspec.msgpack.encode(shape))
        if batch is not None:
            _apply(ledger, batch)
            _bounded(masks, ledger)
    ledger.clear()
    assert ledger.blocks == 0
    _bounded(masks, ledger)


@pytest.mark.parametrize("payload", [*DEEP, *BIG, b"", b"\xc1", b"\x93", b"\x93\xcb" + b"\x00" * 8 + b"\x90"])
def test_hostile_frames(payload: bytes) -> None:
    """Depth, lengths that lie, and nothing at all are refused at once."""
    with pytest.raises(MalformedBatch):
        decode(payload)
