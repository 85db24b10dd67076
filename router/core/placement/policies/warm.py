"""warm: the cheapest replica, where the price counts what the placement costs everyone, to the end of every answer.

    price(q, r) = wait(r) + uncached(q, r) + load(r) x min(uncached(q, r), unit)
                  + room(q, r) + evicted(q, r) + evicted_again(q, r) / (1 + backlog)^2
                  + weight x (stalled(q, r) + (decode(q, r) + slowed(q, r)) / 2)
    weight = max(0.3, 1 / (1 + streams))

All terms are milliseconds of waiting. Each is a field of Candidate, which core/placement/candidates.py fills.

`wait` is the time until the prompt's prefill begins: until the prefills before it are done and the KV pool has room.
Both pass at the same time, so the longer of the two counts. `uncached` is the prefill of the tokens that the replica
does not hold. `load`, the wait in units of 16,000 tokens and at most the fleet's mean, is the externality: work done
twice delays the requests behind it, and an idle replica has none. Requests that would wait behind a prompt of minutes
are placed elsewhere, for about a unit's work done again, so no more than a unit is counted.

`room` is the same externality of memory: a prompt keeps KV room until its answer ends, and requests wait for room where
the pool is full, or will be (core/placement/room.py). `evicted` is work for later: the tokens that the placement
evicts, times the chance that they are asked for again. Then they evict others in their turn, and so on: that is
`evicted_again` (core/placement/evictions.py), by which conversations that do not fit meet on a few replicas, and the
others keep their caches. It is good for most conversations and bad for some, so the longer the queues, the less it
counts.

`stalled` is the delay that the prefill causes the answers that decode there, `decode` the time of the answer itself
after its first token, and `slowed` the delay that its steps cause the other answers. They are differences between
replicas that do not last: with `streams` open requests at the mean replica, as many arrive during one answer, and
each goes where fewer answers decode. So an imbalance lasts for one part in 1 + streams of an answer, and as it shrinks
all the while, `decode` and `slowed` count half. Requests that are bound to a cache even nothing out, so the weight is
never below WEIGHT_LEAST.

Where the fleet is busy (BUSY_UNITS of prefill wait at the mean replica, and one unit at the median), and even the
cheapest placement would make others repeat more than HELD_WORTH times the prompt's own work, the prompt is held back
(core/admission/holding.py).

Prices within the tie band cannot be told apart by a model this simple. In the band a conversation stays at home, the
replica that gave its last answer. A prompt without a home goes to the replica where its agent's words let it be
expected, if none holds more; else, where one holds half of the prompt, to the one of the deepest holders that begins
first; else to one of two places of the consistent-hash ring. All of that holds only for replicas under the ring's load
bound, and none of it overrides a price outside the band. Of several routers that see the same, each takes its own
replicas first among equals.

Where replicas do more than this router asks of them, another router sends there too. A prompt that no replica is known
to hold may then be held at its place on the ring, where the other router would have sent it. Its price there is lowered
by the chance of that, which is learned: by the work that is saved, and by as much again for the router that looks there
next.

Where the chosen replica can fetch from another one's memory what it lacks, it does so if that costs less than computing
(`pulls`). Where one replica may prefill what another one decodes, two legs are priced beside the one (`split`): the
prefill's terms at the one replica, those of the answer at the other, and the transfer between them.

`python -m loadtest simulate --sweep` shows what other values of the constants do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from msgspec import Struct

from router.core.facts.placements import Candidate, Choice, Grade, Market, Pull, Split
from router.core.placement.policies.base import Pairs
from router.core.placement.ring import Ring, load_bound

DECODING = 0.5  # part of an answer's imbalance that counts: it shrinks to nothing while it lasts
WEIGHT_LEAST = 0.3  # least weight of a millisecond behind the first token, in one leg
BUSY_UNITS = 3.0  # mean backlog from which on requests may be held back: then no turn comes soon in any case
HELD_WORTH = 2.0  # a prompt may make others repeat so many times its own work before that counts as thrashing
SPREAD = 2  # streams by which a router's own replicas may be ahead of others that hold as much and begin as soon
ELSEWHERE_MIN = 0.02  # a smaller chance means no other router: counters are late by as much
HOME_IN_FLIGHT = 1  # open leases that a replica of the band may have whatever the load bound
QUEUE = 1.0  # how fast the weight of decoding falls with the median wait of replicas that prefill, measured in units
LEGS = 4  # replicas whose price is looked at for each of two legs
RING_CHOICES = 2  # places on the ring that a key has; it takes the less loaded one (Mitzenmacher 2001)


@dataclass(slots=True)
class Warm:
    """No settings: every constant is learned or follows from learned times."""

    name: str = "warm"
    cache_aware: bool = True
    _ring: Ring = field(default_factory=Ring)
    _prefill_ring: Ring = field(default_factory=Ring)  # ring of replicas that prefill for others

    def near(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """All `ids`, the nearest to the key on the ring first."""
        return self._ring.walk(ring_key, ids)

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """The cheapest; inside the tie band home, a holder or the ring; and whether the request is held back."""
        choice = self._cheapest(market, candidates)
        if market.backlog >= BUSY_UNITS and market.median_backlog >= 1:
            choice.hold_back = any(thrashes(c, market) for c in candidates if c.id == choice.id)
        return choice

    def pulls(self, market: Market, chosen: Candidate, pull: Pull) -> bool:
        """Whether fetching costs less than what it saves: this request's prefill, and what that costs others."""
        weights = Weights.of(market)
        waited_ms = max(chosen.pending_ms, chosen.kv_wait_ms)
        saved_ms = chosen.uncached_ms - pull.uncached_ms
        delays_ms = min(chosen.uncached_ms, weights.unit_ms) - min(pull.uncached_ms, weights.unit_ms)
        saved_ms += min(waited_ms * weights.per_wait_ms, weights.load_max) * delays_ms
        saved_ms += weights.decoding * (chosen.stalled_ms - pull.stalled_ms)
        return pull.fetch_ms < saved_ms

    def may_split(self, market: Market, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """Whether all that two legs can save is more than the tie band: a request most of which is cached is decided by
        this alone. A queue before the prefill takes weight from decoding, all of it at most, and may have a wait count
        in full."""
        most = Weights.of(market)
        most.load_max = inf
        least = Weights(most.per_wait_ms, most.unit_ms, most.load_max, most.again, 0.0)
        for weights in (most, least):
            answer_ms = min([answer_price(each, weights) for each in decode], default=inf)
            if price(chosen, weights) - answer_ms > market.tie_ms:
                return True
        return False

    def split(
        self,
        market: Market,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: Pairs,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> Split | None:
        """The cheapest of a few pairs, where it is cheaper than one leg by more than the tie band; in any case where
        there `must` be two legs."""
        weights, tie_ms = Weights.of_legs(market, waits_ms), market.tie_ms
        whole_ms, answers = price(chosen, weights), [(answer_price(c, weights), n) for n, c in enumerate(decode)]
        if not answers or not prefill or (whole_ms - min(answers)[0] <= tie_ms and not must):
            return None
        best = _best(self._first_legs(market, prefill, weights), nsmallest(LEGS, answers), decode, pairs, tie_ms)
        if best is None and must:  # none of these few are a pair
            firsts = sorted([(prefill_price(c, weights), n) for n, c in enumerate(prefill)])
            best = _best([(ms, prefill[n]) for ms, n in firsts], sorted(answers), decode, pairs, tie_ms)
        return best if best is not None and (must or best.price_ms < whole_ms - tie_ms) else None

    def _first_legs(
        self, market: Market, prefill: Sequence[Candidate], weights: Weights
    ) -> list[tuple[float, Candidate]]:
        """Prices of the few replicas where the prefill is cheapest, in that order; those that cannot be told apart from
        the cheapest in the order of the ring."""
        few = nsmallest(LEGS, [(prefill_price(c, weights), n) for n, c in enumerate(prefill)])
        band = {prefill[n].id: (price_ms, prefill[n]) for price_ms, n in few if price_ms - few[0][0] <= market.tie_ms}
        ordered = [band[id_] for id_ in self._prefill_ring.walk(market.ring_key, band)]
        return ordered + [(price_ms, prefill[n]) for price_ms, n in few if prefill[n].id not in band]

    def _cheapest(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        # One loop over the candidates: a comprehension for each of its results would take twice as long.
        longest, cheapest, weights, tie_ms = 0, inf, Weights.of(market), market.tie_ms
        for c in candidates:
            c.price_ms = price_ms = price(c, weights)
            if price_ms < cheapest:
                cheapest = price_ms
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if market.elsewhere > ELSEWHERE_MIN:
            guess = self._guess(candidates, market, weights, longest)
            if guess is not None and guess[1] - cheapest <= tie_ms:
                return Choice(guess[0].id, guess[0].cached_tokens == longest, guessed=True)
        band = {c.id: c for c in candidates if c.price_ms - cheapest <= tie_ms}
        if len(band) == 1:
            return Choice(next(iter(band)))
        return self._in_band(market, band, longest)

    def _in_band(self, market: Market, band: dict[str, Candidate], longest: int) -> Choice:
        """The choice among prices that cannot be told apart; `longest` are the most cached tokens of any candidate."""
        most = max([c.cached_tokens for c in band.values()])
        tied = most == longest  # otherwise the longest holder was too dear: a spill
        bound = load_bound(market.in_flight + 1, market.replicas)
        home = band.get(market.home)
        if home is not None and _has_room(home, bound):
            return Choice(home.id, tied)
        expected = band.get(market.expected)
        if expected is not None and expected.cached_tokens == most and _has_room(expected, bound):
            return Choice(expected.id, tied)
        order = self._order(market, band)
        able = [c for c in order if _has_room(c, bound)] or order
        deepest = max([c.cached_tokens for c in able])
        if deepest and deepest >= able[0].cached_tokens + able[0].uncached_tokens - deepest:
            return Choice(_soonest([c for c in able if c.cached_tokens == deepest], market.own).id, tied)
        return Choice(_least(able[:RING_CHOICES]).id, tied)

    def _order(self, market: Market, some: dict[str, Candidate]) -> list[Candidate]:
        """The candidates `some`, the nearest to the ring key first."""
        ids = market.order or self._ring.walk(market.ring_key, some)
        return [some[id_] for id_ in ids if id_ in some]

    def _guess(
        self, candidates: Sequence[Candidate], market: Market, weights: Weights, longest: int
    ) -> tuple[Candidate, float] | None:
        """The place on the ring of a prompt most of which no replica is known to hold, and its price less what is
        probably held there. None where most of the prompt is held, or events say exactly what is held there."""
        prompt_tokens = candidates[0].cached_tokens + candidates[0].uncached_tokens
        if 2 * longest > prompt_tokens:
            return None
        ids = {c.id: c for c in candidates}
        guess = self._order(market, ids)[0]
        if guess.grade is Grade.EXACT:
            return None
        answer_ms = weights.decoding * DECODING * (guess.decode_ms + guess.slowed_ms)  # the same if the prompt is held
        saved_ms = guess.price_ms - wait_ms(guess) - answer_ms + guess.uncached_ms
        return guess, guess.price_ms - market.elsewhere * saved_ms


def _best(
    firsts: Sequence[tuple[float, Candidate]],
    seconds: Sequence[tuple[float, int]],
    decode: Sequence[Candidate],
    pairs: Pairs,
    tie_ms: float,
) -> Split | None:
    """The cheapest pair of these prefill legs and decode legs (positions in `decode`), with their prices; of those that
    cannot be told apart the first; None where none are a pair."""
    best: Split | None = None
    for first_ms, first in firsts:
        for second_ms, n in seconds:
            transfer_ms = pairs.transfer_ms(first, decode[n])
            if transfer_ms is None:
                continue
            there_ms = wait_ms(first) + first.uncached_ms + transfer_ms
            late_ms = wait_ms(decode[n]) - there_ms  # time that the decode leg waits beyond its prefill leg
            price_ms = first_ms + second_ms + transfer_ms + (late_ms if late_ms > 0 else 0.0)
            if best is None or price_ms < best.price_ms - tie_ms:
                best = Split(first, decode[n], transfer_ms, price_ms)
    return best


def _has_room(candidate: Candidate, bound: int) -> bool:
    return candidate.in_flight < bound or candidate.in_flight <= HOME_IN_FLIGHT


def _least(candidates: list[Candidate]) -> Candidate:
    """The least loaded candidate; of several the cheapest, and of several such the first."""
    least, *others = candidates
    for c in others:
        if c.in_flight < least.in_flight or (c.in_flight == least.in_flight and c.price_ms < least.price_ms):
            least = c
    return least


def _soonest(holders: list[Candidate], own: Collection[str]) -> Candidate:
    """The candidate with the shortest wait, for loads too, among several that hold as much; of equals the least loaded.
    No cache is at stake between them, so every wait counts, however short: most of the open leases decode and delay no
    prefill. Where several routers place, those of a router's `own` go before others with up to SPREAD streams less."""
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
    """Time until a prefill would begin: until the prefills before it are done and the KV pool has room, whichever is
    later."""
    pending_ms, kv_wait_ms = candidate.pending_ms, candidate.kv_wait_ms
    return pending_ms if pending_ms > kv_wait_ms else kv_wait_ms  # noqa: FURB136 - half of max()'s time


def thrashes(candidate: Candidate, market: Market) -> bool:
    """Whether a request that began here now would make others repeat far more work than it is itself. A request most of
    which is cached is the turn of a conversation that goes on, and never thrashes."""
    if candidate.uncached_tokens <= candidate.cached_tokens or candidate.uncached_ms <= market.tie_ms:
        return False
    return candidate.evicted_ms + candidate.evicted_again_ms > HELD_WORTH * candidate.uncached_ms


class Weights(Struct, gc=False):
    """Weights of the price's terms, the same for all candidates of a market."""

    per_wait_ms: float  # load for each millisecond of waiting
    unit_ms: float  # most that a request behind is delayed
    load_max: float
    again: float  # weight of a millisecond of `evicted_again`
    decoding: float  # weight of a millisecond of decoding

    @staticmethod
    def of(market: Market) -> Weights:
        """The weights that hold in a market."""
        streams = market.in_flight / market.replicas if market.replicas else 0.0
        weight = max(WEIGHT_LEAST, 1 / (1 + streams))
        backlog = market.backlog
        return Weights(1 / market.unit_ms, market.unit_ms, backlog, 1 / (1 + backlog) ** 2, weight)

    @staticmethod
    def of_legs(market: Market, waits_ms: Sequence[float]) -> Weights:
        """The weights in a market where replicas that wait for so long may take the prefill: their queues count as the
        fleet's do. Streams that a prefill would stall count in full while no prefill waits: no later arrival makes that
        good, as it makes good an imbalance of streams."""
        weights = Weights.of(market)
        weights.decoding = 1.0
        if waits_ms and max(waits_ms):
            backlog = sum(waits_ms) / len(waits_ms) / market.unit_ms
            weights.load_max = max(weights.load_max, backlog)
            units = sorted(waits_ms)[(len(waits_ms) - 1) // 2] / market.unit_ms
            weights.decoding = 1 / (1 + QUEUE * units)
        return weights


def price(candidate: Candidate, weights: Weights) -> float:
    """Milliseconds that this request and others wait, by the formula above."""
    waited_ms = candidate.pending_ms  # wait_ms() written out: a call for every candidate of every request would show
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


def prefill_price(candidate: Candidate, weights: Weights) -> float:
    """The part of a price that a prefill leg has: what it waits for, and what it takes from others there."""
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


def answer_price(candidate: Candidate, weights: Weights) -> float:
    """The part of a price that a decode leg has, but for its wait, which the prefill's may cover."""
    return (
        candidate.room_ms
        + candidate.evicted_ms
        + weights.again * candidate.evicted_again_ms
        + weights.decoding * DECODING * (candidate.decode_ms + candidate.slowed_ms)
    )
