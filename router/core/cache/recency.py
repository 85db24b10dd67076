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

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice

from router.core.cache.masks import common

NEVER = float("-inf")  # stands for the time of last use of keys that nobody is expected to use again


@dataclass(slots=True)
class Touch:
    """One use of a prefix. A later use has a higher stamp."""

    keys: list[int]  # root to leaf; it may have lost some of them
    live: int  # keys whose owner is this touch
    stamp: int
    at_s: float
    ended: int = 0  # last keys of it that nobody is expected to use again


class Recency:
    """Which keys are held, and which of them was used least recently."""

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}  # key -> touch that used it last
        self.touches: dict[int, Touch] = {}
        # Stamp -> touch, oldest first. Not a dict: one that loses its first entries is searched from its first slot.
        self.order: OrderedDict[int, int] = OrderedDict()
        self._next = 0
        self._oldest = 0  # stamp of what was restored last; each that was restored is below 0
        # Keys last asked for and their runs, until anything changes: who is asked for a depth is often touched next.
        self._asked: tuple[Sequence[int], tuple[list[tuple[int, int, int]], int]] | None = None

    def __len__(self) -> int:
        return len(self.owner)

    def touch(self, keys: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """Use these keys now, root to leaf; `stamp` is higher than any before. Returns the keys that are new."""
        if not keys:
            return keys
        owner, before = self.owner, len(self.owner)
        if self._asked is not None and self._asked[0] is keys:
            runs, known = self._asked[1]
        else:
            runs, known = self._runs(keys) if keys[0] in owner else ([], 0)
        self._asked = None
        new = keys[known:] if known else keys
        if not owner.keys().isdisjoint(new):
            return self._touch_scattered(list(dict.fromkeys(keys)), stamp, now_s)
        if len(runs) == 1 and (touch := self.touches[runs[0][0]]).live == known:  # all of it, as at the end of a lease
            id_ = runs[0][0]
            del self.order[touch.stamp]
        else:
            id_ = self._claim(keys, runs)
            touch = self.touches[id_] = Touch([], 0, stamp, now_s)
        touch.stamp, touch.at_s, touch.ended = stamp, now_s, 0
        self.order[stamp] = id_
        for key in new:  # takes two thirds of what `owner.update(dict.fromkeys(new, id_))` does
            owner[key] = id_
        if len(owner) - before < len(new):  # the prompt has a key twice
            keys, new = list(dict.fromkeys(keys)), list(dict.fromkeys(new))
        if touch.live < len(keys):
            touch.keys, touch.live = list(keys), len(keys)
        return new

    def retouch(self, since: int, keys: Sequence[int], grown: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """Do as `touch` does for `keys`, which were touched with the stamp `since`, and for the keys `grown` behind
        them: mostly nobody touched them in between."""
        id_, owner = self.order.get(since), self.owner
        touch = self.touches[id_] if id_ is not None else None
        if id_ is None or touch is None or touch.live < len(keys) or not owner.keys().isdisjoint(grown):
            return self.touch([*keys, *grown], stamp, now_s)
        self._asked, before = None, len(owner)
        del self.order[since]
        touch.stamp, touch.at_s, touch.ended = stamp, now_s, 0
        self.order[stamp] = id_
        for key in grown:
            owner[key] = id_
        if len(owner) - before < len(grown):
            grown = list(dict.fromkeys(grown))
        touch.keys += grown
        touch.live += len(grown)
        return grown

    def restore(self, keys: Sequence[int], at_s: float) -> list[int]:
        """Keys that were last used then, root to leaf, which is before anything that is known here: those that are new
        are held from now on, and go first when something is evicted. Returns them."""
        owner = self.owner
        new = [key for key in dict.fromkeys(keys) if key not in owner]
        if new:
            self._asked = None
            self._oldest -= 1
            id_ = self._name()
            self._give(new, id_)
            self._put(id_, Touch(new, len(new), self._oldest, at_s))
            self.order.move_to_end(self._oldest, last=False)
        return new

    @property
    def newest(self) -> int:
        """The number of the touch that was made last; those made later have higher ones."""
        return self._next

    def used(self, id_: int) -> tuple[int, float, list[int]] | None:
        """(stamp, when it was last used, keys that it owns, root to leaf) of one of `touches`; None if it is gone."""
        touch = self.touches.get(id_)
        if touch is None:
            return None
        if touch.live < len(touch.keys):
            self._compact(id_, touch)
        return touch.stamp, touch.at_s, touch.keys

    def depth(self, keys: Sequence[int]) -> int:
        """How many leading keys are held."""
        found = self._runs(keys)
        owner, depth = self.owner, found[1]
        self._asked = (keys, found)
        while depth < len(keys) and keys[depth] in owner:  # only behind blocks lost out of the middle of a touch
            depth += 1
        return depth

    def oldest(self) -> Touch | None:
        """The touch that is evicted from next."""
        return self.touches[next(iter(self.order.values()))] if self.order else None

    def oldest_few(self, pinned: Container[int], touches_max: int) -> list[tuple[int, float]]:
        """(keys, when they were last used) of the oldest touches but those with these stamps, oldest first. Keys that
        nobody is expected to use again are told apart: NEVER for when."""
        touches, order, found = self.touches, self.order, list[tuple[int, float]]()
        for stamp in islice(filterfalse(pinned.__contains__, order), touches_max):
            touch = touches[order[stamp]]
            live = touch.live
            if touch.ended:
                ended = min(touch.ended, live)
                found.append((ended, NEVER))
                live -= ended
            if live:
                found.append((live, touch.at_s))
        return found

    def release(self, first: int, last: int, used_s: float) -> int:
        """Nobody is expected to use these keys again, from `first` to `last` of one prompt, where a touch of this time
        ends with `last`: otherwise somebody used them since, or went on behind them. Keys before `first` are of use to
        others. Returns how many keys that are."""
        id_ = self.owner.get(last)
        if id_ is None:
            return 0
        touch = self.touches[id_]
        if touch.at_s != used_s:
            return 0
        if touch.live < len(touch.keys):
            self._compact(id_, touch)
        if touch.keys[-1] != last:
            return 0
        shared = touch.keys.index(first) if self.owner.get(first) == id_ else 0
        touch.ended = touch.live - shared
        return touch.ended

    def drop(self, key: int) -> bool:
        """The key is no longer held; returns whether it was."""
        id_ = self.owner.pop(key, None)
        if id_ is None:
            return False
        self._asked = None
        touch = self.touches[id_]
        if touch.keys[-1] == key:
            touch.keys.pop()
        self._disown(id_, 1)
        return True

    def evict(self, keys_max: int) -> list[int]:
        """Forget at most `keys_max` last keys of the oldest touch, and return them. There must be a touch."""
        id_ = next(iter(self.order.values()))
        touch, owner, self._asked = self.touches[id_], self.owner, None
        if touch.live < len(touch.keys):
            self._compact(id_, touch)
        gone = touch.keys[-keys_max:]
        for key in gone:
            del owner[key]
        touch.live -= len(gone)
        touch.ended = max(0, touch.ended - len(gone))
        if touch.live:
            del touch.keys[-keys_max:]
        else:
            del self.touches[id_], self.order[touch.stamp]
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
            whole = not end and touch.live >= all_
            count = common(touch.keys, keys if whole else keys[end : end + touch.live])
            if not count:
                break
            runs.append((id_, end, end + count))
            end += count
        return runs, end

    def _claim(self, keys: Sequence[int], runs: list[tuple[int, int, int]]) -> int:
        """All runs belong to one touch, an old one's name or a new one; what is left of the others keeps its place."""
        if not runs:
            return self._name()
        id_ = self._keeper(runs)
        for earlier, start, end in runs:
            self._cut(earlier, end - start, kept=earlier == id_)
            if earlier != id_:
                self._give(keys[start:end], id_)
        return id_

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
            del self.touches[id_], self.order[touch.stamp]
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
        self.order[touch.stamp] = id_

    def _disown(self, id_: int, count: int) -> None:
        """`count` keys of a touch have a new owner or are gone; mostly dead lists are compacted (amortised O(1))."""
        touch = self.touches[id_]
        touch.live -= count
        if not touch.live:
            del self.touches[id_], self.order[touch.stamp]
        elif touch.live * 2 < len(touch.keys):
            self._compact(id_, touch)

    def _compact(self, id_: int, touch: Touch) -> None:
        owner = self.owner
        touch.keys = [key for key in touch.keys if owner.get(key) == id_]
