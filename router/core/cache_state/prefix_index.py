"""Estimate of the blocks that each holder has, from the requests sent there: the map of holder_bitmap.py with an LRU
per holder.

The LRU (lru.py) contains touches, one for each use of a prefix, each with a stamp that orders them. Blocks under an
open lease are pinned: before an eviction, pins that are not newer than its touch are touched again. Blocks that only
open leases vouch for are *unproven*. They count as held, so that a burst with one prefix stays together, and they are
dropped if all those leases fail.

All sizes are limited: each holder has a capacity in blocks, and the index has a budget in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from router.core.cache_state.holder_bitmap import SWEEP_KEYS, HolderBitmap
from router.core.cache_state.lru import PrefixLru
from router.core.cache_state.speculative import SpeculativeBlocks

# Upper bounds, for an index after many changes; tests/core measures them with tracemalloc (CPython 3.11, 64-bit).
KEY_BYTES = 150  # one distinct key: map slot, key, mask
HELD_BYTES = 150  # one holder of a key: owner slot, value, position in a touch
RUN_KEYS = 16  # keys that a walk visits in the time that one holder's runs take
EVICT_KEYS = 64  # keys evicted at a time if the index is over its budget
RENEWS_MAX = 8  # pins moved out of the way of one eviction; the next eviction continues from there


Pin = tuple[int, list[int]]  # stamp, and keys of the prompt


@dataclass(slots=True)
class Holder:
    """State of one holder, read-only for others. `blocks_max` is its capacity, `owner` has its blocks."""

    bit: int
    blocks_max: int
    recency: PrefixLru = field(default_factory=PrefixLru)
    owner: dict[int, int] = field(init=False)  # the dict of `recency`
    pins: dict[int, Pin] = field(default_factory=dict)  # lease -> pin; stamps ascend
    unproven: SpeculativeBlocks = field(default_factory=SpeculativeBlocks)  # blocks in progress, not yet computed

    def __post_init__(self) -> None:
        self.owner = self.recency.owner

    def next_out(self, touches_max: int) -> list[tuple[int, float]]:
        """Return (blocks, time of last use) of the next evictions, oldest first, from at most `touches_max` uses of a
        prefix. The time is `recency.NEVER` for blocks without an expected next use."""
        return self.recency.oldest_few({pin[0] for pin in self.pins.values()}, touches_max)


class PrefixIndex:
    """Estimated blocks of all holders, with the longest match of every holder in one call. Limited in size."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._masks = HolderBitmap()
        self.holders: dict[str, Holder] = {}  # read-only for others
        self._next_stamp = 0
        self._now_s = 0.0  # time of the last touch

    # -- holders -------------------------------------------------------------------------------------------------

    def add(self, name: str, blocks_max: int) -> None:
        """Add a holder of at most `blocks_max` blocks. For a known name only the capacity changes."""
        if name in self.holders:
            self.resize(name, blocks_max)
            return
        self.holders[name] = Holder(self._masks.add(name), blocks_max)

    def remove(self, name: str) -> None:
        """Remove a holder at once. Later calls purge its keys, a few at a time."""
        holder = self.holders.pop(name, None)
        if holder is None:
            return
        self._masks.remove(name, holder.recency.owner)

    def clear(self, name: str) -> None:
        """Drop all blocks of a holder that stays (an engine restarted or was reset). Open leases keep no pin."""
        blocks_max = self.holders[name].blocks_max
        self.remove(name)
        self.add(name, blocks_max)

    def resize(self, name: str, blocks_max: int) -> None:
        """Set a new capacity, and evict blocks above it."""
        holder = self.holders[name]
        holder.blocks_max = blocks_max
        self._fit(holder)

    # -- queries -------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Count the leading `keys` that each holder has, for every holder with at least one.

        A walk over the masks visits every key once, for all holders. A comparison of a holder's runs with the prompt
        takes a tenth of that time for each key.
        """
        names = self._masks.holders(keys[0]) if keys else []
        if len(names) * RUN_KEYS > len(keys):
            return self._masks.match(keys)
        return {name: self.holders[name].recency.depth(keys) for name in names}

    def depth(self, name: str, keys: Sequence[int]) -> int:
        """Count the leading `keys` that one holder has."""
        return self.holders[name].recency.depth(keys)

    def holds(self, name: str, key: int) -> bool:
        """True if the holder has this block, regardless of its prefix."""
        return key in self.holders[name].recency.owner

    def holders_of(self, key: int) -> list[str]:
        """Return the holders of this block. A holder keeps no block without its prefix."""
        return self._masks.holders(key)

    def blocks(self, name: str) -> int:
        """Return the number of blocks of one holder."""
        return len(self.holders[name].recency)

    def capacity(self, name: str) -> int:
        """Return the capacity of this holder in blocks."""
        return self.holders[name].blocks_max

    @property
    def keys(self) -> int:
        """Number of distinct blocks of all holders."""
        return len(self._masks)

    @property
    def bytes_used(self) -> int:
        """Estimated memory in bytes, from measured costs per entry."""
        return len(self._masks.of) * KEY_BYTES + self._masks.held * HELD_BYTES

    # -- changes -------------------------------------------------------------------------------------------------

    def touch(self, name: str, keys: Sequence[int], now_s: float) -> None:
        """Record that the holder used this whole prefix now: all its blocks are held and most recent."""
        self.sweep(SWEEP_KEYS)
        holder = self.holders[name]
        stamp, _ = self._touch(holder, keys, now_s)
        if holder.unproven:
            holder.unproven.confirm(holder.recency, keys, (), stamp)
        self._fit(holder)

    def restore(self, name: str, keys: Sequence[int], at_s: float) -> int:
        """Restore blocks that the holder had before this router started, root to leaf. Returns the number of new
        blocks.

        They were last used at `at_s`, before all known blocks of the holder, and only fill its free capacity. The
        caller restores the most recently used prefix first.
        """
        holder = self.holders[name]
        room = min(
            holder.blocks_max - len(holder.owner), (self.bytes_max - self.bytes_used) // (KEY_BYTES + HELD_BYTES)
        )
        if room <= 0:
            return 0
        new = holder.recency.restore(keys[:room], at_s)
        self._masks.set_each(holder.bit, new)
        return len(new)

    def pin(self, name: str, lease: int, keys: list[int], now_s: float) -> None:
        """Touch these blocks, and protect them from eviction until `unpin` or `retract`. New blocks are unproven. The
        caller hands the list `keys` over."""
        if self._masks.pending_sweep:
            self.sweep(SWEEP_KEYS)
        holder = self.holders[name]
        stamp, new = self._touch(holder, keys, now_s)
        holder.pins[lease] = stamp, keys
        if keys and (new or holder.unproven):
            holder.unproven.add_lease(holder.recency, lease, keys, new, stamp)
        self._fit(holder)

    def extend(self, name: str, lease: int, more: Sequence[int], now_s: float) -> None:
        """Pin further keys of a pinned lease's prompt. They are appended to the list that `pin` got. A lease that ended
        or was forgotten is ignored."""
        holder = self.holders.get(name)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder is None or pin is None:
            return
        keys = pin[1]
        stamp, new = self._touch(holder, keys, now_s, more, pin[0])
        keys += more
        holder.pins[lease] = stamp, keys
        holder.unproven.extend(lease, keys, more, new)
        self._fit(holder)

    def unpin(self, name: str, lease: int, now_s: float, *, grown: Sequence[int] = ()) -> None:
        """End a lease with a computed prompt. Its blocks, and the `grown` ones after them, are touched again, as the
        engine does when it frees them. A holder that was removed or cleared in the meantime is ignored."""
        holder = self.holders.get(name)
        pin = holder.pins.get(lease) if holder else None
        if holder is not None and pin is not None:
            stamp, _ = self._touch(holder, pin[1], now_s, grown, pin[0])
            if holder.unproven:
                holder.unproven.end_run(lease)
                holder.unproven.confirm(holder.recency, pin[1], grown, stamp)
            del holder.pins[lease]
            self._fit(holder)

    def retract(self, name: str, lease: int) -> None:
        """End a lease without a computed prompt. Unproven blocks that no other lease computes are dropped."""
        holder = self.holders.get(name)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder is None or pin is None:
            return
        self.drop(name, holder.unproven.retract(lease, pin[1]))
        self._fit(holder)

    def release(self, name: str, first: int, last: int, used_s: float) -> None:
        """Mark blocks as not expected to be used again, from `first` to `last` of one prompt with this time of last
        use.

        Their eviction costs no later request. They stay held until they are used or evicted.
        """
        holder = self.holders.get(name)
        if holder is not None:
            holder.recency.release(first, last, used_s)

    def drop(self, name: str, keys: Sequence[int]) -> int:
        """Drop these blocks of the holder, at any position of a prefix. Returns the number of blocks that it had."""
        holder = self.holders[name]
        gone = [key for key in reversed(keys) if holder.recency.drop(key)]  # last keys first: most are at the end
        self._masks.unset_all(holder.bit, gone)
        return len(gone)

    def sweep(self, keys_max: int) -> int:
        """Purge at most `keys_max` keys of departed holders. Returns the number of keys that remain to be purged."""
        return self._masks.sweep(keys_max)

    # -- inside --------------------------------------------------------------------------------------------------

    def _touch(
        self, holder: Holder, keys: Sequence[int], now_s: float, grown: Sequence[int] = (), since: int = -1
    ) -> tuple[int, Sequence[int]]:
        """Touch keys of a holder. Returns the touch's stamp and the new keys.

        - `since`: stamp of an earlier touch of these keys, which are now followed by `grown`.
        """
        stamp, self._now_s = self._next_stamp, now_s
        self._next_stamp += 1
        if since < 0 or not keys:
            keys = keys or grown
            if keys and self._masks.set_all(holder.bit, keys):  # no holder has any, so neither has this one
                return stamp, holder.recency.begin(keys, stamp, now_s)
            new = holder.recency.touch(keys, stamp, now_s)
        else:
            new = holder.recency.retouch(since, keys, grown, stamp, now_s)
        if new and not self._masks.set_all(holder.bit, new):  # most are new to all holders
            self._masks.set_each(holder.bit, new)
        return stamp, new

    def _fit(self, holder: Holder) -> None:
        if len(holder.owner) > holder.blocks_max:
            self._shrink(holder, holder.blocks_max)
        if len(self._masks.of) * KEY_BYTES + self._masks.held * HELD_BYTES > self.bytes_max:
            self._fit_all()

    def _fit_all(self) -> None:
        while self.bytes_used > self.bytes_max and self.holders:
            if self._masks.pending_sweep:
                self.sweep(SWEEP_KEYS * 8)
                continue
            stocked = [(touch.at_s, h) for h in self.holders.values() if (touch := h.recency.oldest())]
            if not stocked:
                return
            _, oldest = min(stocked, key=itemgetter(0))
            self._shrink(oldest, max(0, len(oldest.recency) - EVICT_KEYS), pinned_too=True)

    def _shrink(self, holder: Holder, blocks_max: int, *, pinned_too: bool = False) -> None:
        """Evict least recently used blocks, leaf first, until `blocks_max` remain or only pinned ones do."""
        recency, owner = holder.recency, holder.owner
        retouches = 0 if pinned_too else min(RENEWS_MAX, len(holder.pins))
        while (over := len(owner) - blocks_max) > 0 and recency.order:
            pin = None if pinned_too else next(iter(holder.pins.items()), None)
            if pin is not None and pin[1][0] <= next(iter(recency.order)):
                if not retouches:
                    return  # every remaining block belongs to a running request
                retouches -= 1
                self._renew(holder, *pin)
                continue
            self._masks.unset_all(holder.bit, recency.evict(over))

    def _renew(self, holder: Holder, lease: int, pin: Pin) -> None:
        """Move the held part of a pinned prefix to the recent end. Blocks dropped in the meantime stay dropped."""
        (stamp, keys), recency = pin, holder.recency
        id_ = recency.order.get(stamp)
        if id_ is None or recency.touches[id_].live < len(keys):  # otherwise no other prompt shares it
            stamp, depth = -1, recency.depth(keys)  # the touch finds the runs again
            keys = keys if depth == len(keys) else keys[:depth]
        del holder.pins[lease]
        holder.pins[lease] = self._touch(holder, keys, self._now_s, since=stamp)[0], pin[1]
