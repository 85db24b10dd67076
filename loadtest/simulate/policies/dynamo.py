"""NVIDIA Dynamo's KV router: prefill blocks and active blocks, added.

    cost(r) = 1.0 x (pending prefill blocks(r) + prompt blocks - overlap(r)) + active blocks(r) + new blocks(q, r)

Pending blocks are those of requests without a first token. Active blocks are the distinct blocks of all requests open
there, so a prefix that two of them share counts once. New blocks are those of this prompt that are not among them;
blocks of answers do not count. The least cost wins, and of several any (temperature 0).

Source: Dynamo 1.4-1.6's router design pages and its `ActiveSequences`, with defaults. These are a prefill load scale of
1.0, an overlap credit of 1.0 without decay, a weight of active requests of 0, and no queueing threshold. Both terms are
in one unit, so the choice does not depend on the size of a block. Blocks here are the router's own, of 128 tokens, and
prefill tokens are divided by that number without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.simulate.engine.placer import SimView
from loadtest.simulate.engine.shared_cache import known_depth
from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.active import ActiveBlocks
from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.prompts.block_keys import BLOCK_BYTES
from router.core.types.placements import Candidate

BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN


class Dynamo(ScoringPolicy):
    """Policy without settings except the defaults."""

    name = "dynamo"

    def __init__(self) -> None:
        super().__init__()
        self._keys: Sequence[int] = ()
        self._active: dict[str, ActiveBlocks] = {}

    def see(self, sight: SimView) -> None:
        """Keep the router's input and the prompt's block keys."""
        super().see(sight)
        self._keys = sight.turn.chain

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Count the blocks of the request as active on the replica."""
        super().on_placed(turn, replica, now_s)
        self._active.setdefault(replica, ActiveBlocks()).add(turn.chain)

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the blocks from the active ones, unless other requests share them."""
        super().on_ended(turn, replica, now_s)
        self._active[replica].remove(turn.chain)

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        return self._any(least(candidates, self._cost))

    def _cost(self, candidate: Candidate) -> float:
        active = self._active.get(candidate.id, ActiveBlocks())
        new = len(self._keys) - known_depth(self._keys, active)
        return (self._get_pending(candidate) + candidate.uncached_tokens) / BLOCK_TOKENS + len(active) + new
