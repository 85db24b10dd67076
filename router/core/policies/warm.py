"""warm: the cheapest replica, where the price counts what the placement costs everyone.

    wait(r)     = max(prefill pending, wait for room in the KV pool)
    price(q, r) = wait(r) + (1 + load(r) + behind(q, r)) x uncached(q, r)
                  + (1 + EVICTED_WEIGHT x calm) x evicted(q, r) + evicted_again(q, r) / (1 + backlog)^2

All terms are milliseconds of prefill. `wait + uncached` is the time until the first token, if this request were alone
in the world: those before it are prefilled while room is made for it, so the longer of the two counts. The factor is
the externality: work done twice delays those behind it, so it counts for more the longer the queue is that it joins,
up to the fleet's mean wait, and the more come while it is done. An idle replica has nobody to delay but those: there a
copy of a short hot prefix costs little more than it takes, so that such prefixes spread before their holder is the
bottleneck, and a long one is waited for by the burst that asks for it.

What is evicted (times the chance that it is asked for again) is work for later, on any replica, so it has a price for
others when the whole fleet is busy, and a steep one. How busy is told by the calmer half: a few replicas on which
misses pile up are no reason to send even more misses there. What is asked for again evicts in its turn, and so on
(displaced.py). So where more conversations go on than fit, those that do not fit meet on a few replicas, whose caches
are lost anyway, and the others keep theirs. That is for the good of most and to the cost of some, who wait there. The
longer the queues, the less it counts, both for how long they wait and for how many do, until all share what there is.
It is priced where it is known what goes: by events, or where nobody else sends (see pricing.py).

And where even the cheapest place would make others repeat more than twice the work that a prompt is itself, and most of
it is cached nowhere, it is held back while others wait anyway, for ten times as long as what it would make them
repeat, or until somebody inside has paused (holding.py). Turns of a conversation whose cache is there are never held.

Prices within the tie band cannot be told apart by a model this simple. There a conversation stays with the replica
that gave its last answer, or else with one that holds at least half of the prompt and more than any other, while
that is under the load bound; of several that hold as much, the one that can begin first. Otherwise the consistent-hash
ring decides, with bounded load, where load is open leases and also what a replica holds: conversations will be back,
so memory is future load. Several routers then agree without talking, a shared system prompt does not pull every
newcomer to its first holder, and a conversation whose cache was lost everywhere settles in one place. None of this
ever overrides a price outside the band.

Where replicas do more than this router asks of them, another one sends there too, and a prompt that nobody is known
to hold may be one of its conversations. All routers would look for it at its place on the ring, so there it is
cheaper by the chance that it was sent there, which is learned from how often that was right: by what need not be
computed, and by as much again, which it saves the one that looks for it there next.

loadtest/README.md has the races that this was chosen by, and `python -m loadtest simulate --sweep` moves its constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from router.core.facts import Candidate, Choice, Grade, Question
from router.core.ring import Ring, load_bound

EVICTED_WEIGHT = 5  # of a unit of wait: see above
BEHIND = 0.25  # of those that come while it is prefilled: half of it is left on the mean, and half find another replica
HELD_WORTH = 2  # work that it makes others repeat, as a multiple of its own: so far it is no thrashing
HELD_WEIGHT = 10  # of that work, in time that it waits: for each that waits, ten that go on have their turns at once
HELD_UNITS_MAX = 200  # times 16,000 tokens: as long as it takes to begin with as many other conversations
ELSEWHERE_MIN = 0.02  # below it there is no other router, but for what counters are late by
HOME_IN_FLIGHT = 1  # one other answer under way is no reason to leave home
RING_CHOICES = 2  # a key has two places on the ring and takes the less loaded (Mitzenmacher 2001)
FOOTPRINT_SLACK_BLOCKS = 64  # some 8,000 tokens: less than a conversation is no imbalance


@dataclass(slots=True)
class Warm:
    """No settings: every constant is learned or follows from learned times."""

    name: str = "warm"
    cache_aware: bool = True
    _ring: Ring = field(default_factory=Ring)

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Choice:
        """The cheapest; inside the tie band the ring; and for how long it is better held back."""
        choice = self._cheapest(question, candidates)
        if question.backlog:  # somebody waits
            for c in candidates:
                if c.id == choice.id:
                    choice.hold_ms = hold_ms(c, question)
                    break
        return choice

    def _cheapest(self, question: Question, candidates: Sequence[Candidate]) -> Choice:
        # Loops for all that is asked of every candidate: a comprehension for each would take twice as long.
        prices: dict[str, float] = {}
        in_flight, footprint, longest, cheapest = 0, 0, 0, inf
        for c in candidates:
            prices[c.id] = asked = price(c, question)
            in_flight += c.in_flight
            footprint += c.footprint_blocks
            if asked < cheapest:
                cheapest = asked
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if question.elsewhere > ELSEWHERE_MIN:
            guess = self._guess(candidates, question, prices, longest)
            if guess is not None and prices[guess.id] - cheapest <= question.tie_ms:
                return Choice(guess.id, guess.cached_tokens == longest, guessed=True)
        count, tie_ms, longest_in_band = len(candidates), question.tie_ms, 0
        band: dict[str, Candidate] = {}
        for c in candidates:
            if prices[c.id] - cheapest <= tie_ms:
                band[c.id] = c
                if c.cached_tokens > longest_in_band:
                    longest_in_band = c.cached_tokens
        if len(band) == 1:
            return Choice(next(iter(band)))
        tied = longest_in_band == longest  # otherwise who holds most was too dear: a spill
        bound = load_bound(in_flight + 1, count)
        home = band.get(question.home)
        if home is not None and _has_room(home, bound):
            return Choice(home.id, tied)
        order = [band[id_] for id_ in self._ring.walk(question.ring_key, band)]
        if home is None and longest_in_band:
            holders = [c for c in order if c.cached_tokens == longest_in_band >= c.uncached_tokens]
            at_home = [c for c in holders if _has_room(c, bound)] if holders else holders
            if at_home:
                return Choice(_soonest(at_home, prices).id, tied)
        footprint_bound = load_bound(footprint + FOOTPRINT_SLACK_BLOCKS * count, count)
        return Choice(_least(_first(order, bound, footprint_bound), prices).id, tied)

    def _guess(
        self, candidates: Sequence[Candidate], question: Question, prices: dict[str, float], longest: int
    ) -> Candidate | None:
        """The place on the ring of a prompt most of which nobody is known to hold, at the price that it may have. Where
        it is known exactly what is held, there is nothing to guess."""
        of_any = candidates[0]
        if 2 * longest > of_any.cached_tokens + of_any.uncached_tokens:
            return None
        ids = {c.id: c for c in candidates}
        guess = ids[self._ring.walk(question.ring_key, ids)[0]]
        if guess.grade is Grade.EXACT:
            return None
        saved_ms = prices[guess.id] - wait_ms(guess) + guess.uncached_ms
        prices[guess.id] -= question.elsewhere * saved_ms
        return guess


def _has_room(home: Candidate, bound: int) -> bool:
    return home.in_flight < bound or home.in_flight <= HOME_IN_FLIGHT


def _first(order: list[Candidate], bound: int, footprint_bound: int) -> list[Candidate]:
    """The key's places on the ring: the first under both bounds, if need be under the first, or whoever they are."""
    roomy = []
    for c in order:
        if c.in_flight < bound and c.footprint_blocks < footprint_bound:
            roomy.append(c)
            if len(roomy) == RING_CHOICES:
                return roomy
    return roomy or ([c for c in order if c.in_flight < bound] or order)[:RING_CHOICES]


def _least(candidates: list[Candidate], prices: dict[str, float]) -> Candidate:
    """The least loaded, of several the cheapest, of several the first."""
    least, *others = candidates
    for c in others:
        if c.in_flight < least.in_flight or (c.in_flight == least.in_flight and prices[c.id] < prices[least.id]):
            least = c
    return least


def _soonest(holders: list[Candidate], prices: dict[str, float]) -> Candidate:
    """Of those that hold as much the one where least waits, of several the least loaded. No cache is at stake between
    them, so what waits counts, however little it is: most of the open leases decode, and hold up nobody's prefill."""
    soonest, *others = holders
    least = [soonest]
    least_ms = wait_ms(soonest)
    for c in others:
        waits_ms = wait_ms(c)
        if waits_ms < least_ms:
            least, least_ms = [c], waits_ms
        elif waits_ms == least_ms:
            least.append(c)
    return _least(least, prices)


def wait_ms(candidate: Candidate) -> float:
    """Until its prefill begins: for those before it, and for room in the KV pool, which come about at the same time."""
    pending_ms, kv_wait_ms = candidate.pending_ms, candidate.kv_wait_ms
    return pending_ms if pending_ms > kv_wait_ms else kv_wait_ms  # noqa: FURB136 - half the time


def hold_ms(candidate: Candidate, question: Question) -> float:
    """For how long a request is better held back than sent there."""
    worth_ms = candidate.evicted_ms + candidate.evicted_again_ms
    if worth_ms <= HELD_WORTH * candidate.uncached_ms:
        return 0.0
    if candidate.uncached_tokens <= candidate.cached_tokens or candidate.uncached_ms <= question.tie_ms:
        return 0.0
    return min(HELD_WEIGHT * worth_ms * min(1.0, question.backlog), HELD_UNITS_MAX * question.unit_ms)


def price(candidate: Candidate, question: Question) -> float:
    """Milliseconds, for this request and for the others."""
    waited_ms = candidate.pending_ms  # as `wait_ms`: a call for every candidate of every request would show
    if candidate.kv_wait_ms > waited_ms:
        waited_ms = candidate.kv_wait_ms
    load = waited_ms / question.unit_ms
    if load > question.backlog:
        load = question.backlog
    load += BEHIND * question.arrivals_per_ms * candidate.uncached_ms
    asked = waited_ms + (1 + load) * candidate.uncached_ms
    if candidate.evicted_ms:
        asked += (1 + EVICTED_WEIGHT * question.calm) * candidate.evicted_ms
        again = 1 + question.backlog
        asked += candidate.evicted_again_ms / (again * again)
    return asked
