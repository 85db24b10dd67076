"""warm: the cheapest replica, where the price counts what the placement costs everyone.

    price(q, r) = pending(r) + KV wait(r) + (1 + backlog) x (uncached(q, r) + evicted(q, r) x P(asked for again))

All terms are milliseconds of prefill. `pending + uncached` is the time until the first token, if this request were
alone in the world. The factor is the externality: work done twice delays everyone behind it, the more so the longer
the fleet's queues are, so near saturation a hit is worth more than a short queue. The eviction term keeps a big new
prompt from thrashing a replica whose conversations will be back.

Prices within the tie band cannot be told apart by a model this simple. There a replica that holds at least half of
the prompt, and more than any other in the band, keeps it while its open leases are under the load bound: a short
conversation stays at home. Otherwise the consistent-hash ring decides, with bounded load, where load is open leases
and also what a replica holds: conversations will be back, so memory is future load. Several routers then agree
without talking, a shared system prompt does not pull every newcomer to its first holder, and a conversation whose
cache was lost everywhere settles in one place. None of this ever overrides a price outside the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.core.facts import Candidate, Choice, Question
from router.core.ring import Ring, under_bound


@dataclass(slots=True)
class Warm:
    """No settings: every constant is learned or follows from learned times."""

    name: str = "warm"
    cache_aware: bool = True
    _ring: Ring = field(default_factory=Ring)

    def choose(self, question: Question, candidates: Sequence[Candidate]) -> Choice:
        """The cheapest; inside the tie band the ring."""
        factor = 1 + question.backlog
        prices = {c.id: price(c, factor) for c in candidates}
        cheapest = min(prices.values())
        band = [c for c in candidates if prices[c.id] - cheapest <= question.tie_ms]
        if len(band) == 1:
            return Choice(band[0].id)
        free = under_bound({c.id: c.in_flight for c in candidates}, 1)
        longest = max(c.cached_tokens for c in band)
        homes = {c.id for c in band if c.cached_tokens == longest and c.cached_tokens >= c.uncached_tokens} & free
        if homes:
            return Choice(self._ring.pick(question.ring_key, homes, homes), tied=True)
        roomy = under_bound({c.id: c.footprint_blocks for c in candidates}, 1)
        ids = {c.id for c in band}
        return Choice(self._ring.pick(question.ring_key, ids, ids & free & roomy or free), tied=True)


def price(candidate: Candidate, factor: float) -> float:
    """Milliseconds, for this request and for the others."""
    work_ms = candidate.uncached_ms + candidate.evicted_ms
    return candidate.pending_ms + candidate.kv_wait_ms + factor * work_ms
