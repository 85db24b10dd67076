"""aibrix_prefix: AIBrix's `prefix-cache`, the longest match among replicas that are not busier than usual.

    if max - min running > imbalance: the least loaded, any of several
    else among replicas that hold a leading part of the prompt, by share held (whole per cent, most first) and then by
    running requests: the first with running <= mean + factor * standard deviation
    if no such replica: the least loaded, any of several

It keeps blocks of characters in one table for all replicas, with the replicas that each block was sent to. It drops the
least recently used block above a limit, and every block after 20 minutes. With the defaults of the code the limit is
200,000 blocks of 4 characters, which is 200,000 tokens of text for the whole fleet. Its README has 128 characters, 16
requests and 2 deviations instead. That is a table 32 times as large, so it is a separate row. Here the table holds the
router's keys of 512 characters, as many keys as hold the same text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from loadtest.simulate.policies.base import SimPolicy, draw_number, one_of_least_loaded
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

BLOCKS_MAX = 200_000
FORGET_S = 20 * 60.0
_NOBODY: set[str] = set()


@dataclass(frozen=True, slots=True)
class Setup:
    """Values of its environment variables."""

    block_chars: int = 4
    imbalance_requests: int = 8
    deviations: int = 1


CODE = Setup()
README = Setup(block_chars=128, imbalance_requests=16, deviations=2)


class PrefixCache(SimPolicy):
    """AIBrix's policy with its table of blocks."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._setup = setup
        self._keys_max = BLOCKS_MAX * setup.block_chars // BLOCK_BYTES
        self._table: OrderedDict[int, tuple[float, set[str]]] = OrderedDict()

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the replica that holds the largest share of the prompt, within the limit."""
        sight, setup = self.sight, self._setup
        keys = sight.turn.chain
        loads = [c.in_flight for c in candidates]
        self._forget(sight.now_s)
        chosen = None
        if max(loads) - min(loads) <= setup.imbalance_requests:
            shares = self._shares(keys, candidates)
            limit = fmean(loads) + setup.deviations * pstdev(loads)
            within = [c for c in candidates if c.id in shares and c.in_flight <= limit]
            if within:
                best = max((shares[c.id], -c.in_flight) for c in within)
                tied = [c for c in within if (shares[c.id], -c.in_flight) == best]
                chosen = tied[draw_number(sight.turn, len(tied))]
        if chosen is None:
            chosen = one_of_least_loaded(candidates, sight.turn)
        self._remember(keys, chosen.id, sight.now_s)
        return PolicyDecision(chosen.id, tied=False)

    def _shares(self, keys: array[int], candidates: Sequence[Candidate]) -> dict[str, int]:
        """Return the per cent of the prompt's blocks that each replica holds, without a gap from the first block."""
        table, left = self._table, {c.id for c in candidates}
        shares: dict[str, int] = {}
        for held, key in enumerate(keys):
            block = table.get(key)
            holders = block[1] if block is not None else _NOBODY
            if not left <= holders:
                shares.update(dict.fromkeys(left - holders, held * 100 // len(keys)))
                left = left & holders
                if not left:
                    break
        shares.update(dict.fromkeys(left, 100))
        return {replica: share for replica, share in shares.items() if share}

    def _remember(self, keys: array[int], replica: str, now_s: float) -> None:
        table = self._table
        for key in keys:
            block = table.get(key)
            if block is None:
                table[key] = (now_s, {replica})
                if len(table) > self._keys_max:
                    table.popitem(last=False)
            else:
                block[1].add(replica)
                table[key] = (now_s, block[1])
                table.move_to_end(key)

    def _forget(self, now_s: float) -> None:
        table = self._table
        while table and next(iter(table.values()))[0] < now_s - FORGET_S:
            table.popitem(last=False)
