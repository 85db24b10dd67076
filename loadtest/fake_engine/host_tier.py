"""CPU memory tier of an engine, as in vLLM's OffloadingConnector: blocks by key, and one link to the GPU.

Every block that the GPU computes is copied to the tier. It stays until other blocks need the space. The least recently
used block is evicted first; blocks that are being loaded are not evicted. A prefix hit on the GPU counts as a use in
the tier too.

Loads are sequential on the link. Each takes a fixed floor plus a time per token. If another request already loads a
block, a request waits for that load instead of loading it again. (vLLM 0.32: v1/kv_offload/cpu/manager.py,
gpu_worker.py; offloading/scheduler.py, _chunks_being_loaded.)

Copies to the tier take no time: they have their own stream, and no request waits for them. A load does not slow down
concurrent steps here, which makes those 4 to 10 % too short: docs/evidence/tiers.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLimits:
    """A tier's size and its link.

    5.24 us a token are 256 KiB at 50 GB/s on one link. With one link for each of two H100, a token of the same size
    takes 2.5 to 3.6 us (loadtest/data/transfers_h100.json).
    """

    tokens: int
    floor_s: float = 2e-3
    token_s: float = 5.24e-6

    def load_s(self, tokens: int) -> float:
        """Return the seconds that the link needs for `tokens`."""
        return self.floor_s + self.token_s * tokens


class HostTier:
    """Cached blocks. A key is any int that identifies a whole prefix, as in `KvPool`."""

    def __init__(self, limits: TierLimits, block_tokens: int) -> None:
        self.limits = limits
        self.blocks_max = limits.tokens // block_tokens
        self.loaded_tokens = self.loads = 0  # since the start
        self.queued_loads = 0  # loads that found the link busy
        self._block_tokens = block_tokens
        self._keys: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._loading: dict[int, int] = {}  # key -> loads in progress that need it
        self._free_s = 0.0  # time at which the link has finished all its loads

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def match(self, keys: Sequence[int], begin: int, end: int) -> int:
        """Return the number of consecutive blocks in the tier, from `begin` on and before `end`."""
        held, at = self._keys, begin
        while at < end and keys[at] in held:
            at += 1
        return at - begin

    def busy(self, keys: Sequence[int]) -> bool:
        """True if any of these blocks is being loaded."""
        return bool(self._loading) and not self._loading.keys().isdisjoint(keys)

    def touch(self, keys: Sequence[int]) -> None:
        """Mark these blocks as used, the first of them most recently, because more prompts share it."""
        held = self._keys
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)

    def hold(self, keys: Sequence[int]) -> None:
        """Protect these blocks, present or about to arrive, from eviction until the same number of `loaded` calls."""
        for key in keys:
            self._loading[key] = self._loading.get(key, 0) + 1

    def drop(self, keys: Sequence[int]) -> None:
        """Remove these blocks, which never arrived."""
        for key in keys:
            self._keys.pop(key, None)

    def load(self, keys: Sequence[int], now_s: float) -> float:
        """Start to load these blocks, which must be in the tier. Returns the time at which the load ends."""
        self.hold(keys)
        tokens = len(keys) * self._block_tokens
        self.queued_loads += now_s < self._free_s
        self._free_s = max(now_s, self._free_s) + self.limits.load_s(tokens)
        self.loads += 1
        self.loaded_tokens += tokens
        return self._free_s

    def release_loaded(self, keys: Sequence[int]) -> None:
        """Release these blocks after their load has ended or is no longer needed."""
        for key in keys:
            left = self._loading[key] - 1
            if left:
                self._loading[key] = left
            else:
                del self._loading[key]

    def store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Copy these blocks to the tier. Returns the new keys and the evicted keys.

        If there is not enough space, no block is copied.
        """
        held = self._keys
        fresh = [key for key in keys if key not in held]
        over = len(held) + len(fresh) - self.blocks_max
        if not fresh or len(fresh) > self.blocks_max:
            return [], []
        gone: list[int] = []
        if over > 0:
            wanted = set(keys)
            for key in held:
                if key not in self._loading and key not in wanted:
                    gone.append(key)
                    if len(gone) == over:
                        break
            else:
                return [], []
            for key in gone:
                del held[key]
        held.update(dict.fromkeys(fresh))
        return fresh, gone
