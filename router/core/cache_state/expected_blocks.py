"""Reasons for which one engine's bit is set for a key: blocks that it holds, and blocks that it will compute soon.

The bit is set while there is at least one reason. The common reason is one held block, which needs no entry here. A key
of several held blocks has the number beyond the first in `_more` (SGLang stores one block for each `extra_key`, under
one hash or two). A key without a held block can be expected by open leases. The first block that is stored confirms the
key, and after that only the blocks count. A key is therefore never both expected and held.

The keys of a long prompt are expected as one run, which sets no bit in the map (holder_bitmap.py). An engine stores the
blocks in their order, so each event confirms the beginning of the remaining run. If anything else happens to a key of a
run, the run is split into single keys. They then count as if they had been expected one by one from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.cache_state.holder_bitmap import HolderBitmap, KeyRun, common

RUN_KEYS_MIN = 32  # shorter sequences are expected key by key, at the cost of a run
RUNS_MAX = 256  # runs of one engine; each is checked when a prompt is placed there


class BlockAccounting:
    """One engine's bit in `masks`. At most `expected_max` keys are expected at a time."""

    def __init__(self, masks: HolderBitmap, name: str, *, expected_max: int) -> None:
        self._masks, self._name, self._expected_max = masks, name, expected_max
        self._open()

    def _open(self) -> None:
        self._bit = self._masks.add(self._name)
        self.blocks = 0  # held blocks that have a key
        self._more: dict[int, int] = {}  # key -> held blocks beyond the first
        self._expected: dict[int, tuple[int, ...]] = {}  # key -> leases
        self._leases: dict[int, list[int]] = {}  # lease -> keys expected when it was opened, including confirmed ones
        self._runs: list[KeyRun] = []  # disjoint; the first key of a run never has the bit

    def holds(self, key: int) -> bool:
        """True if a block with this key is held or expected."""
        return bool(self._masks.of.get(key, 0) & self._bit) or any(key in run.keys for run in self._runs)

    def add(self, key: int) -> None:
        """Add one held block with this key."""
        if self._runs:
            self.add_all((key,))
            return
        self.blocks += 1
        if not self._masks.of.get(key, 0) & self._bit:
            self._masks.set(self._bit, key)
        elif self._expected.pop(key, None) is None:
            self._more[key] = self._more.get(key, 0) + 1

    def discard(self, key: int) -> None:
        """Remove one held block with this key."""
        if self._runs:
            self._part((key,))
        self.blocks -= 1
        more = self._more.get(key)
        if more is None:
            self._masks.unset(self._bit, key)
        elif more == 1:
            del self._more[key]
        else:
            self._more[key] = more - 1

    def add_all(self, keys: Sequence[int]) -> Sequence[int]:
        """Call `add` for each key. Returns the keys as the objects of the prompt that expected them.

        A dict lookup takes a fifth of the time if the key is the very object that the dict stores.
        """
        if self._runs:
            keys = self._confirm(keys)
        all_ = keys
        self.blocks += len(keys)
        bit, of, more, new = self._bit, self._masks.of, self._more, 0
        if self._expected:
            confirm = self._expected.pop  # expected keys have the bit already
            keys = [key for key in keys if confirm(key, None) is None]
        for key in keys:
            held = of.get(key, 0)
            if not held & bit:
                of[key] = held | bit
                new += 1
            else:
                more[key] = more.get(key, 0) + 1
        self._masks.held += new
        return all_

    def take_all(self, keys: Sequence[int]) -> None:
        """Call `take` for each key."""
        if self._more:
            for key in keys:
                self.discard(key)
            return
        if self._runs:
            self._part(keys)
        self.blocks -= len(keys)
        self._masks.unset_all(self._bit, keys)

    def expect(self, lease: int, keys: Sequence[int], depth: int = 0) -> None:
        """Expect the blocks with these keys: they will be computed for this lease. `depth` keys of the prompt precede
        them."""
        if self._runs and any(_meet(run, keys, depth) for run in self._runs):
            self._part_all()
        if not self._begin(lease, keys, depth):
            self._expect_each(lease, keys)

    def _begin(self, lease: int, keys: Sequence[int], depth: int) -> bool:
        """Expect the keys as a run. Returns False, without any change, if they must be expected one by one."""
        if len(keys) < RUN_KEYS_MIN or len(self._runs) >= RUNS_MAX or self._masks.of.get(keys[0], 0) & self._bit:
            return False
        if len(self._expected) + sum([len(run.keys) for run in self._runs]) + len(keys) > self._expected_max:
            return False
        run = KeyRun(self._bit, lease, depth, list(keys))
        self._runs.append(run)
        self._masks.begin(run)
        return True

    def _expect_each(self, lease: int, keys: Sequence[int]) -> None:
        mine, bit, of = (lease,), self._bit, self._masks.of  # one tuple shared by all keys of the lease
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

    def _confirm(self, keys: Sequence[int]) -> Sequence[int]:
        """Confirm stored blocks with these keys, in their order: they are no longer expected. Returns the keys, as the
        objects of the runs if they were in runs."""
        ours = list[int]()
        while keys and (run := next((run for run in self._runs if run.keys[0] == keys[0]), None)) is not None:
            count = max(1, common(run.keys, keys[: len(run.keys)]))
            self._end(run)
            ours += run.keys[:count]
            if count < len(run.keys):
                run.members.difference_update(run.keys[:count])
                del run.keys[:count]
                run.depth += count
                self._runs.append(run)
                self._masks.begin(run)
                if self._masks.of.get(run.keys[0], 0) & self._bit:  # the key was held already when the run began
                    self._part_run(run)
            keys = keys[count:]
        if keys and self._runs:
            self._part(keys)
        return [*ours, *keys] if ours else keys

    def _part(self, keys: Sequence[int]) -> None:
        """Split the runs that have any of these keys, because the keys change."""
        for run in [run for run in self._runs if run.has_any(keys)]:
            self._part_run(run)

    def _part_all(self) -> None:
        for run in list(self._runs):
            self._part_run(run)

    def _part_run(self, run: KeyRun) -> None:
        self._end(run)
        self._expect_each(run.lease, run.keys)

    def _end(self, run: KeyRun) -> None:
        self._runs.remove(run)
        self._masks.end(run)

    def drop_unconfirmed(self, lease: int) -> None:
        """End a lease: keys that only this lease expected and no block confirmed are no longer held."""
        for run in [run for run in self._runs if run.lease == lease]:
            self._end(run)
        keys, expected = self._leases.pop(lease, ()), self._expected
        # The other keys were confirmed. A key that was confirmed, removed and expected again is listed twice.
        for key in dict.fromkeys(filter(expected.__contains__, keys)) if expected else ():
            left = tuple(other for other in expected[key] if other != lease)
            if left:
                expected[key] = left
            else:
                del expected[key]
                self._masks.unset(self._bit, key)

    def close(self, held: dict[int, int | None], tiers: Sequence[str] = ()) -> None:
        """Clear the bit of every key at once, and the bits of the engine's `tiers`. The values of `held` are the keys
        of all held blocks; the caller hands the dict over."""
        for run in list(self._runs):
            self._end(run)
        self._masks.remove(self._name, self._expected, held, tiers)

    def reopen(self, held: dict[int, int | None], tiers: Sequence[str] = ()) -> None:
        """Call `close`, and start again with no blocks."""
        self.close(held, tiers)
        self._open()


def _meet(run: KeyRun, keys: Sequence[int], depth: int) -> bool:
    """True if the run and these keys overlap. `depth` keys of the prompt precede `keys`.

    A key identifies the whole prefix before it. It is therefore enough to compare the first key of one sequence with
    the key at the same depth of the other.
    """
    behind = depth - run.depth
    if behind >= 0:
        return behind < len(run.keys) and bool(keys) and run.keys[behind] == keys[0]
    return -behind < len(keys) and keys[-behind] == run.keys[0]
