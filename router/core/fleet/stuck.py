"""Is a replica stuck? It accepts requests, its /health may be green, and nothing comes of them.

A lease is late when its first token is, and the time it may take is reckoned generously, since to take a replica for
dead that prefills 200,000 tokens would waste exactly the dearest work:

    due    = max(due of the lease before it, placed, last sign of life of the replica) + allowance
    allowance = the largest of  factor x modelled prefill of what is believed uncached, by the slower of the replica's
                                own and the fleet's model,
                                FULL x modelled prefill of all of it (what was believed cached may be gone)

Where both legs of a request begin at once, its prefill leg waits for the decoding replica to take the blocks: it is not
late while that one shows no life though answers are under way there. SGLang's decoding replicas bring their prefill
replicas to an end, so that there a decode leg is late when both should have been done, unless it is the prefill replica
that shows no life.

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

All members are looked at a few times a second (`look`), and just when nothing comes of any of them, each has to be
compared with all others. So what is asked of others is found out once a look (`Peers`), and a look is taken in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.core.facts.legs import Handshake
from router.core.fleet.breaker import Cause
from router.core.fleet.fitness import Fitness
from router.core.fleet.fleet import Fleet
from router.core.fleet.lease import Lease
from router.core.fleet.member import ANSWER_TOKENS_MAX, Member
from router.core.learned.prefill import LEARN_TOKENS_MIN

FACTOR, FACTOR_LENT, FULL = 3.0, 10.0, 1.5
FAR = 2.0  # beyond so many times its longest prompt so far, a replica's speed is a guess: attention
LEARNED = 3  # observations that make a speed known
SLOWEST_MS = 5.0  # per token: 200 tokens/s
STUCK_LEASES = 5
UNSEEN_LEASES = 3  # late answers that do not stream, judged by what other answers took
UNSEEN_ANSWERS = 8  # answers after which it is known how long answers take
COUNTERS_S = 5.0  # a probe may be late
HOPELESS = 10.0  # times `stuck_after_s`
# Work of one slice of a look, in open leases: so many are 0.2 ms, and a replica is as much work as a few.
LOOK_LEASES, LOOK_LEASES_MIN = 128, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement that a replica is stuck."""

    why: str
    placed_s: float  # time of placement of the latest lease that shows it
    elsewhere: bool  # whether silent requests there are to be tried elsewhere


@dataclass(frozen=True, slots=True)
class _Late:
    """A lease that should have shown something."""

    lease: Lease
    since_s: float  # time from which on nothing came of the lease
    by_s: float
    seen: bool  # whether its first token would have been seen
    slowest_s: float  # seconds by which it is late by any measure


class Peers:
    """What one look asks of others than the member judged: usable members that have a model in common with it.

    By the set of models that members serve, of which there are few: of each set the member that was on time last, and
    when another one was.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._kinds: list[tuple[float, float, Member, frozenset[str]]] | None = None  # latest first

    def any(self, member: Member) -> bool:
        """Whether there are any, to which its requests could go."""
        for name in self._fleet.roster.kind(member):
            serving = self._fleet.serving(name)
            if len(serving) > 1 or (serving and serving[0] is not member):
                return True
        return False

    def on_time(self, member: Member, since_s: float) -> bool:
        """Whether one of them was on time at that moment or since."""
        if self._kinds is None:
            self._kinds = sorted([_latest(*kind) for kind in self._fleet.roster.kinds()], key=lambda kind: -kind[0])
        names = self._fleet.roster.kind(member)
        for latest_s, second_s, latest, others in self._kinds:
            if latest_s < since_s:
                return False  # nobody was
            if (second_s if latest is member else latest_s) >= since_s and not others.isdisjoint(names):
                return True
        return False


def _latest(names: frozenset[str], members: list[Member]) -> tuple[float, float, Member, frozenset[str]]:
    latest, second_s = members[0], float("-inf")
    for member in members[1:]:
        if member.on_time_s > latest.on_time_s:
            latest, second_s = member, latest.on_time_s
        elif member.on_time_s > second_s:
            second_s = member.on_time_s
    return latest.on_time_s, second_s, latest, names


def look(fleet: Fleet, fitness: Fitness, now_s: float, stuck_after_s: float) -> Iterator[list[str]]:
    """Judge all members, and open the breakers of those that are stuck. Yields replicas whose silent requests are to be
    tried elsewhere, a slice of some LOOK_LEASES open leases at a time, so that other work can be done between them."""
    peers, elsewhere, looked_at = Peers(fleet), list[str](), 0
    for member in list(fleet.members.values()):  # a member whose health checks failed may still owe answers
        if not quiet(member, now_s, stuck_after_s):
            continue
        if looked_at >= LOOK_LEASES:
            yield elsewhere
            elsewhere, looked_at = [], 0
            if fleet.members.get(member.id) is not member:
                continue  # the member has left meanwhile
        looked_at += LOOK_LEASES_MIN + len(member.leases)
        verdict = judge(fleet, member, now_s, stuck_after_s, peers)
        if verdict is not None:
            if verdict.placed_s >= member.breaker.until_s:  # otherwise the leases are from before its rest: no trial
                fitness.trip(member, Cause.STUCK, verdict.why, now_s)
            member.left_late = 0
            if verdict.elsewhere:
                elsewhere.append(member.id)
    yield elsewhere


def quiet(member: Member, now_s: float, stuck_after_s: float) -> bool:
    """Whether there is anything to judge: the member owes something, and showed no life a moment ago."""
    return now_s - member.alive_s > stuck_after_s / 2 and bool(member.leases or member.left_late)


def judge(fleet: Fleet, member: Member, now_s: float, stuck_after_s: float, peers: Peers) -> Verdict | None:
    """Whether the member is stuck. Cheap for whoever has nothing open, or showed life a moment ago."""
    if not quiet(member, now_s, stuck_after_s) or not peers.any(member):
        return None  # there is no elsewhere without peers
    late = list(_late(member, now_s, stuck_after_s / 2))
    if fleet.legs.decoders:
        late = [each for each in late if not is_held(fleet, each.lease, now_s, stuck_after_s)]
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
    if peers.on_time(member, first.since_s) or any(
        each.by_s > each.slowest_s + HOPELESS * stuck_after_s for each in late
    ):
        return Verdict(why, placed_s, True)
    return Verdict(why, placed_s, False) if left >= STUCK_LEASES else None


def is_late(member: Member, lease: Lease, now_s: float, stuck_after_s: float) -> bool:
    """Whether this lease, without a token yet, counts as late."""
    if lease.first_token_s is not None or member.left_late >= STUCK_LEASES:
        return False
    if now_s - max(lease.placed_s, member.alive_s) <= stuck_after_s / 2:
        return False
    return any(each.lease is lease for each in _late(member, now_s, stuck_after_s / 2))


def is_held(fleet: Fleet, lease: Lease, now_s: float, stuck_after_s: float) -> bool:
    """Whether this is a prefill leg whose decoding replica has answers under way and shows no life, or a decode leg
    whose prefill replica shows none while no answers are under way here: what holds the leg up may be that."""
    leg = lease.receipt.leg
    if leg is not None:
        member, first = fleet.members.get(lease.replica), fleet.members.get(leg.replica)
        if lease.turn_s or member is None or member.decoding > 0:
            return False
        return first is None or now_s - first.alive_s > stuck_after_s / 2
    decoder = fleet.members.get(fleet.legs.decoders.get(lease.id, ""))
    return decoder is not None and decoder.decoding > 0 and now_s - decoder.alive_s > stuck_after_s / 2


def _late(member: Member, now_s: float, margin_s: float) -> Iterator[_Late]:
    """Leases that are late by more than the margin, oldest first."""
    due_s, slowest_s = member.alive_s + member.left_ms / 1e3, 0.0
    if member.known_share < 1:  # others use it: one of theirs may be prefilled now
        due_s += _allowance_ms(member, int(member.speeds.longest_tokens), 0) / 1e3
    due_s += FACTOR * member.others.waiting_ms / 1e3  # of others that tell it is known how much
    hidden_s = 0.0  # seconds that answers take which do not stream: the engine may be full of them
    for lease in member.leases.values():
        if lease.first_token_s is not None or lease.receipt.pull is not None:  # a pull has a limit of its own
            continue
        own_s, leg = _allowance_ms(member, lease.prompt_tokens, lease.cached_tokens) / 1e3, lease.receipt.leg
        began_s = lease.placed_s
        if leg is not None:
            own_s += FACTOR * leg.transfer_ms / 1e3
            if lease.turn_s:
                began_s = lease.turn_s
            elif leg.handshake is Handshake.SGLANG:
                own_s += FACTOR * (leg.pending_ms + leg.uncached_ms) / 1e3
            else:
                continue  # its prompt is prefilled elsewhere, and waits for that
        by_then_s = max(due_s, began_s) + own_s
        if lease.loading_ms:  # its load waits for the loads before it, whatever is computed meanwhile
            by_then_s = max(by_then_s, lease.placed_s + own_s + FACTOR * lease.loading_ms / 1e3)
        if leg is None or leg.alone:  # blocks on their way keep no prompt waiting that is computed here
            due_s = by_then_s
        slowest_s += lease.prompt_tokens * SLOWEST_MS / 1e3
        since_s = max(began_s, member.alive_s)
        seen = lease.streams or member.counts
        if seen:
            by_s = now_s - by_then_s - (hidden_s if lease.streams else COUNTERS_S)
        elif member.speeds.answers >= UNSEEN_ANSWERS:
            answer_s = _answer_ms(member, lease) / 1e3
            hidden_s = max(hidden_s, answer_s)
            by_s = now_s - by_then_s - answer_s
        else:
            hidden_s = float("inf")  # nothing is known of how long it takes
            continue
        if by_s > margin_s:
            yield _Late(lease, since_s, by_s, seen, slowest_s)
        elif leg is None and now_s - by_then_s <= margin_s:
            return  # whoever came later is due later


def _allowance_ms(member: Member, prompt_tokens: int, cached_tokens: int) -> float:
    """Time in which a prefill is not late."""
    uncached, speeds = prompt_tokens - cached_tokens, member.speeds
    if speeds.prefill.observations < LEARNED:
        if speeds.shorts >= LEARNED and prompt_tokens < LEARN_TOKENS_MIN:
            return FACTOR_LENT * speeds.short_ms
        if speeds.answers >= UNSEEN_ANSWERS and prompt_tokens <= FAR * speeds.longest_tokens:
            return min(SLOWEST_MS * prompt_tokens, FACTOR * speeds.answer_ms_max)
        return SLOWEST_MS * prompt_tokens
    model, own = speeds.prefill.model, member.prefill_model
    known = member.prefill_factor.observations >= LEARNED and uncached <= FAR * member.longest_tokens
    ms, full_ms = model.ms(uncached, cached_tokens), model.ms(prompt_tokens, 0)
    if own is not model:
        ms, full_ms = max(ms, own.ms(uncached, cached_tokens)), max(full_ms, own.ms(prompt_tokens, 0))
    return max((FACTOR if known else FACTOR_LENT) * ms, FULL * full_ms)


def _answer_ms(member: Member, lease: Lease) -> float:
    """Time beyond prefill in which an answer that does not stream is not late."""
    speeds = member.speeds
    if lease.answer_tokens_max >= ANSWER_TOKENS_MAX:
        return 4 * speeds.answer_ms_max
    return max(speeds.answer_ms_max, 2 * lease.answer_tokens_max * speeds.token_ms_max)
