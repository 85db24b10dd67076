"""The funnel: a breakdown says in which place each token of a prompt ended, from asked to found.

    asked > seen before > unchanged > kept > reached > hit

A prompt loses tokens at each stage (misses.STAGES), and what is left at the end was found. Every token is in one place,
so places add up to the prompt as hits and misses do; by the engine's own count where it told. A breakdown is all that
is needed, so nothing is kept of a request for this while it is open: places are made once, at its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.core.facts.misses import STAGES, Breakdown, Miss, Place

ASKED = "asked"

# An enum's member costs as much as a call to look up.
_PLACES: dict[Miss, Place] = {
    Miss.DIVERGED: Place.REWRITTEN,
    Miss.EVICTED: Place.EVICTED_HERE,
    Miss.SPILLED: Place.HELD_ELSEWHERE,
    Miss.REPLICA_LOST: Place.REPLICA_LOST,
    Miss.IDENTITY: Place.IDENTITY,
    Miss.MISPREDICTED: Place.MISPREDICTED,
    Miss.UNSUPPORTED: Place.UNSUPPORTED,
    Miss.COLD: Place.NEVER_SEEN,
    Miss.NEW: Place.NEVER_SEEN,
    Miss.TAIL: Place.TAIL,
}
_HERE, _OTHERS, _NEVER_SEEN = Place.EVICTED_HERE, Place.EVICTED_BY_OTHERS, Place.NEVER_SEEN
_TIER, _REPLAY, _GENUINE = Place.TIER, Place.REPLAY, Place.GENUINE


def places_of(miss: Breakdown, *, replay: bool) -> dict[Place, int]:
    """Tokens by place, of places that have any; they add up to the prompt. `replay`: the very prompt was asked for
    before."""
    places: dict[Place, int] = {}
    for reason, tokens in miss.misses.items():
        place = _PLACES[reason]
        if place is _HERE and miss.dropped_elsewhere:
            places[_OTHERS] = dropped = min(miss.dropped_elsewhere, tokens)
            tokens -= dropped
        if place is _NEVER_SEEN and place in places:  # both cold and new
            tokens += places[place]
        if tokens:
            places[place] = tokens
    loaded = min(miss.loaded, miss.hit)
    if loaded:
        places[_TIER] = loaded
    if miss.hit > loaded:
        places[_REPLAY if replay else _GENUINE] = miss.hit - loaded
    return places


def left_at(places: Mapping[Place, float]) -> dict[str, float]:
    """Tokens that reach each stage, of any sum of places; `asked` are all of them."""
    left = sum(places.values())
    stages = {ASKED: left}
    for stage, lost in STAGES.items():
        left -= sum([places.get(place, 0) for place in lost])
        stages[stage] = left
    return stages
