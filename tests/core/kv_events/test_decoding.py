from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from msgspec import structs

from router.core.kv_events import batch_decoder
from router.core.kv_events.batch_decoder import (
    Cleared,
    Event,
    EventBatch,
    MalformedBatch,
    Removed,
    Stored,
    decode,
    slices,
)

HASH = 15228142305651824730  # vLLM 0.32, over 2**63


def _ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def _batch_of(*events: Any, at: Any = 1.5, rank: Any = 0) -> EventBatch:
    return decode(msgspec.msgpack.encode([at, list(events), rank]))


def _only(event: Any) -> Event:
    batch = _batch_of(event)
    assert batch.skipped == 0
    (found,) = batch.events
    return found


def _stored(event: Any) -> Stored:
    found = _only(event)
    assert isinstance(found, Stored)
    return found


def _a_map(**changes: Any) -> dict[str, Any]:
    """As vLLM 0.32 sends it: two root blocks of two tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": [HASH, 2],
        "parent_block_hash": None,
        "token_ids": [1, 86, 3122, 202],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | changes


PLAIN = Stored([HASH, 2], None, _ids(1, 86, 3122, 202), 2, "", b"", None, "GPU", 0, prefix=True, again=None)
ARRAY_0_10 = ["BlockStored", [HASH, 2], None, [1, 86, 3122, 202], 2, None, "GPU"]


@pytest.mark.parametrize(
    "event",
    [
        _a_map(),
        _a_map(session_id="s", ownership=None, locality="LOCAL", a_field_of_tomorrow={"x": [1]}),
        {key: _a_map()[key] for key in ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")},
        ARRAY_0_10[:5],
        ARRAY_0_10,
        [*ARRAY_0_10, None],
        [*ARRAY_0_10, None, [None, None]],
        [*ARRAY_0_10, None, [None, None], 0, "full_attention", None],
        [*ARRAY_0_10, None, [None, None], 0, "full_attention", None, "LOCAL", "kvcr", "session", "tomorrow"],
        _a_map(kv_cache_spec_kind="mla_attention"),
        _a_map(kv_cache_spec_kind="sink_full_attention"),
        _a_map(kv_cache_spec_kind=None, group_idx=None, medium=None, lora_id=0, extra_keys=None),
        _a_map(extra_keys=[[], None]),
    ],
)
def test_every_shape_of_an_event_is_the_same_event(event: Any) -> None:
    """Arrays of every version, maps, fields missing at the end and fields unknown: one and the same."""
    assert structs.replace(_stored(event), again=None) == PLAIN


@pytest.mark.parametrize(
    ("event", "again"),
    [
        (_a_map(), None),
        (_a_map(origin="NEW"), False),
        (_a_map(origin="REUSED"), True),
        (_a_map(origin="REUSED", parent_block_hash=5), True),
        (_a_map(origin=["?"]), False),
        (_a_map(parent_block_hash=5), False),
        (_a_map(medium="CPU"), False),
        (_a_map(group_idx=None), False),
        (ARRAY_0_10, False),
    ],
)
def test_a_store_may_be_a_repetition(event: Any, again: bool | None) -> None:
    """vLLM's report of what a prompt hit begins with the prompt and looks like any such store, unless it says `origin`;
    a store behind a parent, a tier's, and that of an engine which names no groups are new."""
    assert _stored(event).again is again


@pytest.mark.parametrize(
    "whole",
    [
        [1.5, [_a_map()], 3],
        [1.5, [_a_map()], 3, "tomorrow"],
        {"ts": 1.5, "events": [_a_map()], "data_parallel_rank": 3},
        {"ts": 1.5, "events": [_a_map()], "attn_dp_rank": 3, "more": 1},
    ],
)
def test_a_batch_is_an_array_or_a_map(whole: Any) -> None:
    """Either way its time, rank and events are the same."""
    assert decode(msgspec.msgpack.encode(whole)) == EventBatch(1.5, 3, [PLAIN], 0)


def test_a_batch_without_time_or_rank_is_read() -> None:
    """Neither is needed, and neither is believed when it is no number."""
    assert _batch_of(_a_map(), at="noon", rank="first") == EventBatch(None, None, [PLAIN], 0)
    assert decode(msgspec.msgpack.encode([7, [_a_map()]])) == EventBatch(7.0, None, [PLAIN], 0)


def test_hashes_become_unsigned_64_bit() -> None:
    """vLLM's integers are the last 8 bytes of its digests and SGLang's are signed: all meet in one form."""
    digest = bytes(range(32))
    number = int.from_bytes(digest[-8:], "big")
    assert _stored(_a_map(block_hashes=[digest, digest[-16:]])).hashes == [number, number]
    assert _stored(_a_map(block_hashes=[-1, digest], parent_block_hash=-2)).hashes == [2**64 - 1, number]
    assert _stored(_a_map(parent_block_hash=-2)).parent == 2**64 - 2
    assert _stored(_a_map(parent_block_hash=digest)).parent == number
    assert _only(["BlockRemoved", [digest, -1]]) == Removed([number, 2**64 - 1], "GPU", 0)


def test_sglangs_map_where_vllm_has_the_adapter() -> None:
    """Index 7 of an array is the adapter's name in vLLM and a map of metadata in SGLang."""
    assert _stored([*ARRAY_0_10, "ad1"]).adapter == "ad1"
    assert _stored([*ARRAY_0_10, {"cache_salt": "s1"}]).salt == b"s1"
    assert _stored([*ARRAY_0_10, {"cache_salt": "s1"}]).adapter == ""
    assert _stored([*ARRAY_0_10, {"lora_name": "ad1"}]).adapter == "ad1"


@pytest.mark.parametrize("at_seven", [["full", "swa"], [], 5, 1.5, True, b"ad1"])
def test_what_is_no_name_at_index_seven_is_no_adapter(at_seven: Any) -> None:
    """Such as SGLang's list of components: the event is kept, also with the adapter's number, and beside a salt."""
    assert structs.replace(PLAIN, again=False) == _stored([*ARRAY_0_10, at_seven])
    assert _stored([*ARRAY_0_10[:5], 2, "GPU", at_seven]).adapter == "#2"
    both = _stored([*ARRAY_0_10, {"cache_salt": "s1"}, ["full", "swa"]])
    assert (both.salt, both.extras) == (b"s1", None)
    assert _stored([*ARRAY_0_10, None, ["full"]]).extras is None


def test_an_empty_medium_is_none() -> None:
    """It is the GPU's, in stores and removals, as if it were not there."""
    assert _stored(_a_map(medium="")) == PLAIN
    assert _only(["BlockRemoved", [5], ""]) == Removed([5], "GPU", 0)
    assert _stored(_a_map(medium="", locality="REMOTE")) == _stored(_a_map(medium=None, locality="REMOTE"))


def test_sglangs_salt_is_of_the_root_alone() -> None:
    """SGLang sends the salt with every block; what follows a root has it through its parent."""
    assert _stored(_a_map(cache_salt="s1", extra_keys=None)).salt == b"s1"
    assert _stored(_a_map(cache_salt="s1", extra_keys=None, parent_block_hash=5)).salt == b""


def test_bigrams_are_the_prompts_own_tokens() -> None:
    """Under EAGLE SGLang caches [t0, t1], [t1, t2] ...: the first of each counts."""
    assert _stored(_a_map(token_ids=[[1, 86], [86, 3122], [3122, 202], [202, 9]])) == PLAIN


@pytest.mark.parametrize(
    ("fields", "adapter", "salt"),
    [
        ({"extra_keys": [["tenant-1"], None]}, "", b"tenant-1"),
        ({"extra_keys": [[["cache_salt", "tenant-1"]], None]}, "", b"tenant-1"),
        ({"extra_keys": [["ad1"], ["ad1"]], "lora_name": "ad1", "lora_id": 1}, "ad1", b""),
        ({"extra_keys": [["ad1", "s1"], ["ad1"]], "lora_name": "ad1", "lora_id": 1}, "ad1", b"s1"),
        ({"extra_keys": [["ad1", "ad1"], ["ad1"]], "lora_name": "ad1", "lora_id": 1}, "ad1", b"ad1"),
        ({"extra_keys": [[["lora", "ad1", "/p"], ["cache_salt", "s1"]], [["lora", "ad1", "/p"]]]}, "ad1", b"s1"),
        ({"extra_keys": None, "lora_id": 7}, "#7", b""),
    ],
)
def test_adapter_and_salt_are_found_in_the_extra_keys(fields: dict[str, Any], adapter: str, salt: bytes) -> None:
    """As vLLM sends them, bare, and as it hashes them, tagged; nothing is left over."""
    found = _stored(_a_map(**fields))
    assert (found.adapter, found.salt, found.extras) == (adapter, salt, None)


@pytest.mark.parametrize(
    "keys",
    [
        [["image-1", 3]],
        [["image-1", 3], "salt"],
        ["image-1", "image-2"],
        [b"digest of embeddings"],
        [["mm", "image-1", 3]],
    ],
)
def test_images_set_a_block_apart(keys: list[Any]) -> None:
    """Whatever else is in the extra keys makes other extras, block by block."""
    found = _stored(_a_map(extra_keys=[keys, None]))
    assert found.extras is not None
    assert found.extras[0]
    assert found.extras[1] is None
    assert _stored(_a_map(extra_keys=[None, keys])).extras == (None, found.extras[0])
    assert _stored(_a_map(extra_keys=[None, ["image-1"]], parent_block_hash=4)).extras is not None


def test_an_image_is_not_taken_for_the_adapter() -> None:
    """Only the adapter's own name is left out of the extras."""
    assert _stored(_a_map(lora_name="ad1", extra_keys=[["x", ["image-1", 3]], ["ad1"]])).extras is not None
    found = _stored(_a_map(lora_name="ad1", extra_keys=[["image-1"], ["image-1"]], parent_block_hash=4))
    assert found.extras is not None
    assert all(found.extras)


def test_a_bare_string_behind_the_root_is_no_salt() -> None:
    """Only a root block is salted: elsewhere a lone string names an image."""
    found = _stored(_a_map(extra_keys=[["image-1"], None], parent_block_hash=4))
    assert found.salt == b""
    assert found.extras is not None


def test_a_tier_names_hashes_alone() -> None:
    """Offloaded blocks come without tokens, and without a block size."""
    found = _stored(_a_map(token_ids=[], block_size=0, medium="CPU", kv_cache_spec_kind=None))
    assert (found.hashes, found.tokens, found.medium, found.prefix) == ([HASH, 2], b"", "CPU", True)
    assert _stored(_a_map(medium="cpu")).medium == "CPU"


@pytest.mark.parametrize(
    "kind", ["sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "cross_attention", "unknown"]
)
def test_groups_that_do_not_answer_for_a_prefix(kind: str) -> None:
    """They are marked; that fewer hashes than blocks come with their tokens is their way."""
    assert not _stored(_a_map(kv_cache_spec_kind=kind, group_idx=1, block_hashes=[5])).prefix


def test_removals_and_clears() -> None:
    """Maps and arrays, with and without a medium and a group."""
    assert _only({"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 2}) == Removed(
        [5], "CPU", 2
    )
    assert _only(["BlockRemoved", [5], "CPU", 2]) == Removed([5], "CPU", 2)
    assert _only(["BlockRemoved", [5], None]) == Removed([5], "GPU", 0)
    assert _only({"type": "AllBlocksCleared"}) == Cleared()
    assert _only(["AllBlocksCleared"]) == Cleared()
    assert _only(["AllBlocksCleared", "kvcr"]) == Cleared()


def test_what_a_remote_store_holds_has_a_medium_of_its_own() -> None:
    """REMOTE blocks are in a place that is not the engine's own, whatever its medium; LOCAL ones are as if unsaid."""
    gone = {"type": "BlockRemoved", "block_hashes": [5], "medium": "STORAGE", "locality": "REMOTE"}
    found = _batch_of(_a_map(medium="STORAGE", locality="REMOTE"), gone, _a_map(medium="STORAGE", locality="LOCAL"))
    assert [event.medium for event in found.events] == ["STORAGE/REMOTE", "STORAGE/REMOTE", "STORAGE"]
    assert found.skipped == 0


@pytest.mark.parametrize(
    "bad",
    [
        _a_map(type="BlockMoved"),
        _a_map(type=None),
        _a_map(block_hashes=None),
        _a_map(block_hashes=["5", "6"]),
        _a_map(block_hashes=[1.0, 2.0]),
        _a_map(block_hashes=[True, 2]),
        _a_map(block_hashes=[b"short", 2]),
        _a_map(parent_block_hash="5"),
        _a_map(token_ids=[1, 2, 3]),
        _a_map(token_ids=[1, 2, 3, -1]),
        _a_map(token_ids=[1, 2, 3, 2**32]),
        _a_map(token_ids=[1, 2, 3, 4.0]),
        _a_map(token_ids=[[1, 2], [2, 3], [3, 4], [4]]),
        _a_map(token_ids=b"1234"),
        _a_map(block_size=0),
        _a_map(block_size=-2),
        _a_map(block_size="2"),
        _a_map(block_size=2**40),
        _a_map(medium=5),
        _a_map(group_idx=-1),
        _a_map(group_idx="0"),
        _a_map(kv_cache_spec_kind=5),
        _a_map(lora_name=5),
        _a_map(lora_id="x"),
        _a_map(cache_salt=5),
        _a_map(extra_keys=[["a"]]),
        _a_map(extra_keys=[5, 5]),
        _a_map(lora_name="a" * 5_000),
        _a_map(cache_salt="s" * 5_000),
        {key: value for key, value in _a_map().items() if key != "parent_block_hash"},
        ARRAY_0_10[:4],
        ["BlockStored"],
        ["BlockRemoved"],
        {"type": "BlockRemoved"},
        [],
        {},
        None,
        5,
        "BlockStored",
    ],
)
def test_an_unreadable_event_costs_itself_alone(bad: Any) -> None:
    """It is left out and counted; its neighbours are read."""
    assert _batch_of(_a_map(), bad, ["AllBlocksCleared"]) == EventBatch(1.5, 0, [PLAIN, Cleared()], 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\x91" * 5_000,
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0, []]) + b"more",
        b"\x92\x00\x91\xa2\xff\xff",
        b"\x92\x00\xdd\xff\xff\xff\xff",
        b"\x81\x90\x00",
    ],
)
def test_bytes_that_are_no_batch_are_refused_in_one_way(payload: bytes) -> None:
    """MalformedBatch, with a reason, and nothing else."""
    with pytest.raises(MalformedBatch, match=" "):
        decode(payload)


@pytest.mark.promise("No bytes of an event stream crash the router or take unbounded memory.", "engines")
def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and events of a batch, and blocks of an event, have a limit."""
    monkeypatch.setattr(batch_decoder, "BLOCKS_MAX", 1)
    assert _batch_of(_a_map()).skipped == 1
    monkeypatch.setattr(batch_decoder, "EVENTS_MAX", 1)
    with pytest.raises(MalformedBatch, match="over the limit"):
        _batch_of(["AllBlocksCleared"], ["AllBlocksCleared"])
    monkeypatch.setattr(batch_decoder, "BATCH_BYTES_MAX", 10)
    with pytest.raises(MalformedBatch, match="over the limit"):
        _batch_of(["AllBlocksCleared"])


def test_slices_are_the_same_in_pieces() -> None:
    """Blocks, tokens and extras in order; each piece is the child of the one before; the salt stays with the root."""
    extras = (b"a", None, None, b"d", b"e")
    whole = Stored([1, 2, 3, 4, 5], 9, _ids(*range(10)), 2, "ad", b"s", extras, "GPU", 0, prefix=True, again=None)
    parts = [part for part in slices(whole, 2) if isinstance(part, Stored)]
    assert [part.hashes for part in parts] == [[1, 2], [3, 4], [5]]
    assert [part.parent for part in parts] == [9, 2, 4]
    assert b"".join(part.tokens for part in parts) == whole.tokens
    assert [len(part.tokens) for part in parts] == [16, 16, 8]
    assert [part.salt for part in parts] == [b"s", b"", b""]
    assert [part.again for part in parts] == [None] * 3
    assert [part.extras for part in parts] == [(b"a", None), (None, b"d"), (b"e",)]
    assert list(slices(whole, 5)) == [whole]
    assert list(slices(Removed([1, 2, 3], "CPU", 1), 2)) == [Removed([1, 2], "CPU", 1), Removed([3], "CPU", 1)]
    assert list(slices(Cleared(), 1)) == [Cleared()]


@pytest.mark.parametrize(
    ("said", "at_s"), [(1.5, 1.5), (7, 7.0), (float("nan"), None), (float("inf"), None), ("now", None)]
)
def test_a_time_that_is_none_is_none(said: Any, at_s: float | None) -> None:
    """The batch is read all the same."""
    batch = _batch_of({"type": "AllBlocksCleared"}, at=said)
    assert (batch.at_s, batch.skipped, len(batch.events)) == (at_s, 0, 1)
