"""LMetric: the least product of prefill work and batch size.

    argmin (queued prefill tokens(r) + new prefill tokens(q, r)) x batch size(r)

Source: "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling" (arXiv 2603.15202). It has no
parameters. The batch is the number of requests that the router has open there. An idle replica's batch is 0, and so is
its product, for any number of tokens to compute: an idle replica without the prompt is as good as the one that holds
all of it. That is the rule's known degeneracy and is kept. The row `lmetric_plus_one` counts the request itself into
the batch, as llm-d's scorer of that name does (llm-d-router #2351).
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate


class LMetric(ScoringPolicy):
    """Policy of the product. `self_in_batch` of 1 counts the request into the batch that it would join."""

    def __init__(self, name: str = "lmetric", self_in_batch: int = 0) -> None:
        super().__init__()
        self.name, self._self_in_batch = name, self_in_batch

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        return self._any(least(candidates, self._product))

    def _product(self, candidate: Candidate) -> int:
        tokens = self._get_pending(candidate) + candidate.uncached_tokens
        return tokens * (candidate.in_flight + self._self_in_batch)
