"""Detection of stalled replicas: they accept requests, their /health may be good, but they produce no output.

A lease is late if its first token is overdue. The allowed time is generous: to treat a replica as dead that prefills
200,000 tokens would waste the most expensive work.

    due    = max(due of the lease before it, placed, last sign of life of the replica) + allowance
    allowance = the largest of  factor x modelled prefill of the tokens estimated as uncached, by the slower of the
                                replica's own and the fleet's model,
                                FULL x modelled prefill of the full prompt (estimated cached blocks may be gone)

If both stages of a request begin at once, its prefill stage waits until the decoding replica takes the blocks. It is
not late while the decoding replica has answers in progress but shows no sign of life. SGLang's decode stage depends on
the prefill replica. There a decode stage is late if both stages should be complete, unless it is the prefill replica
that shows no sign of life.

The engine may still have worked on a request that its client abandoned in time. The modelled prefill of such requests
is added.

Signs of life are first tokens, parts of streams, answers that ended well and engine counters that move; /health is not
one. So a queue that makes progress is never late, independent of its length. The factor is FACTOR if the replica's own
speed is known for prompts of that length. It is FACTOR_LENT if the speed is estimated from other replicas or from
shorter prompts. Before the fleet has learned any speed, each token may take SLOWEST_MS (the model's initial estimate
may be wrong by a factor of thirty), or the prefill may take as long as full answers to prompts of that length.

An answer that does not stream shows no output before its end. If the engine's counters move while it works, they show
its prefill. Otherwise it is late after twice the time that its maximum of tokens takes at the slowest observed rate,
but not before the duration of the longest answer so far. If its length is not limited, it is late after four times the
longest answer. A few such answers must be late at once.

A replica is stalled if a lease is late by `stall_timeout_s`. It is also stalled if STUCK_LEASES are late by half of
that, counting those abandoned by their clients in the meantime. All engines may be equally slow, however, and a retry
on another replica would then only double their work. So one of its peers must have been on time since. Without that
evidence a replica is stalled only if it is late by CERTAIN_STALL_FACTOR, or after STUCK_LEASES clients left. In the
latter case it gets no new requests, but keeps its open ones.

All members are examined a few times a second (`scan`). If all of them are silent, each would have to be compared with
all others. So the state of the peers is computed once for each pass (`PeerProgress`), and a pass is processed in
slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.core.estimators.prefill import LEARN_TOKENS_MIN
from router.core.fleet.breaker import Cause
from router.core.fleet.eligibility import Eligibility
from router.core.fleet.lease import Lease
from router.core.fleet.member import ANSWER_TOKENS_MAX, ReplicaState
from router.core.fleet.registry import Fleet

FACTOR, FACTOR_LENT, FULL = 3.0, 10.0, 1.5
FAR = 2.0  # beyond this multiple of its longest prompt so far, a replica's speed is an estimate, because of attention
LEARNED = 3  # observations that make a speed known
SLOWEST_MS = 5.0  # per token: 200 tokens/s
STUCK_LEASES = 5
UNOBSERVED_LEASES = 3  # late answers that do not stream, judged by the duration of other answers
UNSEEN_ANSWERS = 8  # answers after which the duration of answers is known
COUNTERS_S = 5.0  # a probe may be late
CERTAIN_STALL_FACTOR = 10.0  # multiple of `stall_timeout_s`
# Size of one slice of a pass, in open leases: this number takes 0.2 ms, and a replica costs as much as a few leases.
LOOK_LEASES, LOOK_LEASES_MIN = 128, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Finding that a replica is stalled."""

    why: str
    placed_s: float  # time of placement of the latest late lease
    elsewhere: bool  # its silent requests must be retried on other replicas


@dataclass(frozen=True, slots=True)
class _Late:
    """A lease with an overdue first token."""

    lease: Lease
    since_s: float  # time since which the lease shows no output
    by_s: float
    seen: bool  # its first token would be visible
    slowest_s: float  # prefill time up to this lease at SLOWEST_MS for each token


class PeerProgress:
    """Peers of the judged members in one pass: usable members that have a model in common.

    Members are grouped by the set of models that they serve; there are few such sets. For each set the member that was
    on time last is kept, and the last time at which another one was.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._kinds: list[tuple[float, float, ReplicaState, frozenset[str]]] | None = None  # latest first

    def any(self, member: ReplicaState) -> bool:
        """True if a peer exists that could take the member's requests."""
        for name in self._fleet.roster.kind(member):
            serving = self._fleet.list_serving(name)
            if len(serving) > 1 or (serving and serving[0] is not member):
                return True
        return False

    def on_time(self, member: ReplicaState, since_s: float) -> bool:
        """True if a peer was on time at or after this moment."""
        if self._kinds is None:
            self._kinds = sorted([_latest(*kind) for kind in self._fleet.roster.kinds()], key=lambda kind: -kind[0])
        names = self._fleet.roster.kind(member)
        for latest_s, second_s, latest, others in self._kinds:
            if latest_s < since_s:
                return False  # no peer was
            if (second_s if latest is member else latest_s) >= since_s and not others.isdisjoint(names):
                return True
        return False


def _latest(names: frozenset[str], members: list[ReplicaState]) -> tuple[float, float, ReplicaState, frozenset[str]]:
    latest, latest_s, second_s = members[0], members[0].evidence.on_time_s, float("-inf")
    for member in members[1:]:
        on_time_s = member.evidence.on_time_s
        if on_time_s > latest_s:
            latest, latest_s, second_s = member, on_time_s, latest_s
        elif on_time_s > second_s:
            second_s = on_time_s
    return latest_s, second_s, latest, names


def scan(fleet: Fleet, fitness: Eligibility, now_s: float, stall_timeout_s: float) -> Iterator[list[str]]:
    """Judge all members, and open the breakers of stalled ones. Yield the replicas with silent requests to retry on
    others, in slices of about LOOK_LEASES open leases, so that other work can run in between."""
    peers, elsewhere, looked_at = PeerProgress(fleet), list[str](), 0
    for member in list(fleet.members.values()):  # a member with failed health checks may still have open answers
        if not is_silent(member, now_s, stall_timeout_s):
            continue
        if looked_at >= LOOK_LEASES:
            yield elsewhere
            elsewhere, looked_at = [], 0
            if fleet.members.get(member.id) is not member:
                continue  # the member has left in the meantime
        looked_at += LOOK_LEASES_MIN + len(member.leases)
        verdict = judge(fleet, member, now_s, stall_timeout_s, peers)
        if verdict is not None:
            # otherwise the leases are older than its cooldown and not trials
            if verdict.placed_s >= member.breaker.until_s:
                fitness.trip(member, Cause.STUCK, verdict.why, now_s)
            member.evidence.late_disconnects = 0
            if verdict.elsewhere:
                elsewhere.append(member.id)
    yield elsewhere


def is_silent(member: ReplicaState, now_s: float, stall_timeout_s: float) -> bool:
    """True if the member must be judged: it has open work and showed no sign of life recently."""
    evidence = member.evidence
    return now_s - evidence.alive_s > stall_timeout_s / 2 and bool(member.leases or evidence.late_disconnects)


def judge(
    fleet: Fleet, member: ReplicaState, now_s: float, stall_timeout_s: float, peers: PeerProgress
) -> Verdict | None:
    """Return the finding if the member is stalled, else None. Cheap for a member without open work or with a recent
    sign of life."""
    if not is_silent(member, now_s, stall_timeout_s) or not peers.any(member):
        return None  # without peers, no other replica can take the requests
    late = list(_late(member, now_s, stall_timeout_s / 2))
    if late and (waits := fleet.waits_for_peer) is not None:
        late = [each for each in late if not waits(each.lease, now_s, stall_timeout_s)]
    left = member.evidence.late_disconnects
    if not late:
        return Verdict(f"{left} clients disconnected without an answer", now_s, False) if left >= STUCK_LEASES else None
    seen = [each for each in late if each.seen]
    unseen = sum(each.by_s > stall_timeout_s for each in late if not each.seen)
    worst = max((each.by_s for each in seen), default=0.0)
    if worst <= stall_timeout_s and len(seen) + left < STUCK_LEASES and unseen < UNOBSERVED_LEASES:
        return None
    first, placed_s = late[0], late[-1].lease.placed_s
    why = f"no answer for {now_s - first.since_s:.1f} s, {len(late) + left} requests overdue"
    if peers.on_time(member, first.since_s) or any(
        each.by_s > each.slowest_s + CERTAIN_STALL_FACTOR * stall_timeout_s for each in late
    ):
        return Verdict(why, placed_s, True)
    return Verdict(why, placed_s, False) if left >= STUCK_LEASES else None


def is_late(member: ReplicaState, lease: Lease, now_s: float, stall_timeout_s: float) -> bool:
    """True if this lease has no token yet and counts as late."""
    if lease.first_token_s is not None or member.evidence.late_disconnects >= STUCK_LEASES:
        return False
    if now_s - max(lease.placed_s, member.evidence.alive_s) <= stall_timeout_s / 2:
        return False
    return any(each.lease is lease for each in _late(member, now_s, stall_timeout_s / 2))


def _late(member: ReplicaState, now_s: float, margin_s: float) -> Iterator[_Late]:
    """Yield the leases that are late by more than the margin, oldest first."""
    alive_s, slowest_s = member.evidence.alive_s, 0.0
    due_s = alive_s + member.evidence.abandoned_prefill_ms / 1e3
    if member.counters.known_share < 1:  # other senders use it: one of their prompts may be in prefill now
        due_s += _allowance_ms(member, int(member.speeds.longest_tokens), 0) / 1e3
    due_s += FACTOR * member.others.waiting_ms / 1e3  # the waiting prefill of other routers that report it is known
    hidden_s = 0.0  # duration in seconds of answers that do not stream: they may occupy the engine fully
    for lease in member.leases.values():
        if lease.first_token_s is not None or lease.receipt.pull is not None:  # a P2P KV transfer has its own limit
            continue
        own_s, leg = _allowance_ms(member, lease.prompt_tokens, lease.cached_tokens) / 1e3, lease.receipt.leg
        began_s = lease.placed_s
        if leg is not None:
            own_s += FACTOR * leg.transfer_ms / 1e3
            if lease.effective_start_s:
                began_s = lease.effective_start_s
            elif leg.traits.answers_after_transfer:
                own_s += FACTOR * (leg.pending_ms + leg.uncached_ms) / 1e3
            else:
                continue  # its prompt waits for the prefill at another replica
        by_then_s = max(due_s, began_s) + own_s
        if lease.loading_ms:  # its load waits for the loads before it, independent of concurrent computation
            by_then_s = max(by_then_s, lease.placed_s + own_s + FACTOR * lease.loading_ms / 1e3)
        if leg is None or leg.alone:  # blocks in transfer do not delay a prompt that is computed here
            due_s = by_then_s
        slowest_s += lease.prompt_tokens * SLOWEST_MS / 1e3
        since_s = max(began_s, alive_s)
        seen = lease.streams or member.counters.are_moving
        if seen:
            by_s = now_s - by_then_s - (hidden_s if lease.streams else COUNTERS_S)
        elif member.speeds.answers >= UNSEEN_ANSWERS:
            answer_s = _answer_ms(member, lease) / 1e3
            hidden_s = max(hidden_s, answer_s)
            by_s = now_s - by_then_s - answer_s
        else:
            hidden_s = float("inf")  # its duration is unknown
            continue
        if by_s > margin_s:
            yield _Late(lease, since_s, by_s, seen, slowest_s)
        elif leg is None and now_s - by_then_s <= margin_s:
            return  # later leases are due later


def _allowance_ms(member: ReplicaState, prompt_tokens: int, cached_tokens: int) -> float:
    """Return the time within which a prefill is not late."""
    uncached, speeds = prompt_tokens - cached_tokens, member.speeds
    if speeds.prefill.observations < LEARNED:
        if speeds.shorts >= LEARNED and prompt_tokens < LEARN_TOKENS_MIN:
            return FACTOR_LENT * speeds.short_ms
        if speeds.answers >= UNSEEN_ANSWERS and prompt_tokens <= FAR * speeds.longest_tokens:
            return min(SLOWEST_MS * prompt_tokens, FACTOR * speeds.answer_ms_max)
        return SLOWEST_MS * prompt_tokens
    model, own, own_speed = speeds.prefill.model, member.prefill_model, member.own_speed
    known = own_speed.prefill_factor.observations >= LEARNED and uncached <= FAR * own_speed.longest_tokens
    ms, full_ms = model.ms(uncached, cached_tokens), model.ms(prompt_tokens, 0)
    if own is not model:
        ms, full_ms = max(ms, own.ms(uncached, cached_tokens)), max(full_ms, own.ms(prompt_tokens, 0))
    return max((FACTOR if known else FACTOR_LENT) * ms, FULL * full_ms)


def _answer_ms(member: ReplicaState, lease: Lease) -> float:
    """Return the time beyond prefill within which an answer that does not stream is not late."""
    speeds = member.speeds
    if lease.answer_tokens_max >= ANSWER_TOKENS_MAX:
        return 4 * speeds.answer_ms_max
    return max(speeds.answer_ms_max, 2 * lease.answer_tokens_max * speeds.token_ms_max)
