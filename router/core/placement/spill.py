"""The reason why a request did not go to the replica that holds the longest part of its prompt.

A holder may be unavailable (`retry`, `full`, `unhealthy`). The policy may not consider caches (`policy`), or may not
distinguish the prices (`tie`). Otherwise the holder was more expensive. Then the cause is the term of its price with
the largest excess over the chosen replica:

- `queue`, `kv_space`, `delay` or `eviction`
- `speed`: the holder takes longer for fewer tokens
- `decode_load`: too many answers already decode there

The terms are those of the price (`Cost`): `explain` and the dashboard show the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from router.core.types.placements import Candidate, Cost, PlacementReason, Pricing


class SpillCause(StrEnum):
    """The disadvantage of the longest holder."""

    QUEUE = "queue"  # prefill work waits at the holder
    KV_SPACE = "kv_space"  # the holder's KV pool has no space yet, and others wait for it too
    DELAY = "delay"  # the holder's first tokens come later than its work explains: a proxy or the network
    EVICTION = "eviction"  # the holder would drop blocks that others would compute again
    SPEED = "speed"  # the holder prefills more slowly
    DECODE_LOAD = "decode_load"  # decode contention: answers at the holder and this one would slow each other down
    TIE = "tie"  # prices too close to distinguish: the ring or the home decided
    POLICY = "policy"  # the policy does not consider caches, or weighs other terms
    FULL = "full"  # the holder has the maximum number of requests
    RETRY = "retry"  # the request failed on the holder
    UNHEALTHY = "unhealthy"  # not ready, in cooldown, or with an open breaker
    ROLE = "role"  # the holder only prefills for others, and the request needed one replica for both stages


class Spill(Struct, gc=False):
    """A placement away from the longest holder, the replica `holder`; `tokens` is the additional part that it holds."""

    cause: SpillCause
    tokens: int
    holder: str


def spill(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    reason: PlacementReason,
    pricing: Pricing,
    *,
    elsewhere: Mapping[str, int],
    exclude: Collection[str] = (),
    full: Collection[str] = (),
    role: Collection[str] = (),
) -> Spill | None:
    """Return the reason for a placement away from the longest holder, or None if no replica holds more than the chosen
    one.

    - `pricing`: the terms of the candidates' prices.
    - `elsewhere`: the cached tokens of replicas that were not candidates.
    - `exclude`: those of them that the request was tried on.
    - `full`: those of them without capacity.
    - `role`: those of them that only prefill.
    """
    most = chosen.cached_tokens
    away = max(elsewhere, key=lambda id_: elsewhere[id_]) if elsewhere else None
    holder = None
    for c in candidates:
        if c.cached_tokens > most or (holder is not None and c.cached_tokens == most and _dues(c) < _dues(holder)):
            holder, most = c, c.cached_tokens
    if away is not None and elsewhere[away] > most:
        cause = SpillCause.RETRY if away in exclude else SpillCause.FULL if away in full else SpillCause.UNHEALTHY
        if cause is SpillCause.UNHEALTHY and away in role:
            cause = SpillCause.ROLE
        return Spill(cause, elsewhere[away] - chosen.cached_tokens, away)
    if holder is None:
        return None
    tokens = most - chosen.cached_tokens
    if reason is PlacementReason.POLICY:
        return Spill(SpillCause.POLICY, tokens, holder.id)
    cause = SpillCause.TIE if reason is PlacementReason.TIE else _dearest(holder, chosen, pricing)
    return Spill(cause, tokens, holder.id)


def _dues(c: Candidate) -> float:
    return c.pending_ms + _room_ms(c) + _evicted_ms(c)


def _room_ms(c: Candidate) -> float:
    return c.kv_wait_ms + c.room_ms


def _evicted_ms(c: Candidate) -> float:
    return c.evicted_ms + c.evicted_again_ms


def _dearest(holder: Candidate, chosen: Candidate, pricing: Pricing) -> SpillCause:
    """Return the cause with the largest excess of the holder's terms over the chosen replica's."""
    there, here = pricing.cost(holder), pricing.cost(chosen)
    excess_ms = {
        SpillCause.QUEUE: there.load_ms - here.load_ms,
        SpillCause.KV_SPACE: there.room_ms - here.room_ms,
        SpillCause.DELAY: 0.0,
        SpillCause.EVICTION: (there.evicted_ms + there.evicted_again_ms - here.evicted_ms - here.evicted_again_ms),
        SpillCause.SPEED: there.uncached_ms - here.uncached_ms,
        SpillCause.DECODE_LOAD: _decoding_ms(there) - _decoding_ms(here),
    }
    excess_ms[_wait_cause(holder)] += there.wait_ms
    excess_ms[_wait_cause(chosen)] -= here.wait_ms
    cause = max(excess_ms, key=lambda each: excess_ms[each])
    return cause if excess_ms[cause] > 0 else SpillCause.POLICY


def _wait_cause(candidate: Candidate) -> SpillCause:
    if candidate.delay_ms > max(candidate.pending_ms, candidate.kv_wait_ms):
        return SpillCause.DELAY
    return SpillCause.KV_SPACE if candidate.kv_wait_ms > candidate.pending_ms else SpillCause.QUEUE


def _decoding_ms(cost: Cost) -> float:
    return cost.stalled_ms + cost.decode_ms + cost.slowed_ms
