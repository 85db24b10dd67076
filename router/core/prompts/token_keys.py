"""Cache of keys of token chains: for the next turn of a conversation, only new blocks are hashed.

A prompt of 100,000 tokens has 6,250 blocks of 16; hashing them all takes about 2 ms. So keys are remembered in runs of
RUN_BLOCKS. Each run is under one hash of all its ids, seeded like a block's key with the key before it: a run found is
128 keys for the price of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from router.core.prompts.block_keys import token_chain, token_root

RUN_BLOCKS = 128
ID_BYTES = 4


@dataclass(slots=True)
class TokenPrompt:
    """A prompt in the engine's token ids, and its keys by block size. Sizes differ between replicas."""

    ids: bytes  # uint32 little-endian
    adapter: str
    salt: bytes
    keys: dict[int, list[int]] = field(default_factory=dict)  # tokens per block -> key of each full block

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // ID_BYTES


class KeyCache:
    """Bounded cache. The least recently used runs are evicted."""

    def __init__(self, runs_max: int) -> None:
        self._runs_max = runs_max
        self._runs: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def find_leading_keys(self, prompt: TokenPrompt, block_tokens: int) -> list[int]:
        """Return the keys of all leading blocks that are remembered in whole runs."""
        key, keys = token_root(prompt.adapter, prompt.salt, block_tokens), list[int]()
        view, size, runs = memoryview(prompt.ids), RUN_BLOCKS * block_tokens * ID_BYTES, self._runs
        for start in range(0, len(view) - size + 1, size):
            name = xxh3_64_intdigest(view[start : start + size], key)
            run = runs.pop(name, None)
            if run is None:
                break
            runs[name] = run
            keys += run
            key = run[-1]
        return keys

    def learn(self, prompt: TokenPrompt, block_tokens: int, keys: list[int], known: int) -> None:
        """Store the whole chain of a prompt, of which `known` keys were found. The prompt keeps the list as its
        keys."""
        view, size, runs = memoryview(prompt.ids), RUN_BLOCKS * block_tokens * ID_BYTES, self._runs
        for first in range(known, len(keys) - RUN_BLOCKS + 1, RUN_BLOCKS):
            seed = keys[first - 1] if first else token_root(prompt.adapter, prompt.salt, block_tokens)
            start = first // RUN_BLOCKS * size
            runs[xxh3_64_intdigest(view[start : start + size], seed)] = keys[first : first + RUN_BLOCKS]
        while len(runs) > self._runs_max:
            del runs[next(iter(runs))]
        prompt.keys[block_tokens] = keys


def rest(prompt: TokenPrompt, block_tokens: int, known: Sequence[int]) -> list[int]:
    """Hash the blocks after the known ones. Pure, so that a long prompt can be hashed off the event loop."""
    root = known[-1] if known else token_root(prompt.adapter, prompt.salt, block_tokens)
    return token_chain(memoryview(prompt.ids)[len(known) * block_tokens * ID_BYTES :], block_tokens, root)
