"""What each holder is believed to hold by what was sent there: the map of masks.py, with one LRU per holder.

Recency is kept per *touch* (one prompt, root to leaf), not per block: `owner[key]` names the touch that used the key
last, so touching 800 blocks is two C-level dict operations. The LRU order of blocks is: oldest touch first, and
within one touch leaf first, since a prefix without its leaf is useful and a leaf without its prefix is not (vLLM
frees blocks in that order too). Blocks under an open lease are pinned: before anything is evicted, pins that are
not newer than it are touched again. Blocks that only open leases vouch for are *unproven*: they count as held, so
that a burst of one prefix stays together, and are gone when all those leases fail.

Nothing grows without a limit: each holder has a capacity in blocks, and the whole a budget in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from router.core.masks import SWEEP_KEYS, Masks

# Upper bounds, for an index after much churn; tests/core measures them with tracemalloc (CPython 3.11, 64-bit).
KEY_BYTES = 150  # one distinct key: map slot, key, mask
HELD_BYTES = 150  # one holder of a key: owner slot, value, place in a touch


@dataclass(slots=True)
class _Touch:
    keys: list[int]
    live: int  # keys whose owner is this touch
    at_s: float


@dataclass(slots=True)
class _Holder:
    bit: int
    blocks_max: int
    owner: dict[int, int] = field(default_factory=dict)  # key -> id of the touch that used it last
    touches: dict[int, _Touch] = field(default_factory=dict)  # oldest first
    pins: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # lease -> (touch, keys), oldest first
    unproven: dict[int, int] = field(default_factory=dict)  # key under way, never seen computed -> its open leases


class PrefixIndex:
    """Longest match of every holder in one call; bounded by construction."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._masks = Masks()
        self._holders: dict[str, _Holder] = {}
        self._next_touch = 0
        self._now_s = 0.0  # of the last touch

    # -- holders -------------------------------------------------------------------------------------------------

    def add(self, name: str, blocks_max: int) -> None:
        """Make room for a holder of at most `blocks_max` blocks; known names only change their capacity."""
        if name in self._holders:
            self.resize(name, blocks_max)
            return
        self._holders[name] = _Holder(self._masks.add(name), blocks_max)

    def remove(self, name: str) -> None:
        """Forget a holder at once; its keys are purged a few at a time by later calls."""
        holder = self._holders.pop(name, None)
        if holder is None:
            return
        self._masks.remove(name, holder.owner)

    def clear(self, name: str) -> None:
        """The holder stays, its blocks are gone (an engine restarted or was reset). Open leases keep no pin."""
        blocks_max = self._holders[name].blocks_max
        self.remove(name)
        self.add(name, blocks_max)

    def resize(self, name: str, blocks_max: int) -> None:
        """A new capacity; what no longer fits is evicted."""
        holder = self._holders[name]
        holder.blocks_max = blocks_max
        self._fit(holder)

    # -- questions -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading `keys` each holder has, for every holder that has at least one."""
        return self._masks.match(keys)

    def holds(self, name: str, key: int) -> bool:
        """Whether this holder has this one block, its prefix aside."""
        return key in self._holders[name].owner

    def blocks(self, name: str) -> int:
        """Blocks held by one holder."""
        return len(self._holders[name].owner)

    def capacity(self, name: str) -> int:
        """Blocks this holder may have."""
        return self._holders[name].blocks_max

    def oldest_s(self, name: str) -> float | None:
        """When the blocks that would be evicted next were last used; None when there are none."""
        holder = self._holders[name]
        pinned = {touch_id for touch_id, _ in holder.pins.values()}
        for touch_id, touch in holder.touches.items():
            if touch_id not in pinned:
                return touch.at_s
        return None

    @property
    def keys(self) -> int:
        """Distinct blocks known, of all holders."""
        return len(self._masks)

    @property
    def bytes_used(self) -> int:
        """Estimate of memory held, from measured costs per entry."""
        return len(self._masks) * KEY_BYTES + self._masks.held * HELD_BYTES

    # -- changes -------------------------------------------------------------------------------------------------

    def touch(self, name: str, keys: Sequence[int], now_s: float) -> None:
        """The holder used this whole prefix now: all its blocks are held and most recent."""
        self.sweep(SWEEP_KEYS)
        holder = self._holders[name]
        self._touch(holder, keys, now_s)
        self._prove(holder, keys)
        self._fit(holder)

    def pin(self, name: str, lease: int, keys: Sequence[int], now_s: float) -> None:
        """Touch, and keep these blocks from eviction until `unpin` or `retract`; new ones are unproven."""
        self.sweep(SWEEP_KEYS)
        holder = self._holders[name]
        held, owner, unproven = list(keys), holder.owner, holder.unproven
        for key in [key for key in held if key not in owner or key in unproven]:
            unproven[key] = unproven.get(key, 0) + 1
        holder.pins[lease] = (self._touch(holder, held, now_s), held)
        self._fit(holder)

    def unpin(self, name: str, lease: int, now_s: float, *, grown: Sequence[int] = ()) -> None:
        """End of a lease whose prompt was computed: its blocks are touched once more, as the engine does when it
        frees them, and those that have `grown` behind them. A holder removed or cleared meanwhile is left alone."""
        holder = self._holders.get(name)
        pin = holder.pins.pop(lease, None) if holder else None
        if holder is not None and pin is not None:
            self._touch(holder, [*pin[1], *grown], now_s)
            self._prove(holder, pin[1])
            self._fit(holder)

    def retract(self, name: str, lease: int) -> None:
        """End of a lease whose prompt was never computed: unproven blocks that no other lease is computing are not
        held after all."""
        holder = self._holders.get(name)
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

    def drop(self, name: str, keys: Iterable[int]) -> int:
        """The holder no longer has these blocks, wherever in a prefix they are. Returns how many it had."""
        holder = self._holders[name]
        dropped = 0
        for key in keys:
            touch_id = holder.owner.get(key)
            if touch_id is not None:
                self._forget(holder, key)
                self._disown(holder, touch_id, 1)
                dropped += 1
        return dropped

    def sweep(self, keys_max: int) -> int:
        """Purge at most `keys_max` keys of departed holders; returns how many keys are left to purge."""
        return self._masks.sweep(keys_max)

    # -- inside --------------------------------------------------------------------------------------------------

    def _touch(self, holder: _Holder, keys: Sequence[int], now_s: float) -> int:
        owner, touch_id = holder.owner, self._next_touch
        self._next_touch += 1
        self._now_s = now_s
        if not keys:
            return touch_id
        previous = Counter(map(owner.get, keys))
        new = previous.pop(None, 0)
        masks, bit = self._masks.of, holder.bit
        self._masks.held += new
        for key in reversed(keys):  # new keys are nearly always the last ones
            if not new:
                break
            if key not in owner:
                masks[key] = masks.get(key, 0) | bit
                new -= 1
        owner.update(dict.fromkeys(keys, touch_id))
        holder.touches[touch_id] = _Touch(list(keys), len(keys), now_s)
        for earlier, count in previous.items():
            if earlier is not None:
                self._disown(holder, earlier, count)
        return touch_id

    def _disown(self, holder: _Holder, touch_id: int, count: int) -> None:
        """`count` keys of a touch have a new owner or are gone; mostly dead lists are compacted (amortised O(1))."""
        touch = holder.touches[touch_id]
        touch.live -= count
        if not touch.live:
            del holder.touches[touch_id]
        elif touch.live * 2 < len(touch.keys):
            owner = holder.owner
            touch.keys = [key for key in touch.keys if owner.get(key) == touch_id]

    def _prove(self, holder: _Holder, keys: Sequence[int]) -> None:
        if holder.unproven:
            for key in keys:
                holder.unproven.pop(key, None)

    def _forget(self, holder: _Holder, key: int) -> None:
        del holder.owner[key]
        self._masks.unset(holder.bit, key)

    def _fit(self, holder: _Holder) -> None:
        if len(holder.owner) > holder.blocks_max:
            self._shrink(holder, holder.blocks_max)
        while self.bytes_used > self.bytes_max and self._holders:
            if self._masks.dying:
                self.sweep(SWEEP_KEYS * 8)
                continue
            oldest = min(
                (h for h in self._holders.values() if h.touches),
                key=lambda h: next(iter(h.touches.values())).at_s,
                default=None,
            )
            if oldest is None:
                return
            self._shrink(oldest, max(0, len(oldest.owner) - 64), pinned_too=True)

    def _shrink(self, holder: _Holder, blocks_max: int, *, pinned_too: bool = False) -> None:
        """Evict least recently used blocks, leaf first, until `blocks_max` are left or only pinned ones are."""
        retouches = 0 if pinned_too else len(holder.pins)
        while len(holder.owner) > blocks_max and holder.touches:
            touch_id, touch = next(iter(holder.touches.items()))
            pin = next(iter(holder.pins.items()), None)
            if not pinned_too and pin is not None and pin[1][0] <= touch_id:
                if not retouches:
                    return  # every block left belongs to a running request
                retouches -= 1
                self._renew(holder, *pin)
                continue
            self._evict(holder, touch_id, touch, len(holder.owner) - blocks_max)

    def _renew(self, holder: _Holder, lease: int, pin: tuple[int, list[int]]) -> None:
        """Move what is still there of a pinned prefix to the recent end; what was dropped meanwhile stays dropped."""
        keys = list(takewhile(holder.owner.__contains__, pin[1]))
        del holder.pins[lease]
        holder.pins[lease] = (self._touch(holder, keys, self._now_s), pin[1])

    def _evict(self, holder: _Holder, touch_id: int, touch: _Touch, count: int) -> None:
        owner = holder.owner
        while count and touch.live:
            key = touch.keys.pop()
            if owner.get(key) == touch_id:
                touch.live -= 1
                count -= 1
                self._forget(holder, key)
        if not touch.live:
            del holder.touches[touch_id]
