"""Blocks of one holder that only open leases vouch for: they count as held before they are computed.

Usually one lease vouches for its blocks alone, they are all of its prompt after the known part, and it ends well. They
are then one run, which begins and ends without a check of its keys. If another prompt shares the same blocks, the run
is split, and each key gets the number of leases that vouch for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.core.cache_state.lru import PrefixLru

RUNS_MAX = 64  # runs of one holder; each is checked when a prompt is placed there
FEW = 4  # keys that an intersection checks in the time of one owner lookup


class SpeculativeBlocks:
    """Blocks of one holder in progress, and the open leases that vouch for them."""

    __slots__ = ("_leases_of", "_runs")

    def __init__(self) -> None:
        self._leases_of: dict[int, int] = {}  # key -> open leases that vouch for it; without keys of runs
        self._runs: dict[int, tuple[int, list[int]]] = {}  # lease -> (start of its run in the prompt, the prompt)

    def __bool__(self) -> bool:
        return bool(self._leases_of or self._runs)

    def counts(self) -> dict[int, int]:
        """Return the number of open leases that vouch for each key."""
        ones = {key: 1 for start, prompt in self._runs.values() for key in prompt[start:]}
        return ones | self._leases_of

    def exclude_pending(self, keys: list[int]) -> list[int]:
        """Return these keys, which one use of a prefix owns, without those in progress."""
        if self._leases_of and not self._leases_of.keys().isdisjoint(keys):
            keys = [key for key in keys if key not in self._leases_of]
        if self._runs and keys:
            some = set(keys)
            for start, prompt in self._runs.values():
                if prompt[start] in some or prompt[-1] in some:
                    run = set(prompt[start:])
                    keys = [key for key in keys if key not in run]
        return keys

    def add_lease(self, recency: PrefixLru, lease: int, keys: list[int], new: Sequence[int], stamp: int) -> None:
        """Vouch for the `new` keys of a lease's prompt, which were just touched with this stamp, and for its keys that
        are already in progress."""
        if self._runs:
            self._part_met(keys, ())
        leases_of, start = self._leases_of, len(keys) - len(new)
        under_way = self._find_touched(recency, stamp) if leases_of else ()
        if under_way:
            for key in under_way:
                leases_of[key] += 1
            for key in new:
                leases_of[key] = leases_of[key] if key in under_way else 1
        elif not new or len(self._runs) >= RUNS_MAX or (new is not keys and keys[start:] != new):
            for key in new:
                leases_of[key] = 1
        else:
            self._runs[lease] = start, keys

    def extend(self, lease: int, keys: list[int], more: Sequence[int], new: Sequence[int]) -> None:
        """Vouch for `more` keys at the end of a lease's prompt.

        `new` are those that the touch added. They can be any of `more`: lost blocks of a prompt are in progress again.
        """
        run = self._runs.pop(lease, None)
        if self._runs:
            self._part_met(keys, ())
        leases_of, before = self._leases_of, len(keys) - len(more)
        fresh = new is more or list(new) == list(more)
        if fresh and len(self._runs) < RUNS_MAX and (not leases_of or leases_of.keys().isdisjoint(more)):
            self._runs[lease] = before if run is None else run[0], keys
            return
        for key in keys[run[0] : before] if run is not None else ():
            leases_of[key] = 1
        for key in more:
            if key in leases_of:
                leases_of[key] += 1
        for key in new:
            leases_of.setdefault(key, 1)

    def confirm(self, recency: PrefixLru, keys: Sequence[int], grown: Sequence[int], stamp: int) -> None:
        """Record that a prompt with these keys, followed by `grown`, was computed and just touched with this stamp."""
        leases_of = self._leases_of
        if self._runs:
            self._part_met(keys, grown)
        if not leases_of:
            return
        proven = self._find_touched(recency, stamp)
        if len(proven) == len(leases_of):
            leases_of.clear()
            return
        for key in proven:
            del leases_of[key]

    def end_run(self, lease: int) -> None:
        """End the run of a lease with a computed prompt. Call this before `prove`."""
        self._runs.pop(lease, None)

    def retract(self, lease: int, keys: Sequence[int]) -> Sequence[int]:
        """End a lease without a computed prompt, given the prompt's keys. Returns the keys that no other lease vouches
        for."""
        start, prompt = self._runs.pop(lease, (len(keys), []))
        if self._runs:
            self._part_met(keys, ())
        gone, leases_of = list[int](), self._leases_of
        for key in keys[:start] if leases_of else ():
            leases = leases_of.get(key)
            if leases == 1:
                del leases_of[key]
                gone.append(key)
            elif leases is not None:
                leases_of[key] = leases - 1
        gone += prompt[start:]
        return gone

    # -- inside --------------------------------------------------------------------------------------------------

    def _part_met(self, keys: Sequence[int], grown: Sequence[int]) -> None:
        """Split the runs that share keys with this prompt.

        A key identifies the whole prefix before it. A prompt therefore shares keys with a run if it has the run's first
        key at the same depth.
        """
        length, all_ = len(keys), len(keys) + len(grown)
        met = list[int]()
        for lease, (start, prompt) in self._runs.items():
            if start < all_ and (keys[start] if start < length else grown[start - length]) == prompt[start]:
                met.append(lease)
        for lease in met:
            start, prompt = self._runs.pop(lease)
            for key in prompt[start:]:
                self._leases_of[key] = 1

    def _find_touched(self, recency: PrefixLru, stamp: int) -> Collection[int]:
        """Return the keys counted one by one that were just touched with this stamp."""
        id_ = recency.order.get(stamp)
        if id_ is None:
            return ()
        touch, owner, leases_of = recency.touches[id_], recency.owner, self._leases_of
        if len(leases_of) * FEW < touch.live:
            return {key for key in leases_of if owner.get(key) == id_}
        found = leases_of.keys() & touch.keys  # visits each key of the touch, regardless of the number of unproven ones
        return found if touch.live == len(touch.keys) else {key for key in found if owner[key] == id_}
