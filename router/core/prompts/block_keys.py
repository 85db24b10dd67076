"""Chains of block keys, one for each prompt.

Each key is the xxh3-64 of one block's bytes, seeded with the key before it. The first key is seeded with the root,
which is the hash of the *identity*: model, adapter, cache salt. A key therefore names a whole prefix under one
identity, and a flat map from key to holders is a radix tree. Collisions would misdirect, never corrupt: the engine
alone decides which blocks it reuses.

BLOCK_BYTES is the router's size, not the engine's: 512 bytes, about 128 tokens. A smaller block, such as 64 bytes,
would cost more Python operations for each prompt. 400 KB take 0.14 ms.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.core.prompts import gil_release
from router.core.types.requests import MessageBoundary, MessagePrefix, Prompt, RequestSpec

BLOCK_BYTES = 512
HASHED_BYTES = 512 << 10  # hashed in one go: a quarter of a millisecond
SPANS_MAX = 4  # latest assistant messages with a key each
UNSALTED_MAX = 256  # models with a cached identity
SIZES_MAX = 64  # cached sizes of engines' blocks
HEADS_MAX = 8  # chains kept for one prefix: one for each identity and each head (tools) that it was seen with

_BLOCKS = struct.Struct(f"{BLOCK_BYTES}s")
_LENGTH = struct.Struct(">I")


class Chain(Struct):
    """Keys of a prompt under its identity. Pure to compute, so long prompts can be hashed off the event loop."""

    keys: list[int]
    root: int
    end_key: int
    spans: tuple[tuple[int, int, int], ...]  # (key of the prompt before it, start, end) of assistant messages
    first_user_key: int


@dataclass(slots=True, eq=False)
class _Known:
    """The chain of one prefix under one identity and head."""

    keys: list[int]  # the first `full` keys are this chain's; the list is shared with longer chains
    full: int
    rest: bytes  # bytes after the last full block
    # Offset -> key at that offset: starts of assistant messages, end of the first user message. The offset of the
    # latter is negative if the head has template arguments: its key is computed without them.
    points: dict[int, int]

    @property
    def upto(self) -> int:
        """Offset at which the prefix ends. Points after it belong to other prompts."""
        return self.full * BLOCK_BYTES + len(self.rest)


def chain_of(ask: RequestSpec, model: str) -> Chain | None:
    """Hash the prompt of a request for `model`. None if the prompt is unknown. Safe in any thread, except for a prompt
    with a `joint`: it belongs to the thread that reads prompts with the same `BodyPrefixCache`."""
    prompt = ask.prompt
    if prompt is None:
        return None
    kind = b"ids" if prompt.bytes_per_token else b"text"
    root = (
        root_key(model.encode(errors="surrogatepass"), ask.salt, kind)
        if ask.salt
        else _compute_unsalted_root(model, kind)
    )
    if prompt.joint is not None:
        return _build_linked_chain(prompt, prompt.joint, root)
    return _build_full_chain(prompt, root)


def _build_full_chain(prompt: Prompt, root: int) -> Chain:
    text = prompt.text
    keys = chain(text, root)
    spans = prompt.assistant_spans[-SPANS_MAX:]
    starts = tuple([(key_at(text, keys, root, start), start, end) for start, end in spans])
    end_key = key_at(text, keys, root, len(text))
    first = prompt.first_user_end
    if prompt.arguments[1]:
        return Chain(keys, root, end_key, starts, _bare_key(text, root, prompt.arguments, first))
    return Chain(keys, root, end_key, starts, end_key if first == len(text) else key_at(text, keys, root, first))


def _bare_key(text: bytes, root: int, arguments: tuple[int, int], end: int) -> int:
    """Return the key of `text[:end]` without the template's arguments in it. A conversation keeps its place on the ring
    for any values of these arguments."""
    start, behind = arguments
    bare = text[:start] + text[behind:end]
    return key_at(bare, chain(bare, root), root, len(bare))


def _build_linked_chain(prompt: Prompt, joint: MessageBoundary, root: int) -> Chain | None:
    """Return the chain of a prompt with a known prefix, hashed from the end of that prefix on. Keys that later prompts
    may need are kept."""
    identity = (root, joint.head)
    known = joint.before.chains.get(identity) if joint.before else None
    first, bare = prompt.first_user_end, prompt.arguments[1] > 0
    if bare and known is not None and (first > known.upto or -first not in known.points):
        known = None  # the first user message ends after the known prefix
    if joint.before and known is None:
        whole = joint.whole()
        if whole is None:
            return None
        text, spans = whole.text, whole.assistant_spans
    else:
        text, spans = prompt.text, prompt.assistant_spans
    tail = _Tail(text, root, known)
    end_key = tail.key_at(prompt.size)
    starts = tuple([(tail.key_at(start), start, end) for start, end in spans[-SPANS_MAX:]])
    first_key = tail.bare_key(text, prompt.arguments, first) if bare else tail.key_at(first)
    news = joint.ends if known or not joint.before else [joint.before, *joint.ends]
    if news:
        tail.remember(news, identity, spans, {-first: first_key} if bare else {first: first_key})
    return Chain(tail.keys.copy() if news else tail.keys, root, end_key, starts, first_key)


class _Tail:
    """End of a prompt, hashed from the end of its known prefix on."""

    def __init__(self, text: bytes, root: int, known: _Known | None) -> None:
        self._root = root
        self._points: dict[int, int] = {}
        if known is None:
            self._text, self._at, self.keys = text, 0, chain(text, root)
            return
        self._text, self._at = known.rest + text, known.full * BLOCK_BYTES
        self._points = {at: key for at, key in known.points.items() if -known.upto <= at <= known.upto}
        self.keys = known.keys[: known.full]
        self.keys += chain(self._text, self.keys[-1] if self.keys else root)

    def key_at(self, end: int) -> int:
        """Return the key of the prompt up to this offset, equal to the result of the function `key_at`."""
        found = self._points.get(end)
        if found is not None:
            return found
        full = end // BLOCK_BYTES
        tail = self._text[full * BLOCK_BYTES - self._at : end - self._at]
        return xxh3_64_intdigest(tail + _END, self.keys[full - 1] if full else self._root)

    def bare_key(self, text: bytes, arguments: tuple[int, int], end: int) -> int:
        """Return the key of the prompt up to `end` without its template arguments. `text` is the whole prompt. It is
        read if the key is unknown."""
        found = self._points.get(-end)
        return _bare_key(text, self._root, arguments, end) if found is None else found

    def remember(
        self,
        ends: Sequence[MessagePrefix],
        identity: tuple[int, bytes],
        spans: Sequence[tuple[int, int]],
        first: dict[int, int],
    ) -> None:
        """Store the chains of these prefixes in them. They share a list of keys and a table of points. `first` is the
        point at the end of the first user message."""
        head = len(identity[1])
        points = self._points | {start: self.key_at(start) for start, _ in spans} | first
        for each in ends:
            size = head + each.size
            full = size // BLOCK_BYTES
            rest = self._text[full * BLOCK_BYTES - self._at : size - self._at]
            if len(each.chains) >= HEADS_MAX:
                del each.chains[next(iter(each.chains))]
            each.chains[identity] = _Known(self.keys, full, rest, points)


def ring_key(ask: RequestSpec, chain: Chain | None, session: str | None, body: bytes) -> str:
    """Return the input of the ring hash: the session hint, else the chain key after the first user message, else a hash
    of the body."""
    hint = session or ask.session
    if hint:
        return hint
    return format(chain.first_user_key if chain else root_key(body[:65_536]), "x")


def root_key(*identity: bytes) -> int:
    """Return the seed of every chain of this identity. Fields are length-prefixed, so ("a", "bc") is not ("ab",
    "c")."""
    return xxh3_64_intdigest(b"".join([_LENGTH.pack(len(part)) + part for part in identity]))


@lru_cache(maxsize=UNSALTED_MAX)
def _compute_unsalted_root(model: str, kind: bytes) -> int:
    """Return the seed of a model's chains without a salt. It is cached because nearly all requests are for a few
    models."""
    return root_key(model.encode(errors="surrogatepass"), b"", kind)


def chain(text: bytes, root: int) -> list[int]:
    """Return the keys of all full blocks of `text`, first block first. A partial last block has no key."""
    if len(text) > HASHED_BYTES:
        return _long_chain(text, root)
    key = root
    # Slices made in C and a list made by one expression take two thirds of the time of a loop that slices and appends.
    whole = memoryview(text)[: len(text) // BLOCK_BYTES * BLOCK_BYTES]
    return [key := xxh3_64_intdigest(block, key) for (block,) in _BLOCKS.iter_unpack(whole)]


def _long_chain(text: bytes, root: int) -> list[int]:
    """Return the same as `chain`, and let other threads run in between."""
    keys: list[int] = []
    for at in range(0, len(text), HASHED_BYTES):
        keys += chain(text[at : at + HASHED_BYTES], keys[-1] if keys else root)
        gil_release.release_gil()
    return keys


def key_at(text: bytes, keys: Sequence[int], root: int, end: int) -> int:
    """Return the key of the prefix `text[:end]` for any `end`. `keys` are those of `chain(text, root)`."""
    full = end // BLOCK_BYTES
    return xxh3_64_intdigest(text[full * BLOCK_BYTES : end] + _END, keys[full - 1] if full else root)


# Separates a tail of no bytes, or a tail that is a whole block in another prompt, from block keys.
_END = b"\x00end"


def answer_keys(end_key: int, answer_bytes: int) -> list[int]:
    """Return keys that stand for the blocks of an answer until its text is seen. They fill the cache and match no
    prompt. The count is rounded to the nearest block, since the partial last block of the prompt has no key."""
    blocks = (answer_bytes + BLOCK_BYTES // 2) // BLOCK_BYTES
    return [xxh3_64_intdigest(b"answer", end_key + i & _MASK) for i in range(blocks)]


_MASK = (1 << 64) - 1


def token_root(adapter: str, salt: bytes, block_tokens: int) -> int:
    """Return the identity of a chain over token ids: adapter name ("" is the base model), cache salt, and the engine's
    block size. The size is included since blocks of 16 and of 32 tokens are never the same block."""
    return root_key(b"tokens", adapter.encode(errors="surrogatepass"), salt, block_tokens.to_bytes(8, "big"))


def token_chain(ids: bytes | memoryview, block_tokens: int, root: int) -> list[int]:
    """Return the keys of all full blocks of `ids` (uint32, little-endian), first block first. A partial last block has
    no key."""
    width, key = 4 * block_tokens, root
    # Slices made in C and a list made by one expression are faster than a loop that slices.
    whole = memoryview(ids)[: len(ids) // width * width]
    return [key := xxh3_64_intdigest(block, key) for (block,) in _tokens_of(width).iter_unpack(whole)]


@lru_cache(maxsize=SIZES_MAX)
def _tokens_of(width: int) -> struct.Struct:
    """Return the struct that cuts ids into blocks of `width` bytes."""
    return struct.Struct(f"{width}s")
