"""Who holds which block: a flat map from block key to a bitmask of holders, and the walk over it.

A key names a whole prefix (see blocks.py), so the map *is* the radix tree, and one walk that ANDs masks gives the
longest match of every holder:

    keys of the prompt    k1      k2      k3      k4
    masks                 1111    1101    0101    0001
    AND so far            1111    1101    0101    0001     holder 1 matches 1, holder 3: 2, holder 2: 3, holder 0: 4

A lookup in a large map misses the processor's caches: 6,250 keys of a long prompt take some 2 ms. So who holds a whole
stride of keys is remembered under the stride's last key, which names all before it; whoever loses a key of it is
taken out at once, and whoever gets it whole is found when it is looked at again.

What a holder is about to get, all of a prompt behind what it has, is no entry of the map but one run of keys, found by
its first key: the same misses would be paid for each key when it is expected, and again when it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, repeat
from operator import and_

SWEEP_KEYS = 512  # keys of departed holders purged at a time, so that purging never stalls the loop
STRIDE_KEYS = 64
# Strides remembered in one go, 20 us each: of a prompt that is matched, and whenever something else is done here.
MATCHED_STRIDES, SOME_STRIDES = 8, 4
STRIDES_MIN = 4  # fewer are walked, in the time that remembering them takes
ASKED_MAX = 64  # prompts whose strides are yet to be remembered
_NONE = repeat(0)
Store = list[int] | dict[int, int | None]  # keys of a departed holder; of a dict the values, None for none


@dataclass(slots=True, eq=False)
class KeyRun:
    """Keys of one prompt, in their order, that a holder is about to have; never empty."""

    bit: int
    lease: int  # number of the lease for which the keys' blocks are computed
    depth: int  # keys of the prompt before these
    keys: list[int]
    members: set[int] = field(default_factory=set)  # the same keys, once they were asked for; empty before

    def has_any(self, keys: Sequence[int]) -> bool:
        """Whether any of these keys is in the run."""
        if not self.members:
            self.members = set(self.keys)
        return not self.members.isdisjoint(keys)


class Masks:
    """The map. Holders have names; a bit is given back when the last key of a departed holder is purged."""

    def __init__(self, strides_max: int = 0) -> None:
        """`strides_max`: most strides that are remembered."""
        self._strides_max = strides_max
        self._whole: dict[int, int] = {}  # last key of a stride -> mask of those that hold all of it
        self._strides: dict[int, list[int]] = {}  # last key of a stride -> its keys; oldest first
        self._stride_of: dict[int, int] = {}  # key -> last key of its stride
        self.asked: deque[tuple[Sequence[int], int]] = deque()  # prompts and how many strides of each are done
        self.of: dict[int, int] = {}  # key -> mask of its holders, the departed included until they are purged
        self.held = 0  # (holder, key) pairs, the departed included
        self._names: dict[int, str] = {}  # bit -> holder
        self._bits: dict[str, int] = {}
        self._seen = 0  # bits that the walk looks at
        self._dying: deque[tuple[int, Store]] = deque()  # bits of a holder and its tiers, and their keys
        self._ahead: dict[int, list[KeyRun]] = {}  # first key -> runs of holders that do not have it

    def __len__(self) -> int:
        return len(self.of)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def add(self, name: str, *, seen: bool = True) -> int:
        """A bit for a new holder: the lowest that is free, so that masks stay short. One that is not `seen` is a tier
        behind a holder (tiers.py), which the walk passes over."""
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
        """The holder is gone at once, and so are its `tiers`; `keys`, all it held, are purged a few at a time by
        `sweep`. So are the values of `more`, which is ours from now on: a million are given away without a copy. They
        may hold None, keys twice, and keys the holder does not have."""
        bits = 0
        for each in (name, *tiers):
            bit = self._bits.pop(each)
            del self._names[bit]
            bits |= bit
        self._seen &= ~bits
        stores: tuple[Store, ...] = (list(keys), more or {})
        self._dying.extend((bits, store) for store in stores if store)
        self._whole, self._strides, self._stride_of = {}, {}, {}  # the bit will be another holder's

    def hide(self, name: str) -> None:
        """The walk does not see this holder until `show`; nothing is forgotten."""
        self._seen &= ~self._bits[name]

    def show(self, name: str) -> None:
        """Let the walk see this holder again."""
        self._seen |= self._bits[name]

    def set(self, bit: int, key: int) -> None:
        """Note that one holder has this key now; it must not have had it."""
        of = self.of
        of[key] = of.get(key, 0) | bit
        self.held += 1

    def set_all(self, bit: int, keys: Sequence[int]) -> bool:
        """The same for many keys that nobody has; False, and nothing is done, if somebody has one of them."""
        of = self.of
        if not of.keys().isdisjoint(keys):
            return False
        before = len(of)
        for key in keys:  # takes two thirds of what `of.update(dict.fromkeys(keys, bit))` does
            of[key] = bit
        self.held += len(of) - before
        return True

    def set_each(self, bit: int, keys: Sequence[int]) -> None:
        """The same for keys of which others have some; all are different."""
        of = self.of
        known = of.get
        for key in keys:
            of[key] = known(key, 0) | bit
        self.held += len(keys)

    def unset(self, bit: int, key: int) -> None:
        """One holder no longer has this key; it must have had it."""
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
        """One holder no longer has these keys; it must have had them."""
        if self._stride_of:
            for last in set(map(self._stride_of.get, keys)):
                if last is not None:
                    self._whole[last] &= ~bit
        of, forget = self.of, self.of.pop
        for key in keys:
            if (mask := forget(key)) != bit:  # most have no other holder: one look-up
                of[key] = mask & ~bit
        self.held -= len(keys)

    def holders(self, key: int) -> list[str]:
        """Visible holders of a key."""
        names, mask = self._names, self.of.get(key, 0) & self._seen
        return [names[bit] for bit in _bits(mask)] if mask else []

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading `keys` each holder has or is about to have, for every visible holder with at least one."""
        found = self._held(keys)
        if self._ahead and keys:
            for depth in {0, *found.values()}:
                if depth < len(keys):
                    self._add_ahead(keys, depth, found)
        return found

    def _held(self, keys: Sequence[int]) -> dict[str, int]:
        """How many leading `keys` each visible holder has.

        A stride that all holders left so far have whole takes two loops in C; only where one drops out is it walked.
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
        """Count what holders that were `found` to be so deep are about to have behind that."""
        for run in self._ahead.get(keys[depth], ()):
            name = self._names[run.bit]
            if run.bit & self._seen and found.get(name, 0) == depth:
                found[name] = self._depth_ahead(run.bit, keys, depth)

    def _depth_ahead(self, bit: int, keys: Sequence[int], depth: int) -> int:
        """How many leading keys a holder has or is about to have, of which it is known to have so many."""
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
        """The holder is about to have these keys, the first of which it does not have."""
        self._ahead.setdefault(run.keys[0], []).append(run)

    def end(self, run: KeyRun) -> None:
        """Forget a run; what it has came, or will not come."""
        runs = self._ahead[run.keys[0]]
        runs.remove(run)
        if not runs:
            del self._ahead[run.keys[0]]

    def remember(self, keys: Sequence[int]) -> None:
        """Remember the strides of these keys, which will be asked for again: a few now, and the others by calls of
        `remember_some`. They must not change."""
        if len(keys) >= STRIDES_MIN * STRIDE_KEYS and len(self.asked) < ASKED_MAX:
            self.asked.append((keys, 0))
        self.remember_some()

    def remember_some(self) -> None:
        """Remember a few strides of the prompt that was asked for first."""
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
            for key in stride:  # prompts fork within it: a key is in one stride only, so the others are walked there
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
        """One stride, mask by mask: whoever drops out is found to be `depth` deep. Returns who is left."""
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
    def dying(self) -> bool:
        """Whether keys of departed holders are left to purge."""
        return bool(self._dying)

    def sweep(self, keys_max: int) -> int:
        """Purge at most `keys_max` keys of departed holders; returns how many keys are left to purge."""
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
    """How many leading keys are equal, of as many as `theirs` has. A key names all before it, so they are equal up to
    some place and not behind it; where they are not (a collision), 0 is safe."""
    if (ours if len(ours) == len(theirs) else ours[: len(theirs)]) == theirs:
        return len(theirs)
    end, behind = 0, min(len(ours), len(theirs))
    while end < behind:  # bisection, in half the time that `bisect_left` takes to call for each place
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
