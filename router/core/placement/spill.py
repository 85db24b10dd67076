"""Why a request did not go to the replica that holds the longest part of its prompt.

A holder may be passed over because it was not to be asked (`retry`, `full`, `unfit`), because the policy does not look
(`policy`) or could not tell the prices apart (`tie`), or because it was dearer. Then the cause is the term of its price
in which it is furthest behind the chosen replica: `queue`, `kv_space`, `eviction`, `speed`, where it would take longer
over less, or `crowd`, where too many decode already. A price is a sum, so terms of one are compared in
milliseconds, as every policy adds them up; what the policy's prices differ by beyond all other terms is the crowd's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from router.core.facts.placements import Candidate, Reason


class SpillCause(StrEnum):
    """What made the longest holder a worse choice, or none."""

    QUEUE = "queue"  # prefill work waits at the holder
    KV_SPACE = "kv_space"  # the holder's KV pool has no room yet, and others wait for that too
    EVICTION = "eviction"  # the holder would drop blocks that others would compute again
    SPEED = "speed"  # the holder prefills slower
    CROWD = "crowd"  # answers that decode at the holder would be slowed down, and slow this one down
    TIE = "tie"  # prices too close to tell apart: the ring, or the home, decided
    POLICY = "policy"  # the policy does not look at caches, or weighs something else
    FULL = "full"  # the holder has as many requests as it may have
    RETRY = "retry"  # the holder was tried, and failed
    UNFIT = "unfit"  # not ready, resting, or behind an open breaker
    ROLE = "role"  # the holder only prefills for others, and one replica was to do it all


class Spill(Struct, gc=False):
    """A placement off the longest holder, the replica `holder`; `tokens` are what it holds and the chosen replica does
    not."""

    cause: SpillCause
    tokens: int
    holder: str


def spill(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    reason: Reason,
    *,
    elsewhere: Mapping[str, int],
    exclude: Collection[str] = (),
    full: Collection[str] = (),
    role: Collection[str] = (),
) -> Spill | None:
    """Why a placement is off the longest holder; None where nobody holds more than the chosen replica. `elsewhere` has
    the tokens held by replicas that were not weighed; of these `exclude` were tried before, `full` have no room, and
    those of the `role` only prefill."""
    most = chosen.cached_tokens
    away = max(elsewhere, key=lambda id_: elsewhere[id_]) if elsewhere else None
    holder = None
    for c in candidates:
        if c.cached_tokens > most or (holder is not None and c.cached_tokens == most and _dues(c) < _dues(holder)):
            holder, most = c, c.cached_tokens
    if away is not None and elsewhere[away] > most:
        cause = SpillCause.RETRY if away in exclude else SpillCause.FULL if away in full else SpillCause.UNFIT
        if cause is SpillCause.UNFIT and away in role:
            cause = SpillCause.ROLE
        return Spill(cause, elsewhere[away] - chosen.cached_tokens, away)
    if holder is None:
        return None
    tokens = most - chosen.cached_tokens
    if reason is Reason.POLICY:
        return Spill(SpillCause.POLICY, tokens, holder.id)
    return Spill(SpillCause.TIE if reason is Reason.TIE else _dearest(holder, chosen), tokens, holder.id)


def _dues(c: Candidate) -> float:
    return c.pending_ms + _room_ms(c) + _evicted_ms(c)


def _room_ms(c: Candidate) -> float:
    return c.kv_wait_ms + c.room_ms


def _evicted_ms(c: Candidate) -> float:
    return c.evicted_ms + c.evicted_again_ms


def _dearest(holder: Candidate, chosen: Candidate) -> SpillCause:
    terms = [
        (holder.pending_ms - chosen.pending_ms, SpillCause.QUEUE),
        (_room_ms(holder) - _room_ms(chosen), SpillCause.KV_SPACE),
        (_evicted_ms(holder) - _evicted_ms(chosen), SpillCause.EVICTION),
        (holder.uncached_ms - chosen.uncached_ms, SpillCause.SPEED),
    ]
    if holder.price_ms and chosen.price_ms:
        rest_ms = holder.price_ms - chosen.price_ms - sum(behind_ms for behind_ms, _ in terms)
        terms.append((rest_ms, SpillCause.CROWD))
    behind_ms, cause = max(terms)
    return cause if behind_ms > 0 else SpillCause.POLICY
