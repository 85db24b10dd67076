"""What a receipt keeps of the candidates that were weighed.

A lease keeps its receipt until the answer ends, and the admin page keeps the last ones. All candidates of 256 replicas
are 48 KB, so with 64 requests open at each of them they would be 0.8 GB. What explains a placement are a few: the one
that was chosen, the one that holds most of the prompt, and those that would have been next.
"""

from __future__ import annotations

from bisect import insort
from math import inf

from router.core.facts.placements import Candidate

NEXT = 3  # cheapest ones besides the chosen and the longest holder
KEPT_MAX = NEXT + 2


def kept(candidates: list[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """All of a few candidates; of more the chosen, the longest holder (of several the one that would have been soonest)
    and the next cheapest, in the order in which they were."""
    if len(candidates) <= KEPT_MAX:
        return tuple(candidates)
    longest, most, soonest_ms, place, holder = chosen, chosen.cached_tokens, 0.0, 0, 0
    for n, c in enumerate(candidates):
        if c is chosen:
            place = n
        if c.cached_tokens < most:
            continue
        if c.cached_tokens > most or (longest is not chosen and _soon_ms(c) < soonest_ms):
            longest, most, soonest_ms, holder = c, c.cached_tokens, _soon_ms(c), n
    cheapest, limit = list[tuple[float, int]](), inf
    for n, c in enumerate(candidates):
        if c.price_ms < limit and c is not chosen and c is not longest:
            insort(cheapest, (c.price_ms, n))
            if len(cheapest) >= NEXT:
                del cheapest[NEXT:]
                limit = cheapest[-1][0]
    places = {place, place if longest is chosen else holder, *[n for _, n in cheapest]}
    return tuple([candidates[n] for n in sorted(places)])


def _soon_ms(c: Candidate) -> float:
    """Until its first token."""
    return c.pending_ms + c.kv_wait_ms + c.uncached_ms
