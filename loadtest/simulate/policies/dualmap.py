"""DualMap, restated from its paper: two places for each prefix, the one that holds it unless that would be too late.

    pair(q)    = the replicas after the hashes of the prompt's beginning on two rings; two different ones
    TTFT(r)    = (pending uncached tokens(r) + uncached tokens(q, r)) / 15,928 tok/s
    the longer match of the two while its TTFT <= 5 s, else the shorter TTFT;  equal matches: the shorter TTFT

Source: DualMap, arXiv 2602.06502 (ICLR 2026). The paper adapts the length of the beginning to its popularity, but not
in enough detail to restate it. Here it is the first 1,024 tokens, so a prefix common to all prompts stays on two
replicas, which is unfair to DualMap if there is only one such prefix. Its target depends on the model; ours is 5 s.
Left out: the move of waiting requests from one replica of the pair to the other, which no router here can do.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.dynamo import BLOCK_TOKENS
from loadtest.simulate.policies.llmd_affinity import PREFILL_TOKENS_PER_MS
from loadtest.simulate.policies.load_accounting import ScoringPolicy
from router.core.placement.ring import Ring
from router.core.types.placements import Candidate

PREFIX_TOKENS = 1_024
TTFT_MAX_MS = 5_000.0


class DualMap(ScoringPolicy):
    """Policy without settings except those above. Its two rings are one ring with two keys for each prompt."""

    name = "dualmap"

    def __init__(self) -> None:
        super().__init__()
        self._ring = Ring()

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        pair = self._pair(candidates)
        longer = min(pair, key=lambda c: (-c.cached_tokens, self._ttft_ms(c)))
        if self._ttft_ms(longer) <= TTFT_MAX_MS:
            return longer
        return min(pair, key=self._ttft_ms)

    def _pair(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        turn, by_name = self.sight.turn, {c.id: c for c in candidates}
        blocks = min(PREFIX_TOKENS // BLOCK_TOKENS, len(turn.chain))
        key = turn.chain[blocks - 1] if blocks else turn.end_key
        first = self._ring.walk(f"{key:x}/1", set(by_name))[0]
        rest = by_name.keys() - {first} or {first}
        return [by_name[first], by_name[self._ring.walk(f"{key:x}/2", set(rest))[0]]]

    def _ttft_ms(self, candidate: Candidate) -> float:
        return (self._get_pending(candidate) + candidate.uncached_tokens) / PREFILL_TOKENS_PER_MS
