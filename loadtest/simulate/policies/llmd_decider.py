"""llm-d's `prefix-based-pd-decider`: a remote prefill if enough tokens are uncached on the decode replica.

In llm-d-router (2026-08) the profile of scorers first picks the decode endpoint. Then the decider compares the prompt's
uncached suffix there with `nonCachedTokens`. Then a second profile picks the prefill endpoint. Here both profiles are
the chart's scorers (llmd_weights.py): 3 for the share that is cached, 2 for a short queue, 2 for free KV memory. No
default of the threshold is published. It is a value of each installation, here 1,024.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.llmd_weights import LlmdWeights
from router.core.placement.policies import TransferTimes
from router.core.types.placements import Candidate, DisaggPlan, PlacementContext

NON_CACHED_TOKENS = 1_024


class LlmdDecider(LlmdWeights):
    """Policy with the placement of `llmd_weights`, for both stages."""

    def __init__(self, non_cached_tokens: int = NON_CACHED_TOKENS) -> None:
        super().__init__(name="llmd_decider")
        self._non_cached_tokens = non_cached_tokens

    def may_split(self, market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """True if the uncached tokens reach the threshold."""
        return chosen.uncached_tokens >= self._non_cached_tokens

    def split(
        self,
        market: PlacementContext,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: TransferTimes,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> DisaggPlan | None:
        """Return the prefill replica with the highest score, if too many tokens are uncached."""
        if chosen.uncached_tokens < self._non_cached_tokens and not must:
            return None
        able = [each for each in prefill if pairs.transfer_ms(each, chosen) is not None]
        if not able or all(chosen.id != each.id for each in decode):
            return None
        first = self._pick(able)
        return DisaggPlan(first, chosen, pairs.transfer_ms(first, chosen) or 0.0, 0.0)
