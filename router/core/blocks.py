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
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from router.core.facts import Ask

BLOCK_BYTES = 512
SPANS_MAX = 4  # latest assistant messages whose keys are made


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's keys under its identity. Pure to compute, so long prompts can be hashed off the event loop."""

    keys: list[int]
    root: int
    end_key: int
    spans: tuple[tuple[int, int, int], ...]  # (key of the prompt before it, start, end) of assistant messages
    first_user_key: int


def chain_of(ask: Ask, model: str) -> Chain | None:
    """Hash the prompt of a request for `model`; None where it is unknown. Safe in any thread."""
    prompt = ask.prompt
    if prompt is None:
        return None
    kind = b"ids" if prompt.bytes_per_token else b"text"
    root = root_key(model.encode(errors="surrogatepass"), ask.salt, kind)
    text = prompt.text
    keys = chain(text, root)
    spans = tuple((key_at(text, keys, root, start), start, end) for start, end in prompt.assistant_spans[-SPANS_MAX:])
    end_key = key_at(text, keys, root, len(text))
    return Chain(keys, root, end_key, spans, key_at(text, keys, root, prompt.first_user_end))


def ring_key(ask: Ask, chain: Chain | None, session: str | None, body: bytes) -> str:
    """What the ring hashes: the session hint, else the chain key behind the first user message, else the body."""
    hint = session or ask.session
    if hint:
        return hint
    return format(chain.first_user_key if chain else root_key(body[:65_536]), "x")


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


def token_root(adapter: str, salt: bytes, block_tokens: int) -> int:
    """Identity of a chain over token ids: adapter name ("" is the base model), cache salt, and the engine's block
    size, since blocks of 16 and of 32 tokens are never the same block.
    """
    return root_key(b"tokens", adapter.encode(errors="surrogatepass"), salt, block_tokens.to_bytes(8, "big"))


def token_chain(ids: bytes | memoryview, block_tokens: int, root: int) -> list[int]:
    """Keys of all full blocks of `ids` (uint32, little-endian), first block first; a partial last block has none."""
    width = 4 * block_tokens
    key, keys = root, []
    for start in range(0, len(ids) - width + 1, width):
        key = xxh3_64_intdigest(ids[start : start + width], key)
        keys.append(key)
    return keys
