"""Who holds which block: a flat map from block key to a bitmask of holders, and the walk over it.

A key names a whole prefix (see blocks.py), so the map *is* the radix tree, and one walk that ANDs masks gives the
longest match of every holder:

    keys of the prompt    k1      k2      k3      k4
    masks                 1111    1101    0101    0001
    AND so far            1111    1101    0101    0001     holder 1 matches 1, holder 3: 2, holder 2: 3, holder 0: 4

A lookup in a large map misses the processor's caches: 6,250 keys of a long prompt take some 2 ms. So who holds a whole
stride of keys is remembered under the stride's last key, which names all before it; whoever loses a key of it is
taken out at once, and whoever gets it whole is found when it is looked at again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import repeat
from operator import and_

SWEEP_KEYS = 512  # keys of departed holders purged at a time, so that purging never stalls the loop
STRIDE_KEYS = 64
REMEMBER_STRIDES = 32  # strides remembered at a time: under a millisecond
_NONE = repeat(0)
Store = list[int] | dict[int, int | None]  # keys of a departed holder; of a dict the values, None for none


class Masks:
    """The map. Holders have names; a bit is given back when the last key of a departed holder is purged."""

    def __init__(self, strides_max: int = 0) -> None:
        """`strides_max`: most strides that are remembered."""
        self._strides_max = strides_max
        self._whole: dict[int, int] = {}  # last key of a stride -> mask of those that hold all of it
        self._strides: dict[int, list[int]] = {}  # last key of a stride -> its keys; oldest first
        self._stride_of: dict[int, int] = {}  # key -> last key of its stride
        self.of: dict[int, int] = {}  # key -> mask of its holders, the departed included until they are purged
        self.held = 0  # (holder, key) pairs, the departed included
        self._names: dict[int, str] = {}  # bit -> holder
        self._bits: dict[str, int] = {}
        self._seen = 0  # bits that the walk looks at
        self._dying: deque[tuple[int, Store]] = deque()

    def __len__(self) -> int:
        return len(self.of)

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    def add(self, name: str) -> int:
        """A bit for a new holder: the lowest that is free, so that masks stay short."""
        used = 0
        for bit in self._names:
            used |= bit
        for bit, _ in self._dying:
            used |= bit
        bit = ~used & (used + 1)
        self._names[bit] = name
        self._bits[name] = bit
        self._seen |= bit
        return bit

    def remove(self, name: str, keys: Iterable[int], more: dict[int, int | None] | None = None) -> None:
        """The holder is gone at once; `keys`, all it held, are purged a few at a time by `sweep`. So are the values
        of `more`, which is ours from now on: a million are given away without a copy. They may hold None, keys twice,
        and keys the holder does not have."""
        bit = self._bits.pop(name)
        del self._names[bit]
        self._seen &= ~bit
        stores: tuple[Store, ...] = (list(keys), more or {})
        self._dying.extend((bit, store) for store in stores if store)
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
        """How many leading `keys` each holder has, for every visible holder that has at least one.

        A stride that all holders left so far have whole takes two loops in C; only where one drops out is it walked.
        """
        found: dict[str, int] = {}
        mask, of, room = self._seen, self.of, REMEMBER_STRIDES
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
            held = reduce(and_, map(of.get, stride, _NONE), -1)
            if held & mask != mask:
                mask = self._walk(stride, start, mask, found)
            if last in self._strides:
                self._whole[last] = held
            elif held and last is not None and room:
                room -= 1
                self._remember(last, list(stride), held)
        for bit in _bits(mask):
            found[self._names[bit]] = len(keys)
        return found

    def remember(self, keys: Sequence[int]) -> None:
        """Remember a few strides of these keys, which will be asked for again."""
        room = REMEMBER_STRIDES
        for start in range(0, len(keys) - STRIDE_KEYS + 1, STRIDE_KEYS):
            last = keys[start + STRIDE_KEYS - 1]
            if last not in self._strides:
                stride = keys[start : start + STRIDE_KEYS]
                if held := reduce(and_, map(self.of.get, stride, _NONE), -1):
                    self._remember(last, list(stride), held)
                room -= 1
                if not room:
                    return

    def _remember(self, last: int, stride: list[int], held: int) -> None:
        if not self._stride_of.keys().isdisjoint(stride):
            return  # prompts fork within it: a key is in one stride only, so the others are walked there
        self._strides[last] = stride
        self._whole[last] = held
        self._stride_of.update(dict.fromkeys(stride, last))
        if len(self._strides) > self._strides_max:
            oldest = next(iter(self._strides))
            for key in self._strides.pop(oldest):
                del self._stride_of[key]
            del self._whole[oldest]

    def _walk(self, keys: Sequence[int], depth: int, mask: int, found: dict[str, int]) -> int:
        """One stride, key by key: whoever drops out is found to be `depth` deep. Returns who is left."""
        names, of = self._names, self.of
        for key in keys:
            held = of.get(key, 0) & mask
            if held != mask:
                if depth:
                    for bit in _bits(mask ^ held):
                        found[names[bit]] = depth
                mask = held
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
            bit, keys = self._dying[0]
            for _ in range(min(keys_max, len(keys))):
                key = keys.pop() if isinstance(keys, list) else keys.popitem()[1]
                if key is not None and self.of.get(key, 0) & bit:
                    self.unset(bit, key)
                keys_max -= 1
            if not keys:
                self._dying.popleft()
        return sum(len(keys) for _, keys in self._dying)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
