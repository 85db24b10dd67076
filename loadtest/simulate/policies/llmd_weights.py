"""llm-d's weighted scorers: the highest sum of prefix match, free KV and short queue, each between 0 and 1.

    score(r) = w_prefix x prefix(r) + w_kv x (1 - KV usage(r)) + w_queue x (longest - queue(r)) / (longest - shortest)

The sources are llm-d-router's chart (weights 3 : 2 : 2, max-score picker) and the scorers' own pages. A third one is
"KV-cache wins you can see" (2025-09, precise with 3 : 2 : 2, estimated with 1 : 1 : 1). KV usage and queue are the last
values from the engine's /metrics. The real router reads them every 50 ms. Here the interval is the race's probe
interval, the same for every row. If all queues are equally long, each scores 1. Prefix is scored in one of three ways:

- by share: matched blocks over the prompt's blocks, as in the current scorer that all of llm-d's index producers share;
- by range: as in the precise scorer at the time of the 2025 figures, from 0 for the replica with the shortest match to
  1 for the longest, of those with a match at all; 1 if all of those match alike;
- by a capped share: the estimating producer read only the first 256 blocks of 64 characters, so that a long system
  prompt hides the rest of the prompt.

Left out: the estimating producer's own LRU of 31,250 blocks a replica, which forgets later than engines do. All rows
share one cache estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate

SEEN_TOKENS = 256 * 64 // 4
"""Tokens of a prompt that the estimating producer reads: 256 blocks of 64 characters, four to a token."""

Prefix = Callable[[Sequence[Candidate]], list[float]]
"""Scores of candidates, 0 to 1."""


def score_share(candidates: Sequence[Candidate]) -> list[float]:
    """Return the cached share of the prompt for each candidate."""
    return [c.cached_tokens / (c.cached_tokens + c.uncached_tokens) for c in candidates]


def score_capped_share(candidates: Sequence[Candidate]) -> list[float]:
    """Return, for each candidate, the cached share of the part of the prompt that the producer reads."""
    return [min(1.0, c.cached_tokens / min(SEEN_TOKENS, c.cached_tokens + c.uncached_tokens)) for c in candidates]


def score_range(candidates: Sequence[Candidate]) -> list[float]:
    """Return the position of each match between the shortest and the longest."""
    matches = [c.cached_tokens for c in candidates if c.cached_tokens]
    if not matches:
        return [0.0] * len(candidates)
    low, high = min(matches), max(matches)
    if low == high:
        return [1.0 if c.cached_tokens else 0.0 for c in candidates]
    return [max(0.0, (c.cached_tokens - low) / (high - low)) for c in candidates]


class LlmdWeights(ScoringPolicy):
    """Policy of the weighted scorers. Its defaults are the chart's."""

    def __init__(
        self, name: str = "llmd_weights", prefix: Prefix = score_share, weights: tuple[float, float, float] = (3, 2, 2)
    ) -> None:
        """Create the policy with `weights` of prefix, KV and queue."""
        super().__init__()
        self.name, self._prefix, self._weights = name, prefix, weights

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        loads = [self._load(c) for c in candidates]
        queues = [load.waiting or 0 for load in loads]
        longest, shortest = max(queues), min(queues)
        w_prefix, w_kv, w_queue = self._weights
        scores = {}
        for c, prefix, load, queue in zip(candidates, self._prefix(candidates), loads, queues, strict=True):
            short = (longest - queue) / (longest - shortest) if longest > shortest else 1.0
            scores[c.id] = w_prefix * prefix + w_kv * (1 - (load.kv_usage or 0.0)) + w_queue * short
        return self._any(least(candidates, lambda c: -scores[c.id]))
