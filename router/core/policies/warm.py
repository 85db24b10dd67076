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

from router.core.facts import Candidate, Choice, Question
from router.core.ring import Ring, under_bound

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
        prices = {c.id: price(c, question) for c in candidates}
        cheapest = min(prices.values())
        band = [c for c in candidates if prices[c.id] - cheapest <= question.tie_ms]
        if len(band) == 1:
            return Choice(band[0].id)
        longest = max(c.cached_tokens for c in candidates)
        tied = any(c.cached_tokens == longest for c in band)  # otherwise who holds most was too dear: a spill
        loads = {c.id: c.in_flight for c in candidates}
        free = under_bound(loads, 1)
        order = self._ring.walk(question.ring_key, {c.id for c in band})
        homes = _homes(question, band)
        at_home = [id_ for id_ in order if id_ in homes and (id_ in free or loads[id_] <= HOME_IN_FLIGHT)]
        if at_home:
            return Choice(min(at_home, key=lambda id_: (loads[id_], prices[id_])), tied)
        slack = FOOTPRINT_SLACK_BLOCKS * len(candidates)
        roomy = under_bound({c.id: c.footprint_blocks for c in candidates}, slack)
        under = [id_ for id_ in order if id_ in free and id_ in roomy] or [id_ for id_ in order if id_ in free]
        return Choice(min((under or order)[:RING_CHOICES], key=lambda id_: (loads[id_], prices[id_])), tied)


def _homes(question: Question, band: Sequence[Candidate]) -> set[str]:
    """Where a conversation belongs, if it belongs anywhere."""
    if any(c.id == question.home for c in band):
        return {question.home}
    longest = max(c.cached_tokens for c in band)
    return {c.id for c in band if c.cached_tokens == longest and c.cached_tokens >= c.uncached_tokens}


def price(candidate: Candidate, question: Question) -> float:
    """Milliseconds, for this request and for the others."""
    load = min(question.backlog, candidate.pending_ms / question.unit_ms)
    now_ms = candidate.pending_ms + candidate.kv_wait_ms + (1 + load) * candidate.uncached_ms
    return now_ms + (1 + 2 * question.backlog) * candidate.evicted_ms
