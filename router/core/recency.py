"""One holder's blocks in the order in which they were last used.

Recency is kept per *touch* (one prompt, root to leaf), not per block: `owner[key]` names the touch that used the key
last. The order of blocks is: oldest touch first, and within one touch leaf first, since a prefix without its leaf is
useful and a leaf without its prefix is not (vLLM frees blocks in that order too).

A prompt mostly runs through what earlier ones ran through, so touching it is a matter of *runs*, keys in a row that one
touch owns. The longest run keeps its touch, which is stamped anew; what is left of that touch becomes a touch of its
own under the old stamp. Only keys that change hands are written: a prompt of 400 blocks of which 390 were asked for
before costs what one of 10 does, and what ends a prompt costs next to nothing.

    before   t1: a b c d         keys of t1, root to leaf
    touch    a b x               run a b is t1's; x is new
    after    t3: c d   t1: a b x    t3 has the place that t1 had
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Touch:
    """One use of a prefix. A later use has a higher stamp."""

    keys: list[int]  # root to leaf; it may have lost some of them
    live: int  # keys whose owner is this touch
    stamp: int
    at_s: float


class Recency:
    """Which keys are held, and which of them was used least recently."""

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}  # key -> touch that used it last
        self.touches: dict[int, Touch] = {}
        # Stamp -> touch, oldest first. Not a dict: one that loses its first entries is searched from its first slot.
        self._order: OrderedDict[int, int] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self.owner)

    def touch(self, keys: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """These keys, root to leaf, are used now; `stamp` is higher than any before. Returns those that are new."""
        if not keys:
            return keys
        owner, (runs, known) = self.owner, self._runs(keys)
        new, before = keys[known:] if known else keys, len(owner)
        if not owner.keys().isdisjoint(new):
            return self._touch_scattered(list(dict.fromkeys(keys)), stamp, now_s)
        id_ = self._keeper(runs) if runs else self._name()
        for earlier, start, end in runs:
            self._cut(earlier, end - start, kept=earlier == id_)
            if earlier != id_:
                self._give(keys[start:end], id_)
        self._give(new, id_)
        if len(owner) - before < len(new):  # it has a key twice
            keys, new = list(dict.fromkeys(keys)), list(dict.fromkeys(new))
        self._put(id_, Touch(list(keys), len(keys), stamp, now_s))
        return new

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading keys are held."""
        owner, (_, depth) = self.owner, self._runs(keys)
        while depth < len(keys) and keys[depth] in owner:  # only behind blocks lost out of the middle of a touch
            depth += 1
        return depth

    def oldest(self) -> Touch | None:
        """The touch that is evicted from next."""
        return self.touches[next(iter(self._order.values()))] if self._order else None

    def oldest_s(self, pinned: Iterable[int]) -> float | None:
        """When the oldest touch but those with these stamps, which ascend, was made; None when there is none."""
        stamps = iter(pinned)
        pin = next(stamps, None)
        for stamp, id_ in self._order.items():
            while pin is not None and pin < stamp:
                pin = next(stamps, None)
            if pin != stamp:
                return self.touches[id_].at_s
        return None

    def owned(self, keys: Iterable[int], stamp: int) -> list[int]:
        """Those of `keys` that were last used by the touch with this stamp."""
        id_, owner = self._order.get(stamp), self.owner
        return [key for key in keys if owner.get(key) == id_] if id_ is not None else []

    def drop(self, key: int) -> bool:
        """The key is no longer held; returns whether it was."""
        id_ = self.owner.pop(key, None)
        if id_ is None:
            return False
        touch = self.touches[id_]
        if touch.keys[-1] == key:
            touch.keys.pop()
        self._disown(id_, 1)
        return True

    def evict(self, keys_max: int) -> list[int]:
        """Forget at most `keys_max` last keys of the oldest touch, and return them. There must be a touch."""
        id_ = next(iter(self._order.values()))
        touch, owner = self.touches[id_], self.owner
        if touch.live < len(touch.keys):
            self._compact(id_, touch)
        gone = touch.keys[-keys_max:]
        del touch.keys[-keys_max:]
        for key in gone:
            del owner[key]
        self._disown(id_, len(gone))
        return gone

    # -- inside --------------------------------------------------------------------------------------------------

    def _runs(self, keys: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
        """Leading keys by owner, as (touch, start, end), and how many they are in all. A run begins where its touch
        begins; it ends early at the first key that is new, and where blocks were lost out of the middle of a touch."""
        owner, end, all_ = self.owner, 0, len(keys)
        runs: list[tuple[int, int, int]] = []
        while end < all_:
            id_ = owner.get(keys[end])
            if id_ is None or (runs and id_ in [run[0] for run in runs]):  # twice: a prompt made to collide with itself
                break
            touch = self.touches[id_]
            if touch.live < len(touch.keys):
                self._compact(id_, touch)
            common = _common(touch.keys, keys[end : end + touch.live])
            if not common:
                break
            runs.append((id_, end, end + common))
            end += common
        return runs, end

    def _keeper(self, runs: list[tuple[int, int, int]]) -> int:
        """The touch of the run that leaves least to write, what is left of the touch included; or a new one."""
        best, saved = 0, 0
        for id_, start, end in runs:
            saves = 2 * (end - start) - self.touches[id_].live
            if saves > saved:
                best, saved = id_, saves
        return best or self._name()

    def _cut(self, id_: int, count: int, *, kept: bool) -> None:
        """The first `count` keys of a touch are used anew, under its name (`kept`) or another; the rest stays in its
        place."""
        touch = self.touches[id_]
        rest = touch.keys[count:]
        if not rest:
            del self.touches[id_], self._order[touch.stamp]
            return
        touch.keys, touch.live = rest, len(rest)
        if kept:
            other = self._name()
            self._give(rest, other)
            self._put(other, touch)

    def _touch_scattered(self, keys: list[int], stamp: int, now_s: float) -> list[int]:
        """Any keys, whoever owns them."""
        owner, id_ = self.owner, self._name()
        new = [key for key in keys if key not in owner]
        previous = Counter(owner[key] for key in keys if key in owner)
        self._give(keys, id_)
        for earlier, count in previous.items():
            self._disown(earlier, count)
        self._put(id_, Touch(keys, len(keys), stamp, now_s))
        return new

    def _give(self, keys: Sequence[int], id_: int) -> None:
        owner = self.owner
        for key in keys:  # takes two thirds of what `owner.update(dict.fromkeys(keys, id_))` does
            owner[key] = id_

    def _name(self) -> int:
        self._next += 1
        return self._next

    def _put(self, id_: int, touch: Touch) -> None:
        self.touches[id_] = touch
        self._order[touch.stamp] = id_

    def _disown(self, id_: int, count: int) -> None:
        """`count` keys of a touch have a new owner or are gone; mostly dead lists are compacted (amortised O(1))."""
        touch = self.touches[id_]
        touch.live -= count
        if not touch.live:
            del self.touches[id_], self._order[touch.stamp]
        elif touch.live * 2 < len(touch.keys):
            self._compact(id_, touch)

    def _compact(self, id_: int, touch: Touch) -> None:
        owner = self.owner
        touch.keys = [key for key in touch.keys if owner.get(key) == id_]


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading keys are equal, of as many as `theirs` has. A key names all before it, so they are equal up to
    some place and not behind it; where they are not (a collision), 0 is safe."""
    if ours[: len(theirs)] == theirs:
        return len(theirs)
    end = bisect_left(range(len(theirs)), True, key=lambda place: ours[place] != theirs[place])
    return end if ours[:end] == theirs[:end] else 0
