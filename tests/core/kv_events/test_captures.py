"""What real engines said, decoded and applied, against what the same engines counted."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from router.core.cache_state.engine_blocks import EngineBlocks
from router.core.cache_state.holder_bitmap import HolderBitmap
from router.core.kv_events.batch_decoder import decode
from router.core.kv_events.stream import Apply, Clear, KvStream, Phase, RequestReplay, Step
from router.core.prompts.block_keys import token_chain, token_root
from router.core.types.placements import Confidence
from tests.core.kv_events import kv_data
from tests.core.kv_events.kv_data import NAMES, Asked, Batch, Recording, encoded, recording

BLOCKS_MAX = 100_000
WAYS = [
    (name, how, as_map)
    for name in NAMES
    for how in kv_data.EVENTS
    for as_map in (False, True)
    # An encoding belongs to the engines that spoke it; a batch as a map is tried once for each.
    if (how == "sglang arrays") <= name.startswith("sglang") and (how == "arrays") <= (not name.startswith("sglang"))
    if as_map <= (how == "as sent")
]
# SGLang's recording begins at batch 2; batch 1 had stored the one block of the warm-up, whose removal is heard.
UNKNOWN_REMOVALS = {"sglang": 1}
# vLLM says that its cache was reset with the next step, that is, with the batch which this very request causes
# (AllBlocksCleared is only queued by v1/core/block_pool.py, reset_prefix_cache): (label, predicted, cached).
UNSAID = {"vllm_main": [("A5 after reset", 160, 0)]}


class Index:
    """One replica's ledger and the map it fills."""

    def __init__(self) -> None:
        self.masks = HolderBitmap()
        self.ledger = EngineBlocks(self.masks, "r", blocks_max=BLOCKS_MAX, aside_max=1_000, names_max=BLOCKS_MAX)
        self.malformed = 0

    def apply(self, payload: bytes) -> None:
        """One message."""
        batch = decode(payload)
        self.malformed += batch.skipped
        for event in batch.events:
            self.ledger.apply(event)

    def keys(self, ids: bytes, asked: Asked, block_tokens: int) -> list[int]:
        """Keys of one prompt."""
        return token_chain(ids, block_tokens, token_root(asked.adapter, asked.salt, block_tokens))

    def cached(self, keys: list[int], tokens: int, block_tokens: int) -> int:
        """The prediction: whole blocks, never the last token."""
        found = self.masks.match(keys).get("r", 0) * block_tokens
        return min(found, (tokens - 1) // block_tokens * block_tokens)


def _predicted(index: Index, asked: Asked, block_tokens: int) -> int:
    """Prompts of one request are placed one after the other, each seen as held by the next."""
    counts = []
    for lease, ids in enumerate(asked.prompts):
        keys = index.keys(ids, asked, block_tokens)
        counts.append(index.cached(keys, len(ids) // 4, block_tokens))
        index.ledger.expect(lease, keys)
    for lease in range(len(asked.prompts)):
        index.ledger.settle(lease)
    return counts[-1] if asked.siblings else sum(counts)


def _naive(stream: Recording) -> set[int]:
    """Keys held in the end: a multiset of hashes and a dict of their contents, from the raw maps."""
    copies: Counter[int | bytes] = Counter()
    content: dict[int | bytes, tuple[str, bytes, tuple[int, ...]]] = {}
    last = -1
    for batch in stream.batches:
        if batch.seq <= last:
            copies.clear()
        last = batch.seq
        for event in msgspec.msgpack.decode(batch.payload)[1]:
            if event["type"] == "AllBlocksCleared":
                copies.clear()
            elif event["type"] == "BlockRemoved":
                copies.subtract(event["block_hashes"])
            else:
                size, parent = event["block_size"], event["parent_block_hash"]
                adapter, salt, ids = content[parent] if parent is not None else (*_identity(event), ())
                for index, key in enumerate(event["block_hashes"]):
                    ids += tuple(event["token_ids"][index * size : index * size + size])
                    content[key] = adapter, salt, ids
                    copies[key] += 1
    bt = stream.block_tokens
    return {
        token_chain(kv_data.id_bytes(ids), bt, token_root(adapter, salt, bt))[-1]
        for adapter, salt, ids in (content[key] for key, count in copies.items() if count > 0)
    }


def _identity(event: dict[str, object]) -> tuple[str, bytes]:
    adapter = event.get("lora_name") or ""
    salt = event.get("cache_salt") or ""
    extra = event.get("extra_keys")
    if isinstance(extra, list) and extra[0]:
        salt = next((key for key in extra[0] if key != adapter), "")
    assert isinstance(adapter, str)
    assert isinstance(salt, str)
    return adapter, salt.encode()


@pytest.mark.parametrize(("name", "how", "as_map"), WAYS)
def test_prediction_equals_the_engines_count(name: str, how: str, as_map: bool) -> None:
    """At every recorded request the held prefix is what the engine reported as cached, in every encoding;
    but for one that was asked before its engine could say that its cache had been reset."""
    stream, index = recording(name), Index()
    wrong = []
    for row in stream.rows:
        if isinstance(row, Batch):
            index.apply(encoded(row.payload, how, as_map=as_map))
        elif not row.extra_key and (predicted := _predicted(index, row, stream.block_tokens)) != row.cached_tokens:
            wrong.append((row.label, predicted, row.cached_tokens))

    assert wrong == UNSAID.get(name, [])
    assert index.malformed == 0
    assert index.ledger.unknown_removals == UNKNOWN_REMOVALS.get(name, 0)
    assert index.ledger.block_tokens == stream.block_tokens
    assert index.ledger.complete


@pytest.mark.parametrize(("name", "how", "as_map"), [way for way in WAYS if way[0] != "vllm_restart"])
def test_the_end_equals_a_naive_replay(name: str, how: str, as_map: bool) -> None:
    """After the last batch exactly the blocks of an independent replay are held."""
    stream, index = recording(name), Index()
    for batch in stream.batches:
        index.apply(encoded(batch.payload, how, as_map=as_map))

    expected = _naive(stream)
    index.masks.sweep(BLOCKS_MAX)
    assert set(index.masks.of) == expected
    assert index.ledger.blocks == len(expected)


def test_a_block_stored_twice_outlives_its_first_removal() -> None:
    """SGLang's extra_key stores the same hashes a second time; they stay until both copies are gone."""
    stream, index = recording("sglang"), Index()
    asked = next(row for row in stream.rows if isinstance(row, Asked) and row.label.startswith("A1"))
    held = []
    for batch in stream.batches:
        index.apply(batch.payload)
        keys = index.keys(asked.prompts[0], asked, stream.block_tokens)
        held.append((batch.seq, index.masks.match(keys).get("r", 0)))

    assert dict(held)[7] == 5  # stored again
    assert dict(held)[12] == dict(held)[7]  # one copy evicted
    assert dict(held)[13] == 0  # the other too
    assert dict(held)[16] == 5  # after the flush, computed again


@pytest.mark.parametrize("name", [name for name in NAMES if recording(name).replay])
def test_replay_repeats_the_bytes(name: str) -> None:
    """A replay answers with the very bytes that were sent live, then with number -1: what continuity rests on."""
    stream = recording(name)
    live = {batch.seq: batch.payload for batch in stream.batches}
    *again, end = stream.replay

    assert [batch.payload for batch in again] == [live[batch.seq] for batch in again]
    assert again[-1].seq == max(live)
    assert (end.seq, end.payload) == (-1, b"")


@pytest.mark.parametrize("heard", range(13))
def test_the_recorded_restart_is_noticed(heard: int) -> None:
    """The old process was heard up to some batch, then the connection broke; the new process, whose first batch says
    the same hashes, is told from it, and nothing of the old one is left."""
    stream, index = recording("vllm_restart"), Index()
    *old, new = stream.batches
    follower = KvStream(replays=True)
    steps = list[Step]()

    def take() -> None:
        while (step := follower.next(1.0)) is not None:
            steps.append(step)
            if isinstance(step, Apply):
                for event in step.batch.events:
                    index.ledger.apply(event)
            elif isinstance(step, Clear):
                index.ledger.clear()

    def answer(batches: list[Batch]) -> None:
        """The replay asked for last."""
        ask = [step for step in steps if isinstance(step, RequestReplay)][-1]
        for batch in batches:
            if batch.seq >= ask.first:
                follower.on_replay_batch(ask.token, batch.seq, batch.payload, 1.0)
        follower.replay_ended(ask.token, 1.0)
        take()

    follower.on_connected(1.0)
    take()
    answer(old[:heard])
    assert not follower.suspended
    assert follower.grade is (Confidence.EXACT if heard else Confidence.CATCHING_UP)
    follower.on_disconnected("disconnected", 1.0)
    take()
    assert follower.suspended
    follower.on_connected(1.0)
    take()
    answer([new])
    while follower.phase is not Phase.FOLLOWING:
        answer([new])

    index.masks.sweep(BLOCKS_MAX)
    assert set(index.masks.of) == _naive(stream)
    assert follower.grade is Confidence.EXACT
    assert not follower.suspended
    assert follower.counts.restarts == min(heard, 1)


def test_every_engine_is_covered() -> None:
    """No fixture is lost unnoticed."""
    assert {recording(name).engine for name in NAMES} == {"vllm", "sglang", "dynamo mocker"}
    assert len(NAMES) == 10
