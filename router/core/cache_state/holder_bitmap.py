"""Map from block key to a bitmask of holders, and the walk that finds the longest match of every holder.

A key identifies a whole prefix (see block_keys.py), so the map *is* the radix tree. One walk that ANDs the masks gives
the longest match of every holder:

    keys of the prompt    k1      k2      k3      k4
    masks                 1111    1101    0101    0001
    AND so far            1111    1101    0101    0001     holders 1, 3, 2 and 0 match 1, 2, 3 and 4 keys

A lookup in a large map misses the processor's caches: 6,250 keys of a long prompt take about 2 ms. The holders of a
whole stride of keys are therefore cached under the stride's last key, which identifies all keys before it. A holder
that loses a key of the stride is removed from that cache at once. A holder that completes the stride is added when the
stride is next looked up.

Keys that a holder is expected to compute, all of a prompt after the cached part, are not entries of the map. They are
one run of keys, found by its first key. With entries, the same cache misses would occur for each key when it is
expected and again when it is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, repeat
from operator import and_

SWEEP_KEYS = 512  # keys of departed holders purged at a time, so that purging never stalls the event loop
STRIDE_KEYS = 64
# Strides cached in one call, at 20 us each: when a prompt is matched, and during any other call.
MATCHED_STRIDES, SOME_STRIDES = 8, 4
STRIDES_MIN = 4  # shorter prompts are walked, at the cost of caching their strides
ASKED_MAX = 64  # prompts queued for stride caching
_NONE = repeat(0)
# keys of a departed holder; for a dict its values, None for a block without a key
Store = list[int] | dict[int, int | None]


@dataclass(slots=True, eq=False)
class KeyRun:
    """Keys of one prompt, in order, that a holder is expected to compute. Never empty."""

    bit: int
    lease: int  # number of the lease for which the blocks are computed
    depth: int  # keys of the prompt before these
    keys: list[int]
    members: set[int] = field(default_factory=set)  # the same keys as a set; empty until the first membership test

    def has_any(self, keys: Sequence[int]) -> bool:
        """True if any of these keys is in the run."""
        if not self.members:
            self.members = set(self.keys)
        return not self.members.isdisjoint(keys)


class HolderBitmap:
    """The map of keys to holders. Holders have names; a bit is free again when the last key of a departed holder is
    purged."""

    def __init__(self, strides_max: int = 0) -> None:
        """`strides_max`: maximum number of cached strides."""
        self._strides_max = strides_max
        self._whole: dict[int, int] = {}  # last key of a stride -> mask of the holders of all its keys
        self._strides: dict[int, list[int]] = {}  # last key of a stride -> its keys; oldest first
        self._stride_of: dict[int, int] = {}  # key -> last key of its stride
        # prompts, and the number of strides of each that are done
        self.asked: deque[tuple[Sequence[int], int]] = deque()
        self.of: dict[int, int] = {}  # key -> mask of its holders, including departed ones until they are purged
        self.held = 0  # (holder, key) pairs, including departed holders
        self._names: dict[int, str] = {}  # bit -> holder
        self._bits: dict[str, int] = {}
        self._seen = 0  # bits that the walk considers
        self._dying: deque[tuple[int, Store]] = deque()  # bits of a departed holder and its tiers, and their keys
        self._ahead: dict[int, list[KeyRun]] = {}  # first key -> runs of holders that do not have it

    def __len__(self) -> int:
        return len(self.of)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def add(self, name: str, *, seen: bool = True) -> int:
        """Return a bit for a new holder: the lowest free one, so that masks stay short. A bit that is not `seen`
        belongs to a tier below a holder's GPU (tier_blocks.py), and the walk ignores it."""
        used = 0
        for bit in self._names:
            used |= bit
        for bit, _ in self._dying:
            used |= bit
        bit = ~used & (used + 1)
        self._names[bit] = name
        self._bits[name] = bit
        if seen:
            self._seen |= bit
        return bit

    def remove(
        self,
        name: str,
        keys: Iterable[int],
        more: dict[int, int | None] | None = None,
        tiers: Sequence[str] = (),
    ) -> None:
        """Remove a holder and its `tiers` at once. `sweep` later purges all keys that the holder had, a few at a time.

        - `keys`: the keys of the holder.
        - `more`: a dict with further keys as values. The caller hands it over, so that a million keys need no copy. The
          values can be None, repeat, or be keys that the holder does not have.
        """
        bits = 0
        for each in (name, *tiers):
            bit = self._bits.pop(each)
            del self._names[bit]
            bits |= bit
        self._seen &= ~bits
        stores: tuple[Store, ...] = (list(keys), more or {})
        self._dying.extend((bits, store) for store in stores if store)
        self._whole, self._strides, self._stride_of = {}, {}, {}  # the bit will belong to another holder

    def suspend_holder(self, name: str) -> None:
        """Exclude this holder from the walk until `show`. Its keys are kept."""
        self._seen &= ~self._bits[name]

    def show(self, name: str) -> None:
        """Include this holder in the walk again."""
        self._seen |= self._bits[name]

    def set(self, bit: int, key: int) -> None:
        """Record that a holder has this key. It must not have had the key before."""
        of = self.of
        of[key] = of.get(key, 0) | bit
        self.held += 1

    def set_all(self, bit: int, keys: Sequence[int]) -> bool:
        """Record many keys that no holder has. Returns False, without any change, if any holder has one of them."""
        of = self.of
        if not of.keys().isdisjoint(keys):
            return False
        before = len(of)
        for key in keys:  # two thirds of the time of `of.update(dict.fromkeys(keys, bit))`
            of[key] = bit
        self.held += len(of) - before
        return True

    def set_each(self, bit: int, keys: Sequence[int]) -> None:
        """Record many keys, some of which other holders have. The keys must be distinct."""
        of = self.of
        known = of.get
        for key in keys:
            of[key] = known(key, 0) | bit
        self.held += len(keys)

    def unset(self, bit: int, key: int) -> None:
        """Record that a holder no longer has this key. It must have had the key before."""
        left = self.of[key] & ~bit
        if left:
            self.of[key] = left
        else:
            del self.of[key]
        self.held -= 1
        last = self._stride_of.get(key) if self._stride_of else None
        if last is not None:
            self._whole[last] &= ~bit

    def unset_all(self, bit: int, keys: Sequence[int]) -> None:
        """Record that a holder no longer has these keys. It must have had all of them before."""
        if self._stride_of:
            for last in set(map(self._stride_of.get, keys)):
                if last is not None:
                    self._whole[last] &= ~bit
        of, forget = self.of, self.of.pop
        for key in keys:
            if (mask := forget(key)) != bit:  # most have no other holder: one lookup
                of[key] = mask & ~bit
        self.held -= len(keys)

    def holders(self, key: int) -> list[str]:
        """Return the visible holders of a key."""
        names, mask = self._names, self.of.get(key, 0) & self._seen
        return [names[bit] for bit in _bits(mask)] if mask else []

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Count the leading `keys` that each holder has or is expected to compute, for every visible holder with at
        least one."""
        found = self._count_leading(keys)
        if self._ahead and keys:
            for depth in {0, *found.values()}:
                if depth < len(keys):
                    self._add_ahead(keys, depth, found)
        return found

    def _count_leading(self, keys: Sequence[int]) -> dict[str, int]:
        """Count the leading `keys` that each visible holder has.

        A stride that all remaining holders have completely takes two loops in C. A stride is walked key by key only if
        a holder drops out in it.
        """
        found: dict[str, int] = {}
        mask, of, room = self._seen, self.of, MATCHED_STRIDES if len(keys) >= STRIDES_MIN * STRIDE_KEYS else 0
        if not keys or not of.get(keys[0], 0) & mask:
            return found
        for start in range(0, len(keys), STRIDE_KEYS):
            if not mask:
                return found
            end = start + STRIDE_KEYS
            last = keys[end - 1] if self._strides_max and end <= len(keys) else None
            if last is not None and self._whole.get(last, 0) & mask == mask:
                continue
            stride = keys[start:end]
            held = list(map(of.get, stride, _NONE))
            whole = reduce(and_, held)
            if whole & mask != mask:
                mask = self._walk(held, start, mask, found)
            if last in self._strides:
                self._whole[last] = whole
            elif whole and last is not None and room:
                room -= 1
                self._remember(last, list(stride), whole)
        for bit in _bits(mask):
            found[self._names[bit]] = len(keys)
        return found

    def _add_ahead(self, keys: Sequence[int], depth: int, found: dict[str, int]) -> None:
        """Extend the `found` depth of holders by the keys that they are expected to compute after this depth."""
        for run in self._ahead.get(keys[depth], ()):
            name = self._names[run.bit]
            if run.bit & self._seen and found.get(name, 0) == depth:
                found[name] = self._depth_ahead(run.bit, keys, depth)

    def _depth_ahead(self, bit: int, keys: Sequence[int], depth: int) -> int:
        """Count the leading keys that a holder has or is expected to compute, starting from a known depth."""
        while depth < len(keys):
            runs = [run for run in self._ahead.get(keys[depth], ()) if run.bit == bit]
            if runs:
                depth += max(1, common(runs[0].keys, keys[depth : depth + len(runs[0].keys)]))
            elif self.of.get(keys[depth], 0) & bit:
                depth += 1
            else:
                break
        return depth

    def begin(self, run: KeyRun) -> None:
        """Add a run of keys that a holder is expected to compute. The holder does not have the first of them."""
        self._ahead.setdefault(run.keys[0], []).append(run)

    def end(self, run: KeyRun) -> None:
        """Remove a run: its keys were stored, or will not be stored."""
        runs = self._ahead[run.keys[0]]
        runs.remove(run)
        if not runs:
            del self._ahead[run.keys[0]]

    def remember(self, keys: Sequence[int]) -> None:
        """Cache the strides of these keys, which will be looked up again: a few now, the others in calls of
        `remember_some`. The caller must not change the sequence afterwards."""
        if len(keys) >= STRIDES_MIN * STRIDE_KEYS and len(self.asked) < ASKED_MAX:
            self.asked.append((keys, 0))
        self.remember_some()

    def remember_some(self) -> None:
        """Cache a few strides of the prompt that was queued first."""
        if not self.asked:
            return
        keys, done = self.asked.popleft()
        room, end = SOME_STRIDES, len(keys) // STRIDE_KEYS
        while room and done < end:
            stride = keys[done * STRIDE_KEYS : (done + 1) * STRIDE_KEYS]
            done += 1
            if stride[-1] not in self._strides:
                room -= 1
                if held := reduce(and_, map(self.of.get, stride, _NONE)):
                    self._remember(stride[-1], list(stride), held)
        if done < end:
            self.asked.appendleft((keys, done))

    def _remember(self, last: int, stride: list[int], held: int) -> None:
        stride_of = self._stride_of
        before = len(stride_of)
        deque(map(stride_of.setdefault, stride, repeat(last)), maxlen=0)
        if len(stride_of) - before < len(stride):
            # prompts fork within the stride: a key belongs to one stride only, so the others are walked there
            for key in stride:
                if stride_of[key] == last:
                    del stride_of[key]
            return
        self._strides[last] = stride
        self._whole[last] = held
        if len(self._strides) > self._strides_max:
            oldest = next(iter(self._strides))
            for key in self._strides.pop(oldest):
                del self._stride_of[key]
            del self._whole[oldest]

    def _walk(self, held: list[int], depth: int, mask: int, found: dict[str, int]) -> int:
        """Walk one stride mask by mask, and record the depth of each holder that drops out. Returns the remaining
        holders."""
        for left in accumulate(held, and_, initial=mask):
            if left != mask:
                if depth > 1:
                    for bit in _bits(mask ^ left):
                        found[self._names[bit]] = depth - 1
                mask = left
                if not mask:
                    break
            depth += 1
        return mask

    @property
    def pending_sweep(self) -> bool:
        """True if keys of departed holders remain to be purged."""
        return bool(self._dying)

    def sweep(self, keys_max: int) -> int:
        """Purge at most `keys_max` keys of departed holders. Returns the number of keys that remain to be purged."""
        while self._dying and keys_max > 0:
            bits, keys = self._dying[0]
            for _ in range(min(keys_max, len(keys))):
                key = keys.pop() if isinstance(keys, list) else keys.popitem()[1]
                if key is not None and (had := self.of.get(key, 0) & bits):
                    self.unset(had, key)
                    self.held -= had.bit_count() - 1
                keys_max -= 1
            if not keys:
                self._dying.popleft()
        return sum(len(keys) for _, keys in self._dying)


def common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Count the equal leading keys of two sequences, at most as many as `theirs` has.

    A key identifies the whole prefix before it, so the sequences are equal up to one position and different after it.
    If a hash collision breaks that rule, 0 is a safe result.
    """
    if (ours if len(ours) == len(theirs) else ours[: len(theirs)]) == theirs:
        return len(theirs)
    end, behind = 0, min(len(ours), len(theirs))
    while end < behind:  # bisection, in half the time that `bisect_left` takes with its call for each position
        middle = (end + behind) // 2
        if ours[middle] == theirs[middle]:
            end = middle + 1
        else:
            behind = middle
    return end if ours[:end] == theirs[:end] else 0


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
