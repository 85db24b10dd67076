"""The funnel: a breakdown says in which place each token of a prompt ended, from asked to hit.

    asked > seen before > unchanged > kept > reached > hit

A prompt loses tokens at each stage (misses.STAGES), and what is left at the end was found. Every token is in one place,
so places add up to the prompt as hits and misses do; by the engine's own count where it told. A breakdown is all that
is needed, so nothing is kept of a request for this while it is open: places are made once, at its end.
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
    """Tokens by place, of places that have any; they add up to the prompt. `replay`: the very prompt was asked for
    before."""
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
