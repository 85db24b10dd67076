"""Evictions that a prompt would cause in a replica's cache, and the work that other requests would repeat.

An evicted block is requested again with probability p (core/estimators/reuse.py). Then it is computed again and evicts
as many blocks, which are requested again with the same probability, and so on. So for each evicted block p blocks are
computed again at first, and p^2 + p^3 + ... = p^2 / (1 - p) afterwards, for the lifetime of the evicted conversations.
Near p = 1 the second sum is many times the first: one conversation too many on a replica costs each of the others one
turn, again and again.

Blocks are evicted in the order of their last use, so their probabilities differ. The probabilities of the blocks to be
evicted next are summed once a second. Requests in between look the sums up: the change within a second is small
compared with the error of p.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from router.core.cache_state.lru import NEVER
from router.core.cache_state.prefix_index import Holder
from router.core.estimators.reuse import bucket

SUMS_S = 1.0  # lifetime of the sums in seconds: the probabilities in them are not renewed more often
TOUCHES_MAX = 128  # uses of a prefix that are summed for one replica
RENEWED_MAX = 8  # At most 8 replicas are summed again for one request (70 us each); the next request does the next 8.
REUSE_PROBABILITY_MAX = 0.95  # upper limit of p: a block is computed again at most 20 times


class EvictionSums(Struct, gc=False, eq=False):  # a Struct for speed: core/types/requests.py
    """Sums over the uses of prefixes that would be evicted next, oldest first; entry i includes use i."""

    life: int  # cache epoch (Member.life): sums of another epoch are about other blocks
    number: int  # position in the order in which replicas are summed again
    at_s: float  # time at which these sums were made
    blocks: list[float]  # blocks evicted
    asked: list[float]  # blocks computed again because they are requested again
    turns: list[float]  # blocks computed again because the blocks in `asked` evicted them

    def compute_shares(self, blocks: float) -> tuple[float, float]:
        """Return the shares of this many evicted blocks that are (requested again, evicted by those)."""
        known = self.blocks
        if blocks >= known[-1]:
            return self.asked[-1] / known[-1], self.turns[-1] / known[-1]
        i = bisect_left(known, blocks)
        before, asked, turns = (known[i - 1], self.asked[i - 1], self.turns[i - 1]) if i else (0.0, 0.0, 0.0)
        part = (blocks - before) / (known[i] - before)
        asked += part * (self.asked[i] - asked)
        turns += part * (self.turns[i] - turns)
        return asked / blocks, turns / blocks


class EvictionCost:
    """The eviction sums of all replicas."""

    def __init__(self) -> None:
        self._sums: dict[str, EvictionSums] = {}
        self._at_s = float("-inf")
        self._turn = 0
        self._left = 0  # replicas that may still be summed for this request

    def sums(self, id_: str, life: int, holder: Holder, odds: Sequence[float], now_s: float) -> EvictionSums | None:
        """Return the sums of a replica's cache, or None if nothing can be evicted. `odds` are the probabilities that a
        block is requested again, by the `bucket` of its idle seconds."""
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
        else:  # sum only the oldest use until it is this replica's turn
            return self._renew(id_, life, holder, odds, now_s, 1)
        return self._renew(id_, life, holder, odds, now_s, TOUCHES_MAX)

    def _renew(
        self, id_: str, life: int, holder: Holder, odds: Sequence[float], now_s: float, touches_max: int
    ) -> EvictionSums | None:
        before = self._sums.get(id_)
        number = len(self._sums) if before is None else before.number
        blocks = asked = turns = 0.0
        sums = EvictionSums(life, number, now_s if touches_max > 1 else float("-inf"), [], [], [])
        for live, at_s in holder.next_out(touches_max):
            chance = min(odds[bucket(now_s - at_s)], REUSE_PROBABILITY_MAX) if at_s != NEVER else 0.0
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
        """Drop the sums of a replica that has left."""
        self._sums.pop(id_, None)
