"""Funnel of a breakdown: the place in which each token of a prompt ended, from requested to hit.

    asked > seen before > unchanged > kept > reached > hit

A prompt loses tokens at each stage (misses.STAGES), and the tokens left at the end were found. Every token is in one
place, so places add up to the prompt as hits and misses do. They follow the engine's own count if it reported one. Only
a breakdown is needed, so no state is kept for an open request: places are computed once, at its end.
"""

from __future__ import annotations

from router.core.facts.misses import Breakdown, Miss, TokenPlace

# An enum's member costs as much as a call to look up.
_PLACES = {
    Miss.DIVERGED: TokenPlace.REWRITTEN,
    Miss.EVICTED: TokenPlace.EVICTED_HERE,
    Miss.SPILLED: TokenPlace.HELD_ELSEWHERE,
    Miss.REPLICA_LOST: TokenPlace.REPLICA_LOST,
    Miss.IDENTITY: TokenPlace.IDENTITY,
    Miss.MISPREDICTED: TokenPlace.MISPREDICTED,
    Miss.UNSUPPORTED: TokenPlace.UNSUPPORTED,
    Miss.COLD: TokenPlace.NEVER_SEEN,
    Miss.NEW: TokenPlace.NEVER_SEEN,
    Miss.TAIL: TokenPlace.TAIL,
}
_HERE, _OTHERS, _NEVER_SEEN = TokenPlace.EVICTED_HERE, TokenPlace.EVICTED_BY_OTHERS, TokenPlace.NEVER_SEEN
_TIER, _PULLED, _REPLAY, _GENUINE = TokenPlace.TIER, TokenPlace.PULLED, TokenPlace.REPLAY, TokenPlace.GENUINE


def places_of(miss: Breakdown, *, replay: bool) -> dict[TokenPlace, int]:
    """Return tokens by place, for places that have any; they add up to the prompt. `replay`: the same prompt was
    requested before."""
    places: dict[TokenPlace, int] = {}
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
        places[_REPLAY if replay else _GENUINE] = miss.hit - loaded - pulled
    return places
