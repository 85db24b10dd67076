"""Blocks below the GPU: in an engine's own memory and disks, and in a store that several engines share.

A replica's bit in `HolderBitmap` is for its GPU. Each tier below it has another bit in the same map, which the walk
over holders ignores. A block that both have is one entry, the same as a block that no tier has. After the GPU's part of
a prompt, an engine loads as many consecutive blocks as any tier has. A prompt is therefore divided into three parts
(vLLM
0.32, offloading/scheduler.py, _maximal_prefix_lookup; SGLang's host hit after the device's):

    keys of the prompt    k1   k2   k3   k4   k5   k6
    GPU                   x    x    .    .    x    .
    CPU                   .    x    x    .    x    x
    storage               .    .    .    x    .    .
                          gpu  gpu  cpu  sto  cpu  cpu      2 blocks on the GPU, 3 in the CPU's memory, 1 in storage

A tier's reported copies are counted like the GPU's (engine_blocks.py), in a TierBlocks for each tier. Files and buckets
report stored blocks but not deleted ones. Their blocks are therefore a set, a BlockStore, which drops the oldest blocks
and those that an engine did not find. One BlockStore serves all replicas of a model that report a remote store: a
replica that reported any block of it can reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import islice, repeat
from operator import and_, or_

from router.core.cache_state.holder_bitmap import STRIDE_KEYS, HolderBitmap

STORE_BLOCKS_MAX = 1 << 19  # blocks remembered of one store, of about 200 bytes each
STORE_TRIM = 1024  # blocks forgotten at a time: finding the oldest entry of a dict costs a scan
STORE_BLOCK_BYTES = 224  # memory of one block of a store: a table slot each for hash and mask, and both numbers
_NONE = repeat(0)


class TierBlocks:
    """Blocks of one engine in one tier: its bit, and for each key the number of blocks beyond the first."""

    def __init__(self, masks: HolderBitmap, name: str) -> None:
        self._masks, self.name = masks, name
        self.bit = masks.add(name, seen=False)
        self.blocks = 0  # held blocks that have a key
        self._more: dict[int, int] = {}

    def add(self, key: int) -> None:
        """Add one block with this key."""
        self.blocks += 1
        if self._masks.of.get(key, 0) & self.bit:
            self._more[key] = self._more.get(key, 0) + 1
        else:
            self._masks.set(self.bit, key)

    def take(self, key: int) -> None:
        """Remove one block with this key."""
        self.blocks -= 1
        more = self._more.get(key)
        if more is None:
            self._masks.unset(self.bit, key)
        elif more == 1:
            del self._more[key]
        else:
            self._more[key] = more - 1


class BlockStore:
    """Blocks of files or buckets, as reported by their writers: at most `blocks_max`, the oldest are dropped first."""

    def __init__(self, masks: HolderBitmap, name: str, blocks_max: int = STORE_BLOCKS_MAX) -> None:
        self._masks, self._name, self._blocks_max = masks, name, blocks_max
        self.bit = masks.add(name, seen=False)
        self._hashes: dict[int, int] = {}  # key -> the engine's hash of it, oldest first

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def bytes_used(self) -> int:
        """Upper bound of the memory of the blocks in bytes."""
        return len(self._hashes) * STORE_BLOCK_BYTES

    def add(self, keys: Iterable[int | None], hashes: Iterable[int]) -> bool:
        """Add blocks to the store; blocks without a key are skipped.

        Returns False, and adds no further block, if one is known under another hash. The reporting replica then looks
        it up under a name that the store does not have.
        """
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
        """Remove blocks from the store. Returns the number that it had."""
        gone = 0
        for key in keys:
            if key is not None and self._hashes.pop(key, None) is not None:
                self._masks.unset(self.bit, key)
                gone += 1
        return gone

    def close(self) -> None:
        """Remove the store. Its bit returns to the masks."""
        self._masks.remove(self._name, self._hashes)
        self._hashes = {}


class TierMatch:
    """Counts the blocks of one prompt in tiers, for any number of replicas. Each stride of keys is looked up only
    once."""

    def __init__(self, masks: HolderBitmap, keys: Sequence[int]) -> None:
        self._of, self._keys = masks.of, keys
        # Number -> (mask of holders of all its keys, mask of holders of any of them, masks of its keys).
        self._strides: dict[int, tuple[int, int, list[int]]] = {}

    def count_following(self, depth: int, bits: Sequence[int]) -> list[int]:
        """Count the consecutive blocks after the first `depth` that each of these bits provides. The first bit that has
        a block provides it."""
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

    def count_loadable(self, depth: int, bits: Sequence[int], chunk: int) -> list[int]:
        """Do the same as `behind` for tiers that keep `chunk` blocks together.

        Only whole chunks count, starting with the chunk in which the GPU's blocks end. No block counts if fewer new
        ones than a chunk are available (vLLM 0.32, offloading/scheduler.py, _lookup_complete_chunks).
        """
        if chunk <= 1:
            return self.count_following(depth, bits)
        known = depth % chunk
        new = sum(self.count_following(depth - known, bits)) // chunk * chunk - known
        if new < chunk:
            return [0] * len(bits)
        counts = self.count_following(depth, bits)
        for place, count in enumerate(counts):
            counts[place] = min(count, new)
            new -= counts[place]
        return counts

    def count_leading(self, bit: int) -> int:
        """Count the blocks from the beginning of the prompt that this bit has, regardless of other bits."""
        return self._run(bit, 0, 0)

    def _run(self, bit: int, quicker: int, at: int) -> int:
        """Return the end of a run of keys, from this one on, that have the bit and none of the `quicker` ones."""
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
