"""llm-d's default of 2026: an affinity filter that breaks when it costs too much, then the least token load.

    sticky = replicas that hold at least 0.80 of the prompt; all, if none does
    all again, if min TTFT(sticky) - min TTFT(others) > 18,000 ms, with TTFT(r) = in-flight tokens(r) / 15,928 tok/s
    argmax 1 - min(1, (in-flight tokens(r) + this request's there) / 4,194,304)

In-flight tokens are the uncached prompt tokens of requests without a first token, by the router's own count. Ties are
resolved by turns, as in its max-score picker. Source: llm-d-router's prefix-cache-affinity-filter, token-load-scorer
and inflight-load-producer with their built-in defaults. The throughput is that of Qwen3-32B on two H100; a race with
other engines uses it uncalibrated, as installed. The filter's share is of `cached_tokens`, the estimate that all rows
share: with exact events this is its precise guide, with estimates its optimized baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from router.core.types.placements import Candidate

AFFINITY = 0.80
PENALTY_MAX_MS = 18_000.0
PREFILL_TOKENS_PER_MS = 15.928
LOAD_TOKENS_MAX = 4_194_304


class LlmdAffinity(ScoringPolicy):
    """Policy without settings except the defaults."""

    name = "llmd_affinity"

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        return self._turns.one_of(least(self._sticky(candidates) or candidates, self._load_share))

    def _sticky(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that hold enough of the prompt, or no candidate if they are too far behind the
        others."""
        sticky: list[Candidate] = []
        others: list[Candidate] = []
        for c in candidates:
            held = c.cached_tokens >= AFFINITY * (c.cached_tokens + c.uncached_tokens)
            (sticky if held else others).append(c)
        if sticky and others:
            ahead_tokens = min(map(self._get_pending, sticky)) - min(map(self._get_pending, others))
            if ahead_tokens / PREFILL_TOKENS_PER_MS > PENALTY_MAX_MS:
                return []
        return sticky

    def _load_share(self, candidate: Candidate) -> float:
        return min(1.0, (self._get_pending(candidate) + candidate.uncached_tokens) / LOAD_TOKENS_MAX)
