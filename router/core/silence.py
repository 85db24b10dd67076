"""Is a replica stuck? It accepts requests, its /health may be green, and nothing comes of them.

A lease is late when its first token is, and the time it may take is reckoned generously, since to take a replica for
dead that prefills 200,000 tokens would waste exactly the dearest work:

    due    = max(due of the lease before it, placed, last sign of life of the replica) + allowance
    allowance = the largest of  factor x modelled prefill of what is believed uncached, by the slower of the replica's
                                own and the fleet's model,
                                FULL x modelled prefill of all of it (what was believed cached may be gone)

A request whose client left in time may have been worked on all the same: its modelled prefill comes on top.

Signs of life are first tokens, pieces of streams, answers that ended well and engine counters that move; /health is
none. So a queue that is worked off is never late, however long. The factor is FACTOR where the replica's own speed is
known for prompts of that length, FACTOR_LENT where it is guessed from others or from shorter prompts. Before the
fleet has learned any speed each token may take SLOWEST_MS (the model's first guess may be wrong by thirty times), or
what whole answers to prompts of that length took.

Of an answer that does not stream nothing is seen before its end. Where the engine's counters move when it works, its
prefill moves them; else it is late after twice the longest that tokens of late answers took, and four times the
longest answer where its length is not limited, and a few of them must be late at once.

A replica is stuck when a lease is late by `stuck_after_s`, or when STUCK_LEASES are late by half of that, with those
whose clients have left meanwhile. But all engines may be slow alike, and then to send their work elsewhere would only
double it: so one of its peers must have been on time since. Without that evidence a replica is stuck only when it is
late by any measure (HOPELESS), or after STUCK_LEASES clients left: then it gets no more, but keeps what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.core.fleet import Fleet
from router.core.member import ANSWER_TOKENS_MAX, Lease, Member
from router.core.prefill import LEARN_TOKENS_MIN

FACTOR, FACTOR_LENT, FULL = 3.0, 10.0, 1.5
FAR = 2.0  # beyond so many times the longest prompt it has done, a replica's speed is a guess: attention
LEARNED = 3  # observations that make a speed known
SLOWEST_MS = 5.0  # per token: 200 tokens/s
STUCK_LEASES = 5
UNSEEN_LEASES = 3  # of answers that do not stream, judged by what others took
UNSEEN_ANSWERS = 8  # from which it is known what answers take
COUNTERS_S = 5.0  # a probe may be late
HOPELESS = 10.0  # times `stuck_after_s`


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a replica that is stuck."""

    why: str
    placed_s: float  # when the latest of the leases that show it was
    elsewhere: bool  # whether what is silent there is to be tried elsewhere


@dataclass(frozen=True, slots=True)
class _Late:
    """A lease that should have shown something."""

    lease: Lease
    since_s: float  # silent
    by_s: float
    seen: bool  # its first token would have been
    slowest_s: float  # by which it is late by any measure


def judge(fleet: Fleet, member: Member, now_s: float, stuck_after_s: float) -> Verdict | None:
    """Whether the member is stuck. Cheap for whoever has nothing open, or showed life a moment ago."""
    if now_s - member.alive_s <= stuck_after_s / 2 or not (member.leases or member.left_late):
        return None
    peers = [m for m in fleet.usable() if m is not member and not m.models.keys().isdisjoint(member.models)]
    if not peers:
        return None  # there is no elsewhere
    late = list(_late(fleet, member, now_s, stuck_after_s / 2))
    left = member.left_late
    if not late:
        return Verdict(f"{left} clients left without an answer", now_s, False) if left >= STUCK_LEASES else None
    seen = [each for each in late if each.seen]
    unseen = sum(each.by_s > stuck_after_s for each in late if not each.seen)
    worst = max((each.by_s for each in seen), default=0.0)
    if worst <= stuck_after_s and len(seen) + left < STUCK_LEASES and unseen < UNSEEN_LEASES:
        return None
    first, placed_s = late[0], late[-1].lease.placed_s
    why = f"nothing for {now_s - first.since_s:.1f} s, {len(late) + left} requests late"
    on_time = any(peer.on_time_s >= first.since_s for peer in peers)
    if on_time or any(each.by_s > each.slowest_s + HOPELESS * stuck_after_s for each in late):
        return Verdict(why, placed_s, True)
    return Verdict(why, placed_s, False) if left >= STUCK_LEASES else None


def is_late(fleet: Fleet, member: Member, lease: Lease, now_s: float, stuck_after_s: float) -> bool:
    """Whether this lease, without a token yet, counts as late."""
    if lease.first_token_s is not None or member.left_late >= STUCK_LEASES:
        return False
    if now_s - max(lease.placed_s, member.alive_s) <= stuck_after_s / 2:
        return False
    return any(each.lease is lease for each in _late(fleet, member, now_s, stuck_after_s / 2))


def _late(fleet: Fleet, member: Member, now_s: float, margin_s: float) -> Iterator[_Late]:
    """Leases that are late by more than the margin, oldest first."""
    due_s, slowest_s = member.alive_s + member.left_ms / 1e3, 0.0
    if member.share < 1:  # others use it: one of theirs may be prefilled now
        due_s += _allowance_ms(fleet, member, int(fleet.longest_tokens), 0) / 1e3
    hidden_s = 0.0  # that answers take which do not stream, on an engine that may be full of them
    for lease in member.leases.values():
        if lease.first_token_s is not None:
            continue
        own_s = _allowance_ms(fleet, member, lease.prompt_tokens, lease.cached_tokens) / 1e3
        due_s = max(due_s, lease.placed_s) + own_s
        slowest_s += lease.prompt_tokens * SLOWEST_MS / 1e3
        since_s = max(lease.placed_s, member.alive_s)
        seen = lease.streams or member.counts
        if seen:
            by_s = now_s - due_s - (hidden_s if lease.streams else COUNTERS_S)
        elif fleet.answers >= UNSEEN_ANSWERS:
            answer_s = _answer_ms(fleet, lease) / 1e3
            hidden_s = max(hidden_s, answer_s)
            by_s = now_s - due_s - answer_s
        else:
            hidden_s = float("inf")  # nothing is known of how long it takes
            continue
        if by_s > margin_s:
            yield _Late(lease, since_s, by_s, seen, slowest_s)
        elif now_s - due_s <= margin_s:
            return  # whoever came later is due later


def _allowance_ms(fleet: Fleet, member: Member, prompt_tokens: int, cached_tokens: int) -> float:
    """Time in which a prefill is not late."""
    uncached = prompt_tokens - cached_tokens
    if fleet.prefill.observations < LEARNED:
        if fleet.shorts >= LEARNED and prompt_tokens < LEARN_TOKENS_MIN:
            return FACTOR_LENT * fleet.short_ms
        if fleet.answers >= UNSEEN_ANSWERS and prompt_tokens <= FAR * fleet.longest_tokens:
            return min(SLOWEST_MS * prompt_tokens, FACTOR * fleet.answer_ms_max)
        return SLOWEST_MS * prompt_tokens
    model, own = fleet.prefill.model, member.fit.model
    known = member.fit.observations >= LEARNED and uncached <= FAR * member.longest_tokens
    ms, full_ms = model.ms(uncached, cached_tokens), model.ms(prompt_tokens, 0)
    if member.fit.observations:
        ms, full_ms = max(ms, own.ms(uncached, cached_tokens)), max(full_ms, own.ms(prompt_tokens, 0))
    return max((FACTOR if known else FACTOR_LENT) * ms, FULL * full_ms)


def _answer_ms(fleet: Fleet, lease: Lease) -> float:
    """Time beyond prefill in which an answer that does not stream is not late."""
    if lease.answer_tokens_max >= ANSWER_TOKENS_MAX:
        return 4 * fleet.answer_ms_max
    return max(fleet.answer_ms_max, 2 * lease.answer_tokens_max * fleet.token_ms_max)
