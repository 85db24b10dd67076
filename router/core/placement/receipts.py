"""Receipts: the destination of a request and the reason, as reported to clients, the log and the admin page.

A lease keeps its receipt until the answer ends, and the admin page keeps the latest ones. All candidates of 256
replicas take 48 KB, so 64 open requests on each replica would take 0.8 GB. A few candidates explain a placement: the
chosen one, the one with the longest cached prefix, and the next cheapest ones.
"""

from __future__ import annotations

from bisect import insort
from math import inf

from router.core.types.placements import Candidate, ExternalKv, PlacementReason, Pull, Receipt

NEXT = 3  # cheapest candidates kept in addition to the chosen one and the longest holder
KEPT_MAX = NEXT + 2
_RETRY, _ONLY, _POLICY, _PULL = (
    PlacementReason.RETRY,
    PlacementReason.ONLY,
    PlacementReason.POLICY,
    PlacementReason.PULL,
)


def reason_of(
    chosen: Candidate, candidates: list[Candidate], *, tied: bool, retry: bool, cache_aware: bool
) -> PlacementReason:
    """Return the reason of a choice.

    - `tied`: the price did not decide.
    - `cache_aware`: the policy considers caches.
    """
    if retry:
        return PlacementReason.RETRY
    if len(candidates) == 1:
        return PlacementReason.ONLY
    if not cache_aware:
        return PlacementReason.POLICY
    longest = 0
    for c in candidates:
        if c.cached_tokens > longest:
            longest = c.cached_tokens
    if not longest:
        return PlacementReason.COLD
    if chosen.cached_tokens == longest:
        return PlacementReason.WARM
    return PlacementReason.TIE if tied else PlacementReason.SPILL


def trim_candidates(candidates: list[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """Return all candidates if there are few. Of many, return the chosen one, the longest holder and the next cheapest,
    in their original order. If several hold the same, the longest holder is the one with the earliest first token."""
    if len(candidates) <= KEPT_MAX:
        return tuple(candidates)
    longest, most, soonest_ms, place, holder = chosen, chosen.cached_tokens, 0.0, 0, 0
    for n, c in enumerate(candidates):
        if c is chosen:
            place = n
        if c.cached_tokens < most:
            continue
        if c.cached_tokens > most or (longest is not chosen and c.first_token_ms < soonest_ms):
            longest, most, soonest_ms, holder = c, c.cached_tokens, c.first_token_ms, n
    cheapest, limit = list[tuple[float, int]](), inf
    for n, c in enumerate(candidates):
        if c.price_ms < limit and c is not chosen and c is not longest:
            insort(cheapest, (c.price_ms, n))
            if len(cheapest) >= NEXT:
                del cheapest[NEXT:]
                limit = cheapest[-1][0]
    places = {place, place if longest is chosen else holder, *[n for _, n in cheapest]}
    return tuple([candidates[n] for n in sorted(places)])


def take_pull(receipt: Receipt, chosen: Candidate, pull: Pull) -> None:
    """Count the pulled tokens as cached on the chosen candidate, instead of as computed there."""
    chosen.uncached_tokens -= pull.tokens
    chosen.uncached_ms, chosen.stalled_ms = pull.uncached_ms, pull.stalled_ms
    receipt.brought = ExternalKv(receipt.predicted_tier_tokens, pull)
    receipt.predicted_cached_tokens += pull.tokens
    receipt.spilled_tokens = max(0, receipt.spilled_tokens - pull.tokens)
    if not receipt.spilled_tokens:
        receipt.spill = ""
    if receipt.reason not in {_RETRY, _ONLY, _POLICY}:
        receipt.reason = _PULL
