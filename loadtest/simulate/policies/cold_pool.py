"""Dynamo's Cold Pool: very long prefills with little reuse go to a few replicas of their own.

    cold(q)  = uncached tokens on the best replica >= 65,536, and at least half of the prompt
    pool     = the last quarter of the replicas, at least one: static
    a cold request  -> Dynamo's cost (dynamo.py) over the pool
    any other       -> Dynamo's cost over all except those of the pool that have a cold prefill pending (soft drain);
                       over all if there are no others

Source: Dynamo #12803 and draft #12806 (2026-08), restated from their description. Membership is static, long misses of
low reuse are confined, a busy member is drained softly, and no request is left without a replica. The draft's
thresholds are not stated, so those above are ours. (Its workloads inject misses of 400,000 and 600,000 tokens among
ordinary requests on six workers.) Its limit on the time that a member is drained is left out, and so is its queue in
the router.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.dynamo import Dynamo
from router.core.types.placements import Candidate

COLD_TOKENS_MIN = 65_536
COLD_SHARE_MIN = 0.5
POOL_SHARE = 4
"""One in this many replicas is in the pool."""


class ColdPool(Dynamo):
    """Policy of the cold pool, without settings except those above."""

    name = "dynamo_cold_pool"

    def __init__(self) -> None:
        super().__init__()
        self._cold = False
        self._prefilling: dict[SimRequest, str] = {}

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Drain the replica of a cold request."""
        super().on_placed(turn, replica, now_s)
        if self._cold:
            self._prefilling[turn] = replica

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """End the drain: the prefill is over."""
        super().first_token(turn, replica, now_s)
        self._prefilling.pop(turn, None)

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        names = list(self.sight.router.fleet.members)
        pool = set(names[-max(1, len(names) // POOL_SHARE) :])
        best = min(candidates, key=lambda c: c.uncached_tokens)
        tokens = best.uncached_tokens
        self._cold = tokens >= COLD_TOKENS_MIN and tokens >= COLD_SHARE_MIN * (tokens + best.cached_tokens)
        drained = set(self._prefilling.values())
        kept = [c for c in candidates if (c.id in pool if self._cold else c.id not in drained)]
        return super()._pick(kept or candidates)
