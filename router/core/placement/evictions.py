"""What a prompt would push out of a replica's cache, and what that is worth.

What is evicted is asked for again with the chance p (reuse.py). Then it is computed again, and pushes out as much in
its turn, which is asked for again, and so on. So a part p of it is lost at first, and p^2 + p^3 + ... = p^2 / (1 - p)
behind that, for as long as what goes is alive. Near p = 1 that is many times as much: one conversation too many on a
replica where all others go on costs each of them a turn, again and again.

Blocks go in the order of their last use, so their chances differ. They are added up once a second for what would go
next, and looked up for each request in between: what a second changes in that is little beside what p is known to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from router.core.cache.estimate import Holder
from router.core.learned.reuse import bucket

SUMS_S = 1.0  # for which they are good: chances are no younger than that
TOUCHES_MAX = 128  # uses of a prefix that are looked at, of one replica
RENEWED_MAX = 8  # replicas whose sums are made for one request, 70 us each at most: the next one has others
AGAIN_MAX = 0.95  # a chance above it is no better known: at most twenty times


class Sums(Struct, gc=False, eq=False):  # see core/facts/requests.py
    """Of what would go next, from the oldest on: blocks, those that are asked for again, and those pushed out in turn.
    Each up to and with one use of a prefix."""

    life: int  # of the cache: another one's are other blocks
    number: int  # by which it is told whose turn it is to be made anew
    at_s: float
    blocks: list[float]
    asked: list[float]
    turns: list[float]

    def of(self, blocks: float) -> tuple[float, float]:
        """Of so many blocks, which part is asked for again, and how much is pushed out in turn, as part of them."""
        known = self.blocks
        if blocks >= known[-1]:
            return self.asked[-1] / known[-1], self.turns[-1] / known[-1]
        i = bisect_left(known, blocks)
        before, asked, turns = (known[i - 1], self.asked[i - 1], self.turns[i - 1]) if i else (0.0, 0.0, 0.0)
        part = (blocks - before) / (known[i] - before)
        asked += part * (self.asked[i] - asked)
        turns += part * (self.turns[i] - turns)
        return asked / blocks, turns / blocks


class Displaced:
    """The sums of all replicas."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}
        self._at_s = float("-inf")
        self._turn = 0
        self._left = 0  # sums of others that may yet be made for this request

    def sums(self, id_: str, life: int, holder: Holder, odds: Sequence[float], now_s: float) -> Sums | None:
        """Of a replica's cache; None where nothing can be evicted. `odds` are chances by `bucket` of idle seconds."""
        if now_s != self._at_s:  # another request
            self._at_s = now_s
            self._turn += 1
            self._left = RENEWED_MAX
        sums = self._sums.get(id_)
        if sums is not None and sums.life == life:
            turns = -(-len(self._sums) // RENEWED_MAX)
            if now_s - sums.at_s < SUMS_S or (sums.number - self._turn) % turns:
                return sums
        elif self._left:
            self._left -= 1
        else:  # the oldest use stands for all until it is its turn
            return self._renew(id_, life, holder, odds, now_s, 1)
        return self._renew(id_, life, holder, odds, now_s, TOUCHES_MAX)

    def _renew(
        self, id_: str, life: int, holder: Holder, odds: Sequence[float], now_s: float, touches_max: int
    ) -> Sums | None:
        before = self._sums.get(id_)
        number = len(self._sums) if before is None else before.number
        blocks = asked = turns = 0.0
        sums = Sums(life, number, now_s if touches_max > 1 else float("-inf"), [], [], [])
        for live, at_s in holder.next_out(touches_max):
            chance = min(odds[bucket(now_s - at_s)], AGAIN_MAX)
            blocks += live
            asked += live * chance
            turns += live * chance * chance / (1 - chance)
            sums.blocks.append(blocks)
            sums.asked.append(asked)
            sums.turns.append(turns)
        if not sums.blocks:
            self._sums.pop(id_, None)
            return None
        self._sums[id_] = sums
        return sums

    def forget(self, id_: str) -> None:
        """A replica has left."""
        self._sums.pop(id_, None)
