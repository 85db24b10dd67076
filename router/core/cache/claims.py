"""Why one engine's bit is set for a key: blocks that it holds, and blocks that it is about to compute.

The bit is set while there is a reason. The common reason is one held block, and costs nothing here; a key of several
held blocks (SGLang stores one for each `extra_key`, under one hash or two) has the number beyond the first in `_more`.
A key that no held block has may be expected by open leases; the first block that comes confirms it, and from then on
only the blocks count. So a key is never both expected and held.

A long prompt's keys are expected as one run, which is no bit in the map (masks.py): an engine stores the blocks in
their order, so each event is the beginning of what is left of the run. A run is parted into keys where anything else
happens to one of its keys, which then count as if they had been expected one by one from the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.core.cache.masks import KeyRun, Masks, common

RUN_KEYS_MIN = 32  # fewer keys are expected one by one, in the time that a run takes
RUNS_MAX = 256  # runs of one engine; each is looked at when a prompt is placed there


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
        self._runs: list[KeyRun] = []  # none has a key of another, or begins with a key that has the bit

    def holds(self, key: int) -> bool:
        """Whether a block with this key is held or expected."""
        return bool(self._masks.of.get(key, 0) & self._bit) or any(key in run.keys for run in self._runs)

    def add(self, key: int) -> None:
        """One held block more has this key."""
        if self._runs:
            self.add_all((key,))
            return
        self.blocks += 1
        if not self._masks.of.get(key, 0) & self._bit:
            self._masks.set(self._bit, key)
        elif self._expected.pop(key, None) is None:
            self._more[key] = self._more.get(key, 0) + 1

    def take(self, key: int) -> None:
        """One held block less has it."""
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
        """`add` for each of these keys. Returns them as the objects that the prompt has which expected them: of a map
        whose keys are the very objects that it is asked for, each is found in a fifth of the time."""
        if self._runs:
            keys = self._confirm(keys)
        all_ = keys
        self.blocks += len(keys)
        bit, of, more, new = self._bit, self._masks.of, self._more, 0
        if self._expected:
            confirm = self._expected.pop  # what was expected has its bit
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
        """`take` for each of these keys."""
        if self._more:
            for key in keys:
                self.take(key)
            return
        if self._runs:
            self._part(keys)
        self.blocks -= len(keys)
        self._masks.unset_all(self._bit, keys)

    def expect(self, lease: int, keys: Sequence[int], depth: int = 0) -> None:
        """The blocks with these keys, before which the prompt has `depth` others, are about to be computed for this
        lease."""
        if self._runs and any(_meet(run, keys, depth) for run in self._runs):
            self._part_all()
        if not self._begin(lease, keys, depth):
            self._expect_each(lease, keys)

    def _begin(self, lease: int, keys: Sequence[int], depth: int) -> bool:
        """Expect the keys as a run; False, and nothing is done, where they are to be expected one by one."""
        if len(keys) < RUN_KEYS_MIN or len(self._runs) >= RUNS_MAX or self._masks.of.get(keys[0], 0) & self._bit:
            return False
        if len(self._expected) + sum([len(run.keys) for run in self._runs]) + len(keys) > self._expected_max:
            return False
        run = KeyRun(self._bit, lease, depth, list(keys))
        self._runs.append(run)
        self._masks.begin(run)
        return True

    def _expect_each(self, lease: int, keys: Sequence[int]) -> None:
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

    def _confirm(self, keys: Sequence[int]) -> Sequence[int]:
        """Blocks with these keys come, in their order: they are no longer ahead. Returns the keys, those of runs as
        the runs' own objects."""
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
        """Something happens to these keys: runs that have any of them are parted."""
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

    def settle(self, lease: int) -> None:
        """The lease is over: what it alone expected, and no block confirmed, is not held."""
        for run in [run for run in self._runs if run.lease == lease]:
            self._end(run)
        keys, expected = self._leases.pop(lease, ()), self._expected
        # The others were confirmed; one that was, went and was expected once more is there twice.
        for key in dict.fromkeys(filter(expected.__contains__, keys)) if expected else ():
            left = tuple(other for other in expected[key] if other != lease)
            if left:
                expected[key] = left
            else:
                del expected[key]
                self._masks.unset(self._bit, key)

    def close(self, held: dict[int, int | None], tiers: Sequence[str] = ()) -> None:
        """No key has the bit, at once, nor the bits of the engine's `tiers`. The values of `held` are the keys of all
        held blocks; it is ours now."""
        for run in list(self._runs):
            self._end(run)
        self._masks.remove(self._name, self._expected, held, tiers)

    def reopen(self, held: dict[int, int | None], tiers: Sequence[str] = ()) -> None:
        """`close`, and begin again with nothing."""
        self.close(held, tiers)
        self._open()


def _meet(run: KeyRun, keys: Sequence[int], depth: int) -> bool:
    """Whether a run has a key of these, before which their prompt has `depth` others. A key names all before it: so
    the first key of one of them is where it has to be in the other."""
    behind = depth - run.depth
    if behind >= 0:
        return behind < len(run.keys) and bool(keys) and run.keys[behind] == keys[0]
    return -behind < len(keys) and keys[-behind] == run.keys[0]
