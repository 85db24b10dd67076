"""A prompt becomes a chain of block keys.

Each key is the xxh3-64 of one block's bytes seeded with the key before it; the first is seeded with the root, which
is the hash of the *identity*: model, adapter, cache salt. A key therefore names a whole prefix under one identity,
and a flat map from key to holders is a radix tree. Collisions would misdirect, never corrupt: the engine alone
decides what it reuses.

BLOCK_BYTES is ours, not the engine's: 512 bytes (about 128 tokens) keeps Python out of the per-64-bytes business.
400 KB take 0.14 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 512


def root_key(*identity: bytes) -> int:
    """Seed of every chain of this identity. Fields are length-prefixed, so ("a", "bc") is not ("ab", "c")."""
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(4, "big") + part for part in identity))


def chain(text: bytes, root: int) -> list[int]:
    """Keys of all full blocks of `text`, first block first; a partial last block has none."""
    view = memoryview(text)
    key, keys = root, []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = xxh3_64_intdigest(view[start : start + BLOCK_BYTES], key)
        keys.append(key)
    return keys


def key_at(text: bytes, keys: Sequence[int], root: int, end: int) -> int:
    """Key of the prefix `text[:end]`, wherever `end` falls; `keys` are those of `chain(text, root)`."""
    full = end // BLOCK_BYTES
    parent = keys[full - 1] if full else root
    tail = memoryview(text)[full * BLOCK_BYTES : end]
    # The extra byte keeps a tail of no bytes, or one that is a whole block elsewhere, apart from block keys.
    return xxh3_64_intdigest(bytes(tail) + b"\x00end", parent)


def answer_keys(end_key: int, answer_bytes: int) -> list[int]:
    """Keys that stand for an answer's blocks until its text is seen: they fill the cache, and match no prompt."""
    return [xxh3_64_intdigest(b"answer", end_key + i & _MASK) for i in range(-(-answer_bytes // BLOCK_BYTES))]


_MASK = (1 << 64) - 1
