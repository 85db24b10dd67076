"""warm: the cheapest replica, where the price counts what the placement costs everyone.

    price(q, r) = pending(r) + KV wait(r) + (1 + load(r)) x uncached(q, r) + (1 + 2 x backlog) x evicted(q, r)

All terms are milliseconds of prefill. `pending + uncached` is the time until the first token, if this request were
alone in the world. The factor is the externality: work done twice delays those behind it, so it counts for more the
longer the queue is that it joins, up to the fleet's mean backlog. An idle replica has nobody to delay: there a copy
of a hot prefix costs what it takes and no more, so hot prefixes spread before their holder is the bottleneck. What
is evicted (times the chance that it is asked for again) is work for later, on any replica, so the whole fleet's
backlog counts, and twice: once for the work and once for what it evicts in its turn. That keeps big new prompts
from thrashing replicas whose conversations will be back.

Prices within the tie band cannot be told apart by a model this simple. There a conversation stays with the replica
that gave its last answer, or else with one that holds at least half of the prompt and more than any other, while
that is under the load bound. Otherwise the consistent-hash ring decides, with bounded load, where load is open
leases and also what a replica holds: conversations will be back, so memory is future load. Several routers then
agree without talking, a shared system prompt does not pull every newcomer to its first holder, and a conversation
whose cache was lost everywhere settles in one place. None of this ever overrides a price outside the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from router.core.facts import Candidate, Choice, Question
from router.core.ring import Ring, load_bound

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
        """The cheapest; inside the tie band the ring."""
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
                return Choice(_least(at_home, prices).id, tied)
        footprint_bound = load_bound(footprint + FOOTPRINT_SLACK_BLOCKS * count, count)
        return Choice(_least(_first(order, bound, footprint_bound), prices).id, tied)


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


def price(candidate: Candidate, question: Question) -> float:
    """Milliseconds, for this request and for the others."""
    pending_ms, backlog = candidate.pending_ms, question.backlog
    load = pending_ms / question.unit_ms
    if load > backlog:
        load = backlog
    now_ms = pending_ms + candidate.kv_wait_ms + (1 + load) * candidate.uncached_ms
    return now_ms + (1 + 2 * backlog) * candidate.evicted_ms
