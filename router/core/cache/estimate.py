"""What each holder is believed to hold by what was sent there: the map of masks.py, with one LRU per holder.

The LRU (recency.py) is of touches, one for each use of a prefix, each with a stamp that tells its age. Blocks under
an open lease are pinned: before anything is evicted, pins that are not newer than it are touched again. Blocks that
only open leases vouch for are *unproven*: they count as held, so that a burst of one prefix stays together, and are
gone when all those leases fail.

Nothing grows without a limit: each holder has a capacity in blocks, and the whole a budget in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from router.core.cache.masks import SWEEP_KEYS, Masks
from router.core.cache.recency import Recency

# Upper bounds, for an index after much churn; tests/core measures them with tracemalloc (CPython 3.11, 64-bit).
KEY_BYTES = 150  # one distinct key: map slot, key, mask
HELD_BYTES = 150  # one holder of a key: owner slot, value, place in a touch
RUN_KEYS = 16  # a walk over so many keys takes as long as the runs of one holder
UNPROVEN_FEW = 4  # times as many keys are looked at in the time that asking for one's owner takes
EVICT_KEYS = 64  # keys evicted at a time where the whole is over its budget
RENEWS_MAX = 8  # pins moved out of the way of one eviction: the next one goes on from there


Pin = tuple[int, list[int], list[int]]  # stamp, keys, and those of them that the lease vouches for, root first


@dataclass(slots=True)
class Holder:
    """What is known of one holder, for others to read: `blocks_max` is its capacity, `owner` has its blocks."""

    bit: int
    blocks_max: int
    recency: Recency = field(default_factory=Recency)
    owner: dict[int, int] = field(init=False)  # the recency's own
    pins: dict[int, Pin] = field(default_factory=dict)  # lease -> pin; stamps ascend
    unproven: dict[int, int] = field(default_factory=dict)  # key under way, never seen computed -> its open leases

    def __post_init__(self) -> None:
        self.owner = self.recency.owner

    def next_out(self, touches_max: int) -> list[tuple[int, float]]:
        """(blocks, when they were last used) of what would be evicted next, oldest first, as far as so many uses of a
        prefix tell; `recency.NEVER` for blocks that nobody is expected to ask for again."""
        return self.recency.oldest_few({pin[0] for pin in self.pins.values()}, touches_max)


class PrefixIndex:
    """Longest match of every holder in one call; bounded by construction."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._masks = Masks()
        self.holders: dict[str, Holder] = {}  # not to be changed by others
        self._next_stamp = 0
        self._now_s = 0.0  # time of the last touch

    # -- holders -------------------------------------------------------------------------------------------------

    def add(self, name: str, blocks_max: int) -> None:
        """Make room for a holder of at most `blocks_max` blocks; known names only change their capacity."""
        if name in self.holders:
            self.resize(name, blocks_max)
            return
        self.holders[name] = Holder(self._masks.add(name), blocks_max)

    def remove(self, name: str) -> None:
        """Forget a holder at once; its keys are purged a few at a time by later calls."""
        holder = self.holders.pop(name, None)
        if holder is None:
            return
        self._masks.remove(name, holder.recency.owner)

    def clear(self, name: str) -> None:
        """The holder stays, its blocks are gone (an engine restarted or was reset). Open leases keep no pin."""
        blocks_max = self.holders[name].blocks_max
        self.remove(name)
        self.add(name, blocks_max)

    def resize(self, name: str, blocks_max: int) -> None:
        """A new capacity; what no longer fits is evicted."""
        holder = self.holders[name]
        holder.blocks_max = blocks_max
        self._fit(holder)

    # -- questions -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading `keys` each holder has, for every holder that has at least one.

        A walk over the masks looks at every key once, for all holders; a holder's runs are compared with the prompt as
        a whole, ten times as fast.
        """
        names = self._masks.holders(keys[0]) if keys else []
        if len(names) * RUN_KEYS > len(keys):
            return self._masks.match(keys)
        return {name: self.holders[name].recency.depth(keys) for name in names}

    def depth(self, name: str, keys: Sequence[int]) -> int:
        """How many leading `keys` one holder has."""
        return self.holders[name].recency.depth(keys)

    def holds(self, name: str, key: int) -> bool:
        """Whether this holder has this one block, its prefix aside."""
        return key in self.holders[name].recency.owner

    def holders_of(self, key: int) -> list[str]:
        """Who has this one block, which nobody keeps without what is before it."""
        return self._masks.holders(key)

    def blocks(self, name: str) -> int:
        """Blocks held by one holder."""
        return len(self.holders[name].recency)

    def capacity(self, name: str) -> int:
        """Blocks this holder may have."""
        return self.holders[name].blocks_max

    @property
    def keys(self) -> int:
        """Distinct blocks known, of all holders."""
        return len(self._masks)

    @property
    def bytes_used(self) -> int:
        """Estimate of memory held, from measured costs per entry."""
        return len(self._masks.of) * KEY_BYTES + self._masks.held * HELD_BYTES

    # -- changes -------------------------------------------------------------------------------------------------

    def touch(self, name: str, keys: Sequence[int], now_s: float) -> None:
        """The holder used this whole prefix now: all its blocks are held and most recent."""
        self.sweep(SWEEP_KEYS)
        holder = self.holders[name]
        stamp, _ = self._touch(holder, keys, now_s)
        if holder.unproven:
            self._prove(holder, stamp)
        self._fit(holder)

    def restore(self, name: str, keys: Sequence[int], at_s: float) -> int:
        """What the holder had before this router came, and last used then, root to leaf: older than anything that is
        known of it here, as far as there is room. To be called with what was used last first. Returns how many blocks
        are new."""
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
        """Touch, and keep these blocks from eviction until `unpin` or `retract`; new ones are unproven. `keys` are
        ours from now on."""
        if self._masks.dying:
            self.sweep(SWEEP_KEYS)
        holder = self.holders[name]
        stamp, new = self._touch(holder, keys, now_s)
        holder.pins[lease] = (stamp, keys, self._vouch(holder, keys, new, stamp) if keys else [])
        self._fit(holder)

    def unpin(self, name: str, lease: int, now_s: float, *, grown: Sequence[int] = ()) -> None:
        """End of a lease whose prompt was computed: its blocks are touched once more, as the engine does when it
        frees them, and those that have `grown` behind them. A holder removed or cleared meanwhile is left alone."""
        holder = self.holders.get(name)
        pin = holder.pins.get(lease) if holder else None
        if holder is not None and pin is not None:
            stamp, _ = self._touch(holder, pin[1], now_s, grown, pin[0])
            if holder.unproven:
                self._prove(holder, stamp)
            del holder.pins[lease]
            self._fit(holder)

    def retract(self, name: str, lease: int) -> None:
        """End of a lease whose prompt was never computed: unproven blocks that no other lease is computing are not
        held after all."""
        holder = self.holders.get(name)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder is None or pin is None:
            return
        gone, unproven = [], holder.unproven
        for key in pin[1]:
            leases = unproven.get(key)
            if leases == 1:
                del unproven[key]
                gone.append(key)
            elif leases is not None:
                unproven[key] = leases - 1
        self.drop(name, gone)
        self._fit(holder)

    def release(self, name: str, first: int, last: int, used_s: float) -> None:
        """Nobody is expected to ask for these blocks again, from `first` to `last` of one prompt that was used last at
        this time: evicting them costs nobody anything. They are held as before, until they are used or evicted."""
        holder = self.holders.get(name)
        if holder is not None:
            holder.recency.release(first, last, used_s)

    def drop(self, name: str, keys: Sequence[int]) -> int:
        """The holder no longer has these blocks, wherever in a prefix they are. Returns how many it had."""
        holder = self.holders[name]
        gone = [key for key in reversed(keys) if holder.recency.drop(key)]  # last keys first: most were at the end
        self._masks.unset_all(holder.bit, gone)
        return len(gone)

    def sweep(self, keys_max: int) -> int:
        """Purge at most `keys_max` keys of departed holders; returns how many keys are left to purge."""
        return self._masks.sweep(keys_max)

    # -- inside --------------------------------------------------------------------------------------------------

    def _touch(
        self, holder: Holder, keys: Sequence[int], now_s: float, grown: Sequence[int] = (), since: int = -1
    ) -> tuple[int, Sequence[int]]:
        """Returns the touch's stamp and the keys that are new. `since`: these keys were touched then, and `grown` are
        behind them now."""
        stamp, self._now_s = self._next_stamp, now_s
        self._next_stamp += 1
        if since < 0 or not keys:
            new = holder.recency.touch(keys or grown, stamp, now_s)
        else:
            new = holder.recency.retouch(since, keys, grown, stamp, now_s)
        if new and not self._masks.set_all(holder.bit, new):  # most are new to all
            self._masks.set_each(holder.bit, new)
        return stamp, new

    def _vouch(self, holder: Holder, keys: list[int], new: Sequence[int], stamp: int) -> list[int]:
        """One more lease vouches for what is new among the keys just touched, and for what is under way already.
        Returns both."""
        unproven = holder.unproven
        under_way = self._under_way(holder, stamp) if unproven else ()
        if not under_way:  # nearly always: what the prompt shares with others was computed before
            for key in new:
                unproven[key] = 1
            return list(new)
        for key in under_way:
            unproven[key] += 1
        for key in new:
            unproven[key] = unproven[key] if key in under_way else 1
        return [key for key in keys if key in unproven]

    def _prove(self, holder: Holder, stamp: int) -> None:
        unproven = holder.unproven
        proven = self._under_way(holder, stamp)
        if len(proven) == len(unproven):
            unproven.clear()
            return
        for key in proven:
            del unproven[key]

    def _under_way(self, holder: Holder, stamp: int) -> Collection[int]:
        """The unproven among the keys that were just touched with this stamp."""
        recency = holder.recency
        id_ = recency.order.get(stamp)
        if id_ is None:
            return ()
        touch, owner, unproven = recency.touches[id_], holder.owner, holder.unproven
        if len(unproven) * UNPROVEN_FEW < touch.live:
            return {key for key in unproven if owner.get(key) == id_}
        found = unproven.keys() & touch.keys  # looks at each of the touch's, however many are unproven
        return found if touch.live == len(touch.keys) else {key for key in found if owner[key] == id_}

    def _fit(self, holder: Holder) -> None:
        if len(holder.owner) > holder.blocks_max:
            self._shrink(holder, holder.blocks_max)
        if len(self._masks.of) * KEY_BYTES + self._masks.held * HELD_BYTES > self.bytes_max:
            self._fit_all()

    def _fit_all(self) -> None:
        while self.bytes_used > self.bytes_max and self.holders:
            if self._masks.dying:
                self.sweep(SWEEP_KEYS * 8)
                continue
            stocked = [(touch.at_s, h) for h in self.holders.values() if (touch := h.recency.oldest())]
            if not stocked:
                return
            _, oldest = min(stocked, key=itemgetter(0))
            self._shrink(oldest, max(0, len(oldest.recency) - EVICT_KEYS), pinned_too=True)

    def _shrink(self, holder: Holder, blocks_max: int, *, pinned_too: bool = False) -> None:
        """Evict least recently used blocks, leaf first, until `blocks_max` are left or only pinned ones are."""
        recency, owner = holder.recency, holder.owner
        retouches = 0 if pinned_too else min(RENEWS_MAX, len(holder.pins))
        while (over := len(owner) - blocks_max) > 0 and recency.order:
            pin = None if pinned_too else next(iter(holder.pins.items()), None)
            if pin is not None and pin[1][0] <= next(iter(recency.order)):
                if not retouches:
                    return  # every block left belongs to a running request
                retouches -= 1
                self._renew(holder, *pin)
                continue
            self._masks.unset_all(holder.bit, recency.evict(over))

    def _renew(self, holder: Holder, lease: int, pin: Pin) -> None:
        """Move what is still there of a pinned prefix to the recent end; what was dropped meanwhile stays dropped."""
        stamp, keys, recency = pin[0], pin[1], holder.recency
        id_ = recency.order.get(stamp)
        if id_ is None or recency.touches[id_].live < len(keys):  # otherwise no other prompt ran through it
            stamp, depth = -1, recency.depth(keys)  # the touch finds their runs again
            keys = keys if depth == len(keys) else keys[:depth]
        del holder.pins[lease]
        holder.pins[lease] = (self._touch(holder, keys, self._now_s, since=stamp)[0], *pin[1:])
