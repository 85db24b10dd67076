"""Funnel of a breakdown: the place in which each token of a prompt ended, from requested to hit.

    asked > seen before > unchanged > kept > reached > hit

A prompt loses tokens at each stage (cache_misses.STAGES), and the tokens left at the end were found. Every token is in
one place, so places add up to the prompt as hits and misses do. They follow the engine's own count if it reported one.
Only a breakdown is needed, so no state is kept for an open request: places are computed once, at its end.
"""

from __future__ import annotations

from router.core.types.cache_misses import MissReason, TokenBreakdown, TokenFate

_PLACES = {
    MissReason.DIVERGED: TokenFate.REWRITTEN,
    MissReason.EVICTED: TokenFate.EVICTED_HERE,
    MissReason.SPILLED: TokenFate.CACHED_ON_OTHER_REPLICA,
    MissReason.REPLICA_LOST: TokenFate.REPLICA_LOST,
    MissReason.IDENTITY: TokenFate.IDENTITY,
    MissReason.MISPREDICTED: TokenFate.MISPREDICTED,
    MissReason.UNSUPPORTED: TokenFate.UNSUPPORTED,
    MissReason.COLD: TokenFate.NEVER_SEEN,
    MissReason.NEW: TokenFate.NEVER_SEEN,
    MissReason.TAIL: TokenFate.TAIL,
}
_HERE, _OTHERS, _NEVER_SEEN = TokenFate.EVICTED_HERE, TokenFate.EVICTED_BY_OTHERS, TokenFate.NEVER_SEEN
_TIER, _PULLED, _REPLAY, _GPU_HIT = TokenFate.TIER, TokenFate.PULLED, TokenFate.REPLAY, TokenFate.GPU_HIT


def token_fates(miss: TokenBreakdown, *, replay: bool) -> dict[TokenFate, int]:
    """Return tokens by place, for places that have any; they add up to the prompt. `replay`: the same prompt was
    requested before."""
    places: dict[TokenFate, int] = {}
    for reason, tokens in miss.misses.items():
        place = _PLACES[reason]
        if place is _HERE and tokens and miss.dropped_elsewhere:
            places[_OTHERS] = dropped = min(miss.dropped_elsewhere, tokens)
            tokens -= dropped
        if place is _NEVER_SEEN and place in places:  # the prompt has cold tokens and new ones
            tokens += places[place]
        if tokens:
            places[place] = tokens
    loaded = min(miss.loaded, miss.hit)
    if loaded:
        places[_TIER] = loaded
    pulled = min(miss.pulled, miss.hit - loaded)
    if pulled:
        places[_PULLED] = pulled
    if miss.hit > loaded + pulled:
        places[_REPLAY if replay else _GPU_HIT] = miss.hit - loaded - pulled
    return places
