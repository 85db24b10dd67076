"""llm-d's load-aware placement with P2P KV transfers: the least loaded replica, and a transfer above a token threshold.

This is llm-d-router's `p2p-source-producer` (README, 2026-08). After any placement by the scorers, it names the
endpoint with most of the prompt in CPU memory as the source. The condition is that this endpoint has at least
`minCachedTokenDelta` tokens more than the chosen one; here 1,024. Left out: of sources within a block of the most it
takes one at random, weighted by 1 / (1 + requests that wait there). Here it is the one with the transfer that ends
first.
"""

from __future__ import annotations

from router.core.placement.policies.least_loaded import LeastLoaded
from router.core.types.placements import Candidate, PlacementContext, Pull

TOKENS_MIN = 1_024


class PullThreshold(LeastLoaded):
    """Policy of `least_loaded`, except for the transfer."""

    def __init__(self, tokens_min: int = TOKENS_MIN) -> None:
        super().__init__(name="pull_threshold")
        self._tokens_min = tokens_min

    def pulls(self, market: PlacementContext, chosen: Candidate, pull: Pull) -> bool:
        """True if the transfer has at least `tokens_min` tokens."""
        return pull.tokens >= self._tokens_min
