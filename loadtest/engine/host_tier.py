"""CPU memory behind an engine's GPU, as vLLM's OffloadingConnector keeps it: blocks by key, and one link to the GPU.

Every block that the GPU computes is copied here, and stays until others need its room: the least recently used goes
first, except for those that are being loaded. What a prompt finds on the GPU counts as used here too. Loads follow each
other on the link, each with a floor and so much a token; a request whose blocks another one loads waits for that load
instead of loading them again. (vLLM 0.32: v1/kv_offload/cpu/manager.py, gpu_worker.py; offloading/scheduler.py,
_chunks_being_loaded.) Copies to here take no time: they have a stream of their own, and nobody waits for them.
Steps that run beside a load take as long as ever, which is 4 to 10 % too short: docs/evidence/tiers.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLimits:
    """A tier's size, and its link. 5.24 us a token are 256 KiB at 50 GB/s: one link. Over a link for each of two H100 a
    token of as many bytes takes 2.5 to 3.6 us (loadtest/data/transfers_h100.json)."""

    tokens: int
    floor_s: float = 2e-3
    token_s: float = 5.24e-6

    def load_s(self, tokens: int) -> float:
        """Seconds that the link needs for so many tokens."""
        return self.floor_s + self.token_s * tokens


class HostTier:
    """Keys are any ints that name a whole prefix, as in KvPool."""

    def __init__(self, limits: TierLimits, block_tokens: int) -> None:
        self.limits = limits
        self.blocks_max = limits.tokens // block_tokens
        self.loaded_tokens = self.loads = 0  # since the start
        self.queued_loads = 0  # loads that found the link busy
        self._block_tokens = block_tokens
        self._keys: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._loading: dict[int, int] = {}  # key -> loads under way that need it
        self._free_s = 0.0  # when the link has done all that it was asked

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def match(self, keys: Sequence[int], begin: int, end: int) -> int:
        """How many blocks in a row it holds of those from `begin` on, before `end`."""
        held, at = self._keys, begin
        while at < end and keys[at] in held:
            at += 1
        return at - begin

    def busy(self, keys: Sequence[int]) -> bool:
        """Whether any of these is being loaded."""
        return bool(self._loading) and not self._loading.keys().isdisjoint(keys)

    def touch(self, keys: Sequence[int]) -> None:
        """These were used: the first of them most recently, since others share it."""
        held = self._keys
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)

    def hold(self, keys: Sequence[int]) -> None:
        """Keep these, which it has or is about to have, until as many calls of `loaded`."""
        for key in keys:
            self._loading[key] = self._loading.get(key, 0) + 1

    def drop(self, keys: Sequence[int]) -> None:
        """These never came."""
        for key in keys:
            self._keys.pop(key, None)

    def load(self, keys: Sequence[int], now_s: float) -> float:
        """Begin to load these, which it holds; returns when that will be done."""
        self.hold(keys)
        tokens = len(keys) * self._block_tokens
        self.queued_loads += now_s < self._free_s
        self._free_s = max(now_s, self._free_s) + self.limits.load_s(tokens)
        self.loads += 1
        self.loaded_tokens += tokens
        return self._free_s

    def loaded(self, keys: Sequence[int]) -> None:
        """A load of these is over, or nobody wants it any more."""
        for key in keys:
            left = self._loading[key] - 1
            if left:
                self._loading[key] = left
            else:
                del self._loading[key]

    def store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take copies of these. Returns (which of them are new, which made room); without room nothing is taken."""
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
