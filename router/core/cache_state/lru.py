"""Blocks of one holder in the order of their last use.

Recency is kept per *touch* (one prompt, root to leaf), not per block: `owner[key]` is the touch that used the key last.
Blocks are ordered by touch, oldest first. Within one touch the leaf comes first, because a prefix without its leaf is
usable and a leaf without its prefix is not (vLLM frees blocks in the same order).

Most prompts share a prefix with earlier ones, so a touch is processed in *runs*: consecutive keys that one touch owns.
The longest run keeps its touch, which gets a new stamp. The rest of that touch becomes a new touch with the old stamp.
Only keys with a new owner are written. A prompt of 400 blocks with 390 known ones therefore costs as much as a prompt
of 10 blocks, and a touch at the end of a request costs almost no time.

    before   t1: a b c d         keys of t1 from root to leaf
    touch    a b x               run a b is t1's; x is new
    after    t3: c d   t1: a b x    t3 has the former position of t1
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice

from router.core.cache_state.holder_bitmap import common

NEVER = float("-inf")  # time of last use of keys that are not expected to be used again


@dataclass(slots=True)
class Touch:
    """One use of a prefix. A later use has a higher stamp."""

    keys: list[int]  # root to leaf; the touch may no longer own all of them
    live: int  # keys with this touch as owner
    stamp: int
    at_s: float
    ended: int = 0  # last keys that are not expected to be used again


class PrefixLru:
    """Held keys of one holder, in the order of their last use."""

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}  # key -> touch that used it last
        self.touches: dict[int, Touch] = {}
        # Stamp -> touch, oldest first. Not a dict: without its first entries, a dict is still searched from its first
        # slot.
        self.order: OrderedDict[int, int] = OrderedDict()
        self._next = 0
        self._oldest = 0  # stamp of the last restored touch; restored touches have negative stamps
        # Keys of the last `depth` call and their runs, until any change: a `touch` of the same keys often follows.
        self._asked: tuple[Sequence[int], tuple[list[tuple[int, int, int]], int]] | None = None

    def __len__(self) -> int:
        return len(self.owner)

    def touch(self, keys: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """Record a use of these keys now, root to leaf. `stamp` is higher than any before. Returns the new keys."""
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
        for key in new:  # two thirds of the time of `owner.update(dict.fromkeys(new, id_))`
            owner[key] = id_
        if len(owner) - before < len(new):  # the prompt has a key twice
            keys, new = list(dict.fromkeys(keys)), list(dict.fromkeys(new))
        if touch.live < len(keys):
            touch.keys, touch.live = list(keys), len(keys)
        return new

    def begin(self, keys: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """Do the same as `touch` for keys of which none is held, without a check of each."""
        owner, before, id_, all_ = self.owner, len(self.owner), self._name(), list(keys)
        self._asked = None
        for key in all_:
            owner[key] = id_
        if len(owner) - before < len(all_):  # the prompt has a key twice
            all_ = list(dict.fromkeys(all_))
        self._put(id_, Touch(all_, len(all_), stamp, now_s))
        return keys if len(all_) == len(keys) else all_

    def retouch(self, since: int, keys: Sequence[int], grown: Sequence[int], stamp: int, now_s: float) -> Sequence[int]:
        """Do the same as `touch` for `keys`, which were touched with the stamp `since`, and for the keys `grown` after
        them. In most cases no other prompt touched them in between."""
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
        """Add keys that were last used at `at_s`, before all known ones, root to leaf. New keys are held from now on,
        and evicted first. Returns the new keys."""
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
        """Number of the newest touch. Later touches have higher numbers."""
        return self._next

    def get_touch(self, id_: int) -> tuple[int, float, list[int]] | None:
        """Return (stamp, time of last use, owned keys from root to leaf) of a touch; None if it is gone."""
        touch = self.touches.get(id_)
        if touch is None:
            return None
        if touch.live < len(touch.keys):
            self._compact(id_, touch)
        return touch.stamp, touch.at_s, touch.keys

    def depth(self, keys: Sequence[int]) -> int:
        """Count the leading keys that are held."""
        found = self._runs(keys)
        owner, depth = self.owner, found[1]
        self._asked = (keys, found)
        while depth < len(keys) and keys[depth] in owner:  # only after blocks were lost in the middle of a touch
            depth += 1
        return depth

    def oldest(self) -> Touch | None:
        """Return the touch from which the next key is evicted."""
        return self.touches[next(iter(self.order.values()))] if self.order else None

    def oldest_few(self, pinned: Container[int], touches_max: int) -> list[tuple[int, float]]:
        """Return (keys, time of last use) of the oldest touches without these stamps, oldest first. Keys that are not
        expected to be used again have their own entry, with NEVER as time."""
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
        """Mark keys as not expected to be used again, from `first` to `last` of one prompt. Returns the number of
        marked keys.

        That needs a touch of this time that ends with `last`. Otherwise another prompt used or extended them since.
        Keys before `first` are useful to others.
        """
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
        """Drop the key. Returns True if it was held."""
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
        """Evict at most `keys_max` last keys of the oldest touch, and return them. There must be a touch."""
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
        """Return the leading keys by owner, as (touch, start, end), and their total number.

        A run begins at the beginning of its touch. It ends at the first new key, and at a gap left by blocks lost in
        the middle of a touch.
        """
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
        """Assign all runs to one touch, an existing or a new one. The rest of the other touches keeps its position."""
        if not runs:
            return self._name()
        id_ = self._keeper(runs)
        for earlier, start, end in runs:
            self._cut(earlier, end - start, kept=earlier == id_)
            if earlier != id_:
                self._give(keys[start:end], id_)
        return id_

    def _keeper(self, runs: list[tuple[int, int, int]]) -> int:
        """Return the touch of the run that needs the fewest writes, including those for the rest of the touch; or a new
        one."""
        best, saved = 0, 0
        for id_, start, end in runs:
            saves = 2 * (end - start) - self.touches[id_].live
            if saves > saved:
                best, saved = id_, saves
        return best or self._name()

    def _cut(self, id_: int, count: int, *, kept: bool) -> None:
        """Take the first `count` keys of a touch for a new use, under its name (`kept`) or another. The rest keeps its
        position."""
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
        """Touch any keys, with any owners."""
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
        for key in keys:  # two thirds of the time of `owner.update(dict.fromkeys(keys, id_))`
            owner[key] = id_

    def _name(self) -> int:
        self._next += 1
        return self._next

    def _put(self, id_: int, touch: Touch) -> None:
        self.touches[id_] = touch
        self.order[touch.stamp] = id_

    def _disown(self, id_: int, count: int) -> None:
        """Subtract `count` keys that have a new owner or are gone. Lists with few live keys are compacted (amortised
        O(1))."""
        touch = self.touches[id_]
        touch.live -= count
        if not touch.live:
            del self.touches[id_], self.order[touch.stamp]
        elif touch.live * 2 < len(touch.keys):
            self._compact(id_, touch)

    def _compact(self, id_: int, touch: Touch) -> None:
        owner = self.owner
        touch.keys = [key for key in touch.keys if owner.get(key) == id_]
