"""llm-d's work classes: replicas for short prefills and replicas for long ones, by a measure of length.

    work(q, r)  = uncached tokens there (`remaining_work`), or all of the prompt (`total_length`)
    in range(r) = work <= 8,192 on replicas of the short class, > 8,192 on those of the long one
    sticky      = as in llmd_affinity: those that hold 0.80 of the prompt, unless they are 18 s behind; else all
    argmax of (in range, least in-flight tokens) over them;  ties by turns

Source: llm-d-router #2540 and #2559 (merged 2026-08) and the guide's configuration. `context-length-aware` scores and
does not filter, after `prefix-cache-affinity-filter`, with ranges 0-8192 and 8193-120000 on classes of equal size.
There a prefix is subtracted that any replica can *pull* from a peer. Here no prefix is transferred, so only the
replica's own prefix counts. The first half of the replicas is the short class.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.policies.llmd_affinity import LlmdAffinity
from loadtest.simulate.policies.load_accounting import least
from router.core.types.placements import Candidate

SHORT_TOKENS_MAX = 8_192


class WorkClasses(LlmdAffinity):
    """Policy by class. `remaining` is True for the tokens left to compute, False for the prompt's length."""

    def __init__(self, name: str, *, remaining: bool) -> None:
        super().__init__()
        self.name = name
        self._remaining = remaining

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        names = list(self.sight.router.fleet.members)
        short = set(names[: (len(names) + 1) // 2])
        kept = self._sticky(candidates) or candidates
        fitting = [c for c in kept if (c.id in short) == (self._length(c) <= SHORT_TOKENS_MAX)]
        return self._turns.one_of(least(fitting or kept, self._load_share))

    def _length(self, candidate: Candidate) -> int:
        return candidate.uncached_tokens + (0 if self._remaining else candidate.cached_tokens)
