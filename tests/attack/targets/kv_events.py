"""Engines' KV events: one message of msgpack, in vLLM's and SGLang's shapes."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from router.core.kv_events.batch_decoder import MalformedBatch, decode
from tests.attack.target import Target
from tests.core.kv_events.test_fuzz import BIG, _apply, _bounded, _frames, _small_ledger


@cache
def _real() -> tuple[bytes, ...]:
    return tuple(_frames()[::97][:20])


def kv_events(data: bytes) -> None:
    """A message, applied to a ledger that holds what an engine told before: it stays within its limits."""
    with suppress(MalformedBatch):
        batch = decode(data)
        masks, ledger = _small_ledger()
        for payload in (*_real()[:3], data, data):
            _apply(ledger, decode(payload))
        _bounded(masks, ledger)
        assert batch.skipped >= 0
        ledger.close()


FIELDS = (
    b"BlockStored", b"BlockRemoved", b"AllBlocksCleared", b"block_hashes", b"parent_block_hash", b"token_ids",
    b"medium", b"block_size", b"lora_id", b"lora_name", b"extra_keys", b"group_idx", b"kv_cache_spec_kind",
    b"cache_salt", b"GPU", b"type", b"ts", b"events", b"data_parallel_rank", b"attn_dp_rank", b"locality",
    b"REMOTE", b"origin", b"REUSED",
)  # fmt: skip
WORDS = (
    *FIELDS,
    *(bytes((0xA0 + len(name),)) + name for name in FIELDS if len(name) < 32),
    *BIG,
    b"\xc0",
    b"\x90",
    b"\x80",
)

TARGETS = (Target(kv_events, WORDS, steps=(60_000, 600), held_bytes=(4 << 20, 2_000)),)
