"""llm-d's load-aware placement with pulls: the least loaded replica, and a pull above a number of tokens.

llm-d-router's `p2p-source-producer` (README, 2026-08): behind whatever placement the scorers make, the endpoint with
most of the prompt in CPU memory is named as the source where it has at least `minCachedTokenDelta` tokens more than the
chosen one; here 1,024. Left out: of sources within a block of the most it takes one at random, weighted by
1 / (1 + requests that wait there); here it is the one whose pull is over soonest.
"""

from __future__ import annotations

from router.core.facts.placements import Candidate, Market, Pull
from router.core.placement.policies.least_loaded import LeastLoaded

TOKENS_MIN = 1_024


class PullThreshold(LeastLoaded):
    """Everything but the pull is `least_loaded`'s."""

    def __init__(self, tokens_min: int = TOKENS_MIN) -> None:
        super().__init__(name="pull_threshold")
        self._tokens_min = tokens_min

    def pulls(self, market: Market, chosen: Candidate, pull: Pull) -> bool:
        """Whether it is long enough."""
        return pull.tokens >= self._tokens_min
