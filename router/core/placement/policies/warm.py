"""warm: the cheapest replica, where the price is the cost of the placement to all requests until every answer ends.

    price(q, r) = wait(r) + uncached(q, r) + load(r) x min(uncached(q, r), unit)
                  + room(q, r) + evicted(q, r) + evicted_again(q, r) / (1 + backlog)^2
                  + weight x (stalled(q, r) + (decode(q, r) + slowed(q, r)) / 2)
    weight = max(0.3, 1 / (1 + streams))

All terms are milliseconds of waiting. Each is a field of Candidate, which core/placement/scoring.py fills.

- `wait` is the time until the prompt's prefill begins: the prefills before it must end and the KV pool must have space.
  Both waits run at the same time, so the longer one counts.
- `uncached` is the prefill time of the tokens that the replica does not hold.
- `load` is the wait in units of 16,000 tokens, limited to the fleet's mean. It is the externality of the prefill: work
  done twice delays the requests in the queue, and an idle replica has no queue. At most one unit of the prompt is
  counted, because requests that would wait minutes for a long prompt are placed elsewhere, at the cost of repeating
  about one unit of work.
- `room` is the same externality for memory. A prompt keeps KV space until its answer ends, and requests wait for space
  if the pool is full or will be full (core/placement/kv_pressure.py).
- `evicted` is future work: the tokens that the placement evicts, times the probability that they are requested again.
- `evicted_again` is the work of the evictions that this repeated work causes (core/placement/eviction_cost.py). It
  makes conversations that do not fit share a few replicas, so the others keep their caches. This is good for most
  conversations and bad for some, so the term counts less as the queues grow.
- `stalled` is the delay that the prefill causes to the answers that decode on the replica.
- `decode` is the time of the answer after its first token.
- `slowed` is the delay that the answer's decode steps cause to the other answers.

The last three terms are differences between replicas that do not last. With `streams` open requests on the mean
replica, as many requests arrive during one answer, and each goes where fewer answers decode. So an imbalance lasts for
a fraction 1 / (1 + streams) of an answer. It shrinks during that time, so `decode` and `slowed` count half. Requests
that are bound to a cache even nothing out, so the weight is never below WEIGHT_LEAST.

The fleet is busy if BUSY_UNITS of prefill wait on the mean replica and one unit on the median replica. In a busy fleet
a prompt is deferred if even the cheapest placement would make other requests repeat more than DEFER_RATIO times the
prompt's own work (core/admission/hold_back.py).

A model this simple cannot distinguish prices within the tie band. In the band the following rules decide, in this
order:

- A conversation stays on the replica that gave its last answer (its home).
- A prompt without a home goes to the replica that its agent's metadata suggests, if no other replica holds more of it.
- If one replica holds half of the prompt, the prompt goes to that one of the deepest holders that can begin first.
- Otherwise it goes to one of two places of the consistent-hash ring.

These rules apply only to replicas under the ring's load bound, and none of them overrides a price outside the band.
Several routers with the same view of the fleet each prefer their own replicas among equals.

If replicas do more work than this router sends, another router also uses them. A prompt that no replica is known to
hold may then be cached at its place on the ring, because the other router would have sent it there. The price there is
lowered by the learned probability of this. It is multiplied by the work that is saved, and the same again for the next
router that looks there.

If the chosen replica can fetch missing blocks from another replica's memory, it does so if that costs less than
computing them (`pulls`). If one replica may prefill a prompt that another one decodes, the pair is priced as well
(`split`). Its price has the prefill's terms of one replica, the answer's terms of the other, and the transfer time.

`python -m loadtest simulate --sweep` shows the effect of other values of the constants.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from router.core.placement.policies.policy import TransferTimes
from router.core.placement.ring import Ring, load_bound
from router.core.types.placements import (
    Candidate,
    Confidence,
    DisaggPlan,
    PlacementContext,
    PolicyDecision,
    PriceWeights,
    Pull,
)

DECODING = 0.5  # share of an answer's imbalance that counts: it shrinks to nothing during the answer
WEIGHT_LEAST = 0.3  # least weight of a millisecond after the first token, with one replica
BUSY_UNITS = 3.0  # Mean backlog above which requests may be deferred: above it no request starts soon anyway.
# Work that a prompt may make others repeat, in multiples of its own work, before this counts as thrashing.
DEFER_RATIO = 2.0
SPREAD = 2  # Streams by which a router's own replicas may exceed others with the same cached prefix and the same wait.
ELSEWHERE_MIN = 0.02  # a smaller probability means no other router: counters are late by as much
LAST_REPLICA_SLACK = 1  # open leases that a replica in the band may have regardless of the load bound
# Rate at which the weight of decoding falls with the median wait of prefilling replicas, measured in units.
PREFILL_QUEUE_SLOPE = 1.0
DISAGG_CANDIDATES = 4  # number of replicas that are priced for each of the two stages
RING_CHOICES = 2  # places on the ring for each key; it takes the less loaded one (Mitzenmacher 2001)


@dataclass(slots=True)
class Warm:
    """No settings: every constant is learned or follows from learned times."""

    name: str = "warm"
    cache_aware: bool = True
    _ring: Ring = field(default_factory=Ring)
    _prefill_ring: Ring = field(default_factory=Ring)  # ring of replicas that prefill for others

    def order_by_ring(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """Return all `ids`, the nearest to the key on the ring first."""
        return self._ring.walk(ring_key, ids)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the cheapest candidate, or inside the tie band the home, a holder or a place of the ring. Also decide
        if the request is deferred."""
        choice = self._cheapest(market, candidates)
        if market.backlog >= BUSY_UNITS and market.median_backlog >= 1:
            choice.hold_back = any(would_thrash(c, market) for c in candidates if c.id == choice.id)
        return choice

    def weigh(self, market: PlacementContext) -> PriceWeights:
        """Return the weights of the prices in `choose`; `price_terms` gives the terms of each."""
        return weigh(market)

    def pulls(self, market: PlacementContext, chosen: Candidate, pull: Pull) -> bool:
        """True if the transfer costs less than it saves: this request's prefill, and the delays that the prefill
        causes."""
        weights = weigh(market)
        waited_ms = max(chosen.pending_ms, chosen.kv_wait_ms)
        saved_ms = chosen.uncached_ms - pull.uncached_ms
        delays_ms = min(chosen.uncached_ms, weights.unit_ms) - min(pull.uncached_ms, weights.unit_ms)
        saved_ms += min(waited_ms * weights.per_wait_ms, weights.load_max) * delays_ms
        saved_ms += weights.decoding * (chosen.stalled_ms - pull.stalled_ms)
        return pull.fetch_ms < saved_ms

    def may_split(self, market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """True if a pair can save more than the tie band. This alone decides for a request that is mostly cached. A
        queue before the prefill reduces the weight of decoding, at most to 0, and may make a wait count in full."""
        most = weigh(market)
        most.load_max = inf
        least = PriceWeights(most.per_wait_ms, most.unit_ms, most.load_max, most.again, 0.0)
        for weights in (most, least):
            answer_ms = min([answer_price(each, weights) for each in decode], default=inf)
            if price(chosen, weights) - answer_ms > market.tie_ms:
                return True
        return False

    def split(
        self,
        market: PlacementContext,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: TransferTimes,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> DisaggPlan | None:
        """Return the cheapest of a few pairs if it is cheaper than one replica by more than the tie band. With `must`
        return it in any case."""
        weights, tie_ms = weigh_stages(market, waits_ms), market.tie_ms
        whole_ms, answers = price(chosen, weights), [(answer_price(c, weights), n) for n, c in enumerate(decode)]
        if not answers or not prefill or (whole_ms - min(answers)[0] <= tie_ms and not must):
            return None
        best = _best(
            self._first_legs(market, prefill, weights), nsmallest(DISAGG_CANDIDATES, answers), decode, pairs, tie_ms
        )
        if best is None and must:  # none of these few are a pair
            firsts = sorted([(prefill_price(c, weights), n) for n, c in enumerate(prefill)])
            best = _best([(ms, prefill[n]) for ms, n in firsts], sorted(answers), decode, pairs, tie_ms)
        return best if best is not None and (must or best.price_ms < whole_ms - tie_ms) else None

    def _first_legs(
        self, market: PlacementContext, prefill: Sequence[Candidate], weights: PriceWeights
    ) -> list[tuple[float, Candidate]]:
        """Return the few replicas with the cheapest prefill and their prices, in that order. Replicas within the tie
        band of the cheapest are in the order of the ring."""
        few = nsmallest(DISAGG_CANDIDATES, [(prefill_price(c, weights), n) for n, c in enumerate(prefill)])
        band = {prefill[n].id: (price_ms, prefill[n]) for price_ms, n in few if price_ms - few[0][0] <= market.tie_ms}
        ordered = [band[id_] for id_ in self._prefill_ring.walk(market.ring_key, band)]
        return ordered + [(price_ms, prefill[n]) for price_ms, n in few if prefill[n].id not in band]

    def _cheapest(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        # One loop over the candidates: a comprehension for each of its results would take twice as long.
        longest, cheapest, weights, tie_ms = 0, inf, weigh(market), market.tie_ms
        for c in candidates:
            c.price_ms = price_ms = price(c, weights)
            if price_ms < cheapest:
                cheapest = price_ms
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if market.other_router_probability > ELSEWHERE_MIN:
            guess = self._guess(candidates, market, weights, longest)
            if guess is not None and guess[1] - cheapest <= tie_ms:
                return PolicyDecision(guess[0].id, guess[0].cached_tokens == longest, guessed=True)
        band = {c.id: c for c in candidates if c.price_ms - cheapest <= tie_ms}
        if len(band) == 1:
            return PolicyDecision(next(iter(band)))
        return self._in_band(market, band, longest)

    def _in_band(self, market: PlacementContext, band: dict[str, Candidate], longest: int) -> PolicyDecision:
        """Choose among prices that cannot be distinguished; `longest` is the largest number of cached tokens of any
        candidate."""
        most = max([c.cached_tokens for c in band.values()])
        tied = most == longest  # otherwise the longest holder was too expensive: a spill
        bound = load_bound(market.in_flight + 1, market.replicas)
        home = band.get(market.last_replica)
        if home is not None and _has_room(home, bound):
            return PolicyDecision(home.id, tied)
        expected = band.get(market.expected_replica)
        if expected is not None and expected.cached_tokens == most and _has_room(expected, bound):
            return PolicyDecision(expected.id, tied)
        order = self._order(market, band)
        able = [c for c in order if _has_room(c, bound)] or order
        deepest = max([c.cached_tokens for c in able])
        if deepest and deepest >= able[0].cached_tokens + able[0].uncached_tokens - deepest:
            return PolicyDecision(
                _soonest([c for c in able if c.cached_tokens == deepest], market.preferred_replicas).id, tied
            )
        return PolicyDecision(_least(able[:RING_CHOICES]).id, tied)

    def _order(self, market: PlacementContext, some: dict[str, Candidate]) -> list[Candidate]:
        """Return the candidates in `some`, the nearest to the ring key first."""
        ids = market.ring_order or self._ring.walk(market.ring_key, some)
        return [some[id_] for id_ in ids if id_ in some]

    def _guess(
        self, candidates: Sequence[Candidate], market: PlacementContext, weights: PriceWeights, longest: int
    ) -> tuple[Candidate, float] | None:
        """Return the ring place of a prompt that is mostly not known to be cached, and its price less the work probably
        saved there. Return None if most of the prompt is cached, or if the place's events are exact."""
        prompt_tokens = candidates[0].cached_tokens + candidates[0].uncached_tokens
        if 2 * longest > prompt_tokens:
            return None
        ids = {c.id: c for c in candidates}
        guess = self._order(market, ids)[0]
        if guess.grade is Confidence.EXACT:
            return None
        answer_ms = weights.decoding * DECODING * (guess.decode_ms + guess.slowed_ms)  # the same if the prompt is held
        saved_ms = guess.price_ms - wait_ms(guess) - answer_ms + guess.uncached_ms
        return guess, guess.price_ms - market.other_router_probability * saved_ms


def _best(
    firsts: Sequence[tuple[float, Candidate]],
    seconds: Sequence[tuple[float, int]],
    decode: Sequence[Candidate],
    pairs: TransferTimes,
    tie_ms: float,
) -> DisaggPlan | None:
    """Return the cheapest pair of these prefill stages and decode stages (positions in `decode`), given their prices.
    Among pairs that cannot be distinguished the first one wins. Return None if there is no pair."""
    best: DisaggPlan | None = None
    for first_ms, first in firsts:
        for second_ms, n in seconds:
            transfer_ms = pairs.transfer_ms(first, decode[n])
            if transfer_ms is None:
                continue
            there_ms = wait_ms(first) + first.uncached_ms + transfer_ms
            late_ms = wait_ms(decode[n]) - there_ms  # wait of the decode stage beyond its prefill stage
            price_ms = first_ms + second_ms + transfer_ms + (late_ms if late_ms > 0 else 0.0)
            if best is None or price_ms < best.price_ms - tie_ms:
                best = DisaggPlan(first, decode[n], transfer_ms, price_ms)
    return best


def _has_room(candidate: Candidate, bound: int) -> bool:
    return candidate.in_flight < bound or candidate.in_flight <= LAST_REPLICA_SLACK


def _least(candidates: list[Candidate]) -> Candidate:
    """Return the least loaded candidate; of several the cheapest, and of several such the first."""
    least, *others = candidates
    for c in others:
        if c.in_flight < least.in_flight or (c.in_flight == least.in_flight and c.price_ms < least.price_ms):
            least = c
    return least


def _soonest(holders: list[Candidate], own: Collection[str]) -> Candidate:
    """Return the candidate with the shortest wait, including loads, among several that hold the same; of equals the
    least loaded.

    No cached block is at stake between them, so every wait counts, however short: most of the open leases decode and do
    not delay a prefill. With several routers, the router's `own` replicas precede others that have up to SPREAD streams
    less.
    """
    soonest, *others = holders
    least = [soonest]
    least_ms = wait_ms(soonest) + soonest.loading_ms
    for c in others:
        waits_ms = wait_ms(c) + c.loading_ms
        if waits_ms < least_ms:
            least, least_ms = [c], waits_ms
        elif waits_ms == least_ms:
            least.append(c)
    if own and len(least) > 1:
        most = min([c.in_flight for c in least]) + SPREAD
        least = [c for c in least if c.in_flight <= most and c.id in own] or least
    return _least(least)


def wait_ms(candidate: Candidate) -> float:
    """Return the time until a prefill can begin: the prefills before it are done and the KV pool has space."""
    pending_ms, kv_wait_ms = candidate.pending_ms, candidate.kv_wait_ms
    return pending_ms if pending_ms > kv_wait_ms else kv_wait_ms  # noqa: FURB136 - half of max()'s time


def would_thrash(candidate: Candidate, market: PlacementContext) -> bool:
    """True if a request that began here now would make other requests repeat much more work than its own. A request
    that is mostly cached is a turn of an ongoing conversation, and never thrashes."""
    if candidate.uncached_tokens <= candidate.cached_tokens or candidate.uncached_ms <= market.tie_ms:
        return False
    return candidate.evicted_ms + candidate.evicted_again_ms > DEFER_RATIO * candidate.uncached_ms


def weigh(market: PlacementContext) -> PriceWeights:
    """Return the weights for this placement context."""
    streams = market.in_flight / market.replicas if market.replicas else 0.0
    weight = max(WEIGHT_LEAST, 1 / (1 + streams))
    backlog = market.backlog
    return PriceWeights(1 / market.unit_ms, market.unit_ms, backlog, 1 / (1 + backlog) ** 2, weight)


def weigh_stages(market: PlacementContext, waits_ms: Sequence[float]) -> PriceWeights:
    """Return the weights for disaggregated prefill by replicas with these waits.

    Their queues count like those of the fleet. Streams that a prefill would stall count in full if no prefill waits:
    later arrivals even out an imbalance of streams, but not a stall.
    """
    weights = weigh(market)
    weights.decoding = 1.0
    if waits_ms and max(waits_ms):
        backlog = sum(waits_ms) / len(waits_ms) / market.unit_ms
        weights.load_max = max(weights.load_max, backlog)
        units = sorted(waits_ms)[(len(waits_ms) - 1) // 2] / market.unit_ms
        weights.decoding = 1 / (1 + PREFILL_QUEUE_SLOPE * units)
    return weights


def price_terms(candidate: Candidate, weights: PriceWeights) -> dict[str, float]:
    """Return the terms of a candidate's price, as they are weighted: milliseconds that add up to `price`."""
    waited_ms, uncached_ms, decoding = wait_ms(candidate), candidate.uncached_ms, weights.decoding
    load = min(waited_ms * weights.per_wait_ms, weights.load_max)
    return {
        "wait_ms": waited_ms,
        "uncached_ms": uncached_ms,
        "load_ms": load * min(uncached_ms, weights.unit_ms),
        "room_ms": candidate.room_ms,
        "evicted_ms": candidate.evicted_ms,
        "evicted_again_ms": weights.again * candidate.evicted_again_ms,
        "stalled_ms": decoding * candidate.stalled_ms,
        "decode_ms": decoding * DECODING * candidate.decode_ms,
        "slowed_ms": decoding * DECODING * candidate.slowed_ms,
    }


def price(candidate: Candidate, weights: PriceWeights) -> float:
    """Return the milliseconds that this request and others wait, by the formula above."""
    # wait_ms() inlined: a call for every candidate of every request would be measurable
    waited_ms = candidate.pending_ms
    if candidate.kv_wait_ms > waited_ms:
        waited_ms = candidate.kv_wait_ms
    load = waited_ms * weights.per_wait_ms
    if load > weights.load_max:
        load = weights.load_max
    uncached_ms = candidate.uncached_ms
    delay_ms = uncached_ms if uncached_ms < weights.unit_ms else weights.unit_ms  # noqa: FURB136 - as in wait_ms()
    return (
        waited_ms
        + uncached_ms
        + load * delay_ms
        + candidate.room_ms
        + candidate.evicted_ms
        + weights.again * candidate.evicted_again_ms
        + weights.decoding * (candidate.stalled_ms + DECODING * (candidate.decode_ms + candidate.slowed_ms))
    )


def prefill_price(candidate: Candidate, weights: PriceWeights) -> float:
    """Return the part of a price that belongs to a prefill stage: its wait, and its cost to other requests on the
    replica."""
    waited_ms, uncached_ms = wait_ms(candidate), candidate.uncached_ms
    load = min(waited_ms * weights.per_wait_ms, weights.load_max)
    return (
        waited_ms
        + uncached_ms
        + load * min(uncached_ms, weights.unit_ms)
        + candidate.evicted_ms
        + weights.again * candidate.evicted_again_ms
        + weights.decoding * candidate.stalled_ms
    )


def answer_price(candidate: Candidate, weights: PriceWeights) -> float:
    """Return the part of a price that belongs to a decode stage, without its wait, which the prefill may cover."""
    return (
        candidate.room_ms
        + candidate.evicted_ms
        + weights.again * candidate.evicted_again_ms
        + weights.decoding * DECODING * (candidate.decode_ms + candidate.slowed_ms)
    )
