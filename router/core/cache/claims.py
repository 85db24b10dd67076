"""Why one engine's bit is set for a key: blocks that it holds, and blocks that it is about to compute.

The bit is set while there is a reason. The common reason is one held block, and costs nothing here; a key of several
held blocks (SGLang stores one for each `extra_key`, under one hash or two) has the number beyond the first in `_more`.
A key that no held block has may be expected by open leases; the first block that comes confirms it, and from then on
only the blocks count. So a key is never both expected and held.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.cache.masks import Masks


class Credit:
    """One engine's bit in `masks`; at most `expected_max` keys are expected at a time."""

    def __init__(self, masks: Masks, name: str, *, expected_max: int) -> None:
        self._masks, self._name, self._expected_max = masks, name, expected_max
        self._open()

    def _open(self) -> None:
        self._bit = self._masks.add(self._name)
        self.blocks = 0  # held blocks that have a key
        self._more: dict[int, int] = {}  # key -> held blocks beyond the first
        self._expected: dict[int, tuple[int, ...]] = {}  # key -> leases
        self._leases: dict[int, list[int]] = {}  # -> keys expected when it came, confirmed ones included

    def holds(self, key: int) -> bool:
        """Whether the bit is set."""
        return bool(self._masks.of.get(key, 0) & self._bit)

    def add(self, key: int) -> None:
        """One held block more has this key."""
        self.blocks += 1
        if not self._masks.of.get(key, 0) & self._bit:
            self._masks.set(self._bit, key)
        elif self._expected.pop(key, None) is None:
            self._more[key] = self._more.get(key, 0) + 1

    def take(self, key: int) -> None:
        """One held block less has it."""
        self.blocks -= 1
        more = self._more.get(key)
        if more is None:
            self._masks.unset(self._bit, key)
        elif more == 1:
            del self._more[key]
        else:
            self._more[key] = more - 1

    def add_all(self, keys: Sequence[int]) -> None:
        """`add` for each of these keys."""
        self.blocks += len(keys)
        bit, of, confirm, more = self._bit, self._masks.of, self._expected.pop, self._more
        for key in [key for key in keys if confirm(key, None) is None]:  # the others were expected: their bit is set
            if not of.get(key, 0) & bit:
                self._masks.set(bit, key)
            else:
                more[key] = more.get(key, 0) + 1

    def take_all(self, keys: Sequence[int]) -> None:
        """`take` for each of these keys."""
        if self._more:
            for key in keys:
                self.take(key)
            return
        self.blocks -= len(keys)
        self._masks.unset_all(self._bit, keys)

    def expect(self, lease: int, keys: Sequence[int]) -> None:
        """The blocks with these keys are about to be computed for this lease."""
        mine, bit, of = (lease,), self._bit, self._masks.of  # one tuple for all its keys
        new = self._leases.setdefault(lease, [])
        if len(self._expected) + len(keys) <= self._expected_max and self._masks.set_all(bit, keys):
            fresh = dict.fromkeys(keys, mine)
            self._expected.update(fresh)
            new += fresh
            return
        for key in keys:
            owners = self._expected.get(key)
            if owners is not None:
                if lease in owners:
                    continue
                self._expected[key] = owners + mine
            elif of.get(key, 0) & bit:
                continue
            elif len(self._expected) >= self._expected_max:
                break
            else:
                self._masks.set(bit, key)
                self._expected[key] = mine
            new.append(key)

    def settle(self, lease: int) -> None:
        """The lease is over: what it alone expected, and no block confirmed, is not held."""
        keys, expected = self._leases.pop(lease, ()), self._expected
        # The others were confirmed; one that was, went and was expected once more is there twice.
        for key in dict.fromkeys(filter(expected.__contains__, keys)) if expected else ():
            left = tuple(other for other in expected[key] if other != lease)
            if left:
                expected[key] = left
            else:
                del expected[key]
                self._masks.unset(self._bit, key)

    def close(self, held: dict[int, int | None]) -> None:
        """No key has the bit, at once. The values of `held` are the keys of all held blocks; it is ours now."""
        self._masks.remove(self._name, self._expected, held)

    def reopen(self, held: dict[int, int | None]) -> None:
        """`close`, and begin again with nothing."""
        self.close(held)
        self._open()
