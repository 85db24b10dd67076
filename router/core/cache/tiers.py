"""What is held behind the GPU: by an engine's own memory and disks, and by a store that several engines reach.

A replica's bit in `Masks` says what its GPU holds. Each tier behind it has another bit in the same map, which the walk
over holders passes over: a block that both have is one entry, as is a block that no tier has. An engine loads, behind
what its GPU has of a prompt, as many blocks in a row as some tier has, so a prompt is cut into three (vLLM 0.32,
offloading/scheduler.py, _maximal_prefix_lookup; SGLang's host hit behind the device's):

    keys of the prompt    k1   k2   k3   k4   k5   k6
    GPU                   x    x    .    .    x    .
    CPU                   .    x    x    .    x    x
    storage               .    .    .    x    .    .
                          gpu  gpu  cpu  sto  cpu  cpu      2 blocks on the GPU, 3 in the CPU's memory, 1 in storage

What a tier says of its copies is counted like the GPU's (engine_blocks.py), in a TierBlocks for each tier. Files and
buckets say what is stored and not what is deleted, so what they hold is a set, a BlockStore, that forgets the oldest
and what an engine did not find there. One BlockStore serves all replicas of a model that speak of a remote store: who
has said anything of it reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice, repeat
from operator import and_, or_

from router.core.cache.masks import STRIDE_KEYS, Masks

STORE_BLOCKS_MAX = 1 << 19  # blocks remembered of one store, of some 200 bytes each
STORE_TRIM = 1024  # blocks forgotten at a time: finding the oldest of a dict costs a scan
STORE_BLOCK_BYTES = 224  # bytes of one block of a store: a table slot each for hash and mask, and both numbers
_NONE = repeat(0)


class TierBlocks:
    """Blocks of one engine in one tier: its bit, and how many blocks beyond the first a key has."""

    def __init__(self, masks: Masks, name: str) -> None:
        self._masks, self.name = masks, name
        self.bit = masks.add(name, seen=False)
        self.blocks = 0  # blocks held that have a key
        self._more: dict[int, int] = {}

    def add(self, key: int) -> None:
        """One block more has this key."""
        self.blocks += 1
        if self._masks.of.get(key, 0) & self.bit:
            self._more[key] = self._more.get(key, 0) + 1
        else:
            self._masks.set(self.bit, key)

    def take(self, key: int) -> None:
        """One block less has it."""
        self.blocks -= 1
        more = self._more.get(key)
        if more is None:
            self._masks.unset(self.bit, key)
        elif more == 1:
            del self._more[key]
        else:
            self._more[key] = more - 1


class BlockStore:
    """Blocks of files or buckets, by the word of those that write them: at most `blocks_max`, the oldest go first."""

    def __init__(self, masks: Masks, name: str, blocks_max: int = STORE_BLOCKS_MAX) -> None:
        self._masks, self._name, self._blocks_max = masks, name, blocks_max
        self.bit = masks.add(name, seen=False)
        self._hashes: dict[int, int] = {}  # key -> the engine's name for it, oldest first

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def bytes_used(self) -> int:
        """Bytes that the blocks take, at most."""
        return len(self._hashes) * STORE_BLOCK_BYTES

    def add(self, keys: Iterable[int | None], hashes: Iterable[int]) -> bool:
        """Note that these blocks are there; those without a key are passed over. False, and no more is taken, where one
        is known under another hash: whoever says so looks for it under a name that the store does not have."""
        known = self._hashes
        for key, given in zip(keys, hashes, strict=True):
            if key is None:
                continue
            before = known.get(key)
            if before is None:
                known[key] = given
                self._masks.set(self.bit, key)
            elif before != given:
                return False
        if len(known) > self._blocks_max:
            self.drop(list(islice(known, max(STORE_TRIM, len(known) - self._blocks_max))))
        return True

    def drop(self, keys: Iterable[int | None]) -> int:
        """Note that these blocks are not there. Returns how many were believed to be."""
        gone = 0
        for key in keys:
            if key is not None and self._hashes.pop(key, None) is not None:
                self._masks.unset(self.bit, key)
                gone += 1
        return gone

    def close(self) -> None:
        """Forget the store; its bit goes back to the masks."""
        self._masks.remove(self._name, self._hashes)
        self._hashes = {}


class TierWalk:
    """Finds how much of one prompt tiers hold, for as many replicas as ask: each stride of its keys is looked up
    once."""

    def __init__(self, masks: Masks, keys: Sequence[int]) -> None:
        self._of, self._keys = masks.of, keys
        # Number -> (what has all of it, what has any of it, masks of its keys).
        self._strides: dict[int, tuple[int, int, list[int]]] = {}

    def behind(self, depth: int, bits: Sequence[int]) -> list[int]:
        """Blocks behind the first `depth` that each of these bits gives, the first that has a block giving it: as many
        as there are in a row."""
        counts, end, at = [0] * len(bits), len(self._keys), depth
        while at < end:
            before, quicker = at, 0
            for place, bit in enumerate(bits):
                if upto := self._run(bit, quicker, at) - at:
                    counts[place] += upto
                    at += upto
                    break
                quicker |= bit
            if at == before:
                break
        return counts

    def loaded(self, depth: int, bits: Sequence[int], chunk: int) -> list[int]:
        """The same where tiers keep `chunk` blocks together: whole chunks, the first being the one in which the GPU's
        blocks end, and none where fewer blocks than a chunk has are new (vLLM 0.32, offloading/scheduler.py,
        _lookup_complete_chunks)."""
        if chunk <= 1:
            return self.behind(depth, bits)
        known = depth % chunk
        new = sum(self.behind(depth - known, bits)) // chunk * chunk - known
        if new < chunk:
            return [0] * len(bits)
        counts = self.behind(depth, bits)
        for place, count in enumerate(counts):
            counts[place] = min(count, new)
            new -= counts[place]
        return counts

    def leading(self, bit: int) -> int:
        """Blocks from the prompt's first on that this bit has, whatever else has them."""
        return self._run(bit, 0, 0)

    def _run(self, bit: int, quicker: int, at: int) -> int:
        """Where a run of keys from this one on ends that have the bit, and none of the `quicker` ones."""
        end = len(self._keys)
        while at < end:
            whole, any_, held = self._stride(at // STRIDE_KEYS)
            first = at - at % STRIDE_KEYS
            if whole & bit and not any_ & quicker:
                at = first + len(held)
                continue
            while at < first + len(held) and held[at - first] & bit and not held[at - first] & quicker:
                at += 1
            if at < first + len(held):
                break
        return at

    def _stride(self, number: int) -> tuple[int, int, list[int]]:
        known = self._strides.get(number)
        if known is None:
            stride = self._keys[number * STRIDE_KEYS : (number + 1) * STRIDE_KEYS]
            held = list(map(self._of.get, stride, _NONE))
            known = self._strides[number] = reduce(and_, held), reduce(or_, held), held
        return known
