"""AMD Infera's `kv_event_aware`: missed blocks, blocks in flight, and recent misses.

    cost(r) = 1.0 x (prompt blocks - hits(r)) + load(r);  load(r) = distinct blocks in flight(r) + recent(r)
    each pick:  recent(all) x 0.97, then recent(chosen) + blocks it missed, 1 for a prompt without a block
    argmin (cost, load), the first of several

Source: Infera at 5890f7f (2026-08-21), infera/router/policy/kv_event_aware.py, with the overlap weight of a mixed pool.
Blocks here are the router's own, of 128 tokens; those of Infera's index have 768. All terms except the 1 are in blocks,
so only the rounding differs. Left out: retention hints of the client, image affinity, weights of prefill and decode
pools.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.dynamo import BLOCK_TOKENS, Dynamo
from router.core.types.placements import Candidate

OVERLAP_WEIGHT = 1.0
RECENT_DECAY = 0.97
UNKNOWN_BLOCKS = 1.0
RECENT_MIN = 1e-3


class Infera(Dynamo):
    """Policy without settings except the defaults. Distinct blocks in flight are counted as in Dynamo's row."""

    name = "infera"

    def __init__(self) -> None:
        super().__init__()
        self.recent: dict[str, float] = {}

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        chosen = min(
            candidates,
            key=lambda c: (OVERLAP_WEIGHT * self._count_missed_blocks(c) + self._load_of(c), self._load_of(c)),
        )
        decayed = {name: RECENT_DECAY * blocks for name, blocks in self.recent.items()}
        self.recent = {name: blocks for name, blocks in decayed.items() if blocks >= RECENT_MIN}
        charge = self._count_missed_blocks(chosen) if self._keys else UNKNOWN_BLOCKS
        self.recent[chosen.id] = self.recent.get(chosen.id, 0.0) + charge
        return chosen

    def _count_missed_blocks(self, candidate: Candidate) -> float:
        return max(0, len(self._keys) - candidate.cached_tokens // BLOCK_TOKENS)

    def _load_of(self, candidate: Candidate) -> float:
        return len(self._active.get(candidate.id, ())) + self.recent.get(candidate.id, 0.0)
