"""llm-d's choice by predicted latency, for requests with a deadline of their first token.

    sticky  = replicas that hold at least 0.99 of the prompt; all, if none does, or if their TTFT is over 5 s worse
    able    = sticky replicas with headroom, deadline - predicted TTFT, of at least 0; without a deadline none has
    tier    = able; the others if there are no able ones, and for 1 % of the requests if there are both
    among   = replicas of the tier that hold at least 0.80 of the prompt, by the same rule as above
    able:   weight 1 - (headroom - least) / (most - least), which packs; a replica at random by weight
    others: only replicas without open requests, if there are any; the same by their lateness

Source: llm-d-router's latency-scorer of 2026 with its built-in defaults, before its weighted-random picker. (The
strategy is `least`, and 1 % of the requests skip the first of the affinity gates.) Its predictor is trained on traffic
for half an hour and is not restated: the predicted time is the one that our own prices expect. Time per output token is
left out, as for a client that sets no deadline for it. The admitter that belongs to it rejects only requests of
negative priority, and no request here has one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from loadtest.simulate.policies.base import SimPolicy
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

STRICT, LOOSE = 0.99, 0.80
PENALTY_MAX_MS = 5_000.0
EXPLORED = 0.01
"""Part of the requests that skip affinity, and part for which late replicas are chosen."""


class LlmdSlo(SimPolicy):
    """Policy without settings except the defaults. `within_s` gives the deadlines in seconds, by the turn's number."""

    name = "llmd_slo"

    def __init__(self, within_s: Mapping[int, float]) -> None:
        self._within_s = within_s
        self._chances = random.Random(1)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Pick one of `candidates`."""
        left = candidates if self._explores() else _sticky(candidates, STRICT)
        limit_ms = 1e3 * self._within_s.get(self.sight.turn.number, 0.0)
        able, others = list[Candidate](), list[Candidate]()
        for c in left:
            (able if ttft_ms(c) <= limit_ms else others).append(c)
        if able and (not others or not self._explores()):
            return PolicyDecision(self._choose_weighted(_sticky(able, LOOSE), sign=1.0).id)
        among = _sticky(others, LOOSE)
        return PolicyDecision(self._choose_weighted([c for c in among if not c.in_flight] or among, sign=-1.0).id)

    def _explores(self) -> bool:
        return self._chances.random() < EXPLORED

    def _choose_weighted(self, among: Sequence[Candidate], *, sign: float) -> Candidate:
        """Return one at random. A later first token is likelier if `sign` is 1, a sooner one if it is -1."""
        times = [sign * ttft_ms(c) for c in among]
        low, high = min(times), max(times)
        if low == high:
            return self._chances.choice(among)
        return self._chances.choices(among, [(each - low) / (high - low) for each in times])[0]


def ttft_ms(candidate: Candidate) -> float:
    """Return milliseconds to the first token."""
    return candidate.pending_ms + candidate.uncached_ms


def _sticky(candidates: Sequence[Candidate], share: float) -> Sequence[Candidate]:
    """Return the candidates that hold at least `share` of the prompt. Return all if none does, or if these are too far
    behind the others."""
    sticky, others = list[Candidate](), list[Candidate]()
    for c in candidates:
        held = c.cached_tokens >= share * (c.cached_tokens + c.uncached_tokens)
        (sticky if held else others).append(c)
    if sticky and others and min(map(ttft_ms, sticky)) - min(map(ttft_ms, others)) > PENALTY_MAX_MS:
        return candidates
    return sticky or candidates
