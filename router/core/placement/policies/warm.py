"""warm: the cheapest replica, where the price counts what the placement costs everyone, to the end of every answer.

    price(q, r) = wait(r) + uncached(q, r) + load(r) x min(uncached(q, r), unit)
                  + room(q, r) + evicted(q, r)
                  + evicted_again(q, r) / (1 + backlog)^2
                  + (decode(q, r) + slowed(q, r) + stalled(q, r)) / (1 + CROWD x median_ms / tie_ms)

All terms are milliseconds that somebody waits. Each is a field of Candidate, which core/placement/candidates.py fills.

`wait` is the time until the prompt's prefill begins: until the prefills before it are done and the KV pool has room.
Both come about at the same time, so the longer of the two counts. `uncached` is the prefill of what the replica does
not hold: a request goes to its cache unless waiting there costs more than computing it again. What memory behind the
GPU holds is loaded while others are prefilled, so a load is a time of this request alone and none of the GPU's; a
price with it was raced, and is no better than one without (docs/evidence/tiers.md). It decides where nothing else
does, between replicas that hold as much.

`load`, the wait in units of 16,000 tokens and at most the fleet's mean, is the externality: work done twice delays the
requests behind it, and an idle replica has nobody to delay. A prompt of minutes delays none of them by minutes: whoever
would wait behind it is placed elsewhere, for about a unit's work done again, so more than a unit is not counted for
each.

`room` is the same externality of memory. A prompt keeps KV room until its answer ends, and where the pool is full, or
will be (core/placement/room.py), all who wait behind it wait for that. A prefix that open leases share is kept until
the last of them ends, so one that joins many of them keeps little, and a copy keeps all of it: where room is short, a
prefix stays together.

`evicted` is work for later: the tokens that the placement evicts, times the chance that they are asked for again. Then
they evict others in their turn, and so on (core/placement/evictions.py). So where more conversations go on than fit,
those that do not fit meet on a few replicas, whose caches are lost anyway, and the others keep theirs. That is good for
most conversations and bad for some, which wait there: the longer the queues, the less `evicted_again` counts, both for
how long they wait and for how many wait, until all share the room that there is.

`decode` is the time that the answer itself takes there after its first token, `slowed` the delay that its steps cause
the answers that decode there, and `stalled` the delay that its prefill causes them. A hot prefix spreads by these
terms, because a copy is cheaper than a crowd. They weigh as much as a millisecond before the first token where no
prefill waits. Where prefill waits, the fleet is short of prefill: work done twice delays all who come, while a crowd
disperses with the next few placements. So the weight of decoding falls with the median wait, to a fifth where that
reaches the tie band; a few replicas with a prompt of minutes say nothing of the others.

Where the fleet is busy (BUSY_UNITS of prefill wait at the mean replica, and one unit at the median), and even the
cheapest placement would make others repeat more than HELD_WORTH times the prompt's own work, the prompt is held back
(core/admission/holding.py).

Where the chosen replica can bring what it lacks from the memory of another one, it does so if that costs less than
computing (`pulls`). The choice is made without: a price with the fetch in the place of the prefill was raced, and lost
to no pulls at all. Copies then go wherever a little less waits or fewer answers decode. They push the only copies of
other prompts out of memory behind the GPU, and those that are made while room is plenty take it later, as long as the
prompt is asked for. With terms for both it chooses as without a fetch, or worse (docs/evidence/pulls.md).

Where one replica may prefill what another one decodes, two legs are priced beside the one (`split`): the prefill's
terms at the one replica, those of the answer at the other, and the transfer between them. What a prefill takes from
streams is then taken where fewer are. A queue before the replicas that prefill is paid by all who come later, so the
weight of decoding falls with that queue as it falls with the fleet's. Within the tie band one leg is enough.

Prices within the tie band cannot be told apart by a model this simple. Among replicas that hold as much as the cheapest
what EVENED streams make out counts for nothing: whoever comes next finds the same replicas, and goes where there are
fewer, so that a lead of a few streams is over long before the answer is. In the band a conversation stays with the
replica that gave its last answer, or else goes to a replica that holds at least half of the prompt and more than any
other, while that replica is under the load bound; of several that hold as much, to the one where its client's words let
it be expected (core/placement/conversations.py), or else to the one that can begin first. Of those that hold less than
half, the expected one is taken if none holds more and it has room, of memory too. Otherwise the consistent-hash ring
decides, with bounded load, where load is open leases and also what a replica holds: conversations will be back, so
memory is future load. Several routers then agree without talking, a shared system prompt does not pull every newcomer
to its first holder, and a conversation whose cache was lost everywhere settles in one place. None of this ever
overrides a price outside the band.

Several routers that see the same would take the same one of many replicas that hold a hot prefix, until each has heard
of the others' choice a few milliseconds later. So of replicas that hold as much and can begin as soon each router goes
to those first that are its own, one in as many as there are routers.

Where replicas do more than this router asks of them, another router sends there too, and a prompt that nobody is known
to hold may belong to one of its conversations. All routers would look for it at its place on the ring, so there it is
cheaper by the chance that it was sent there, which is learned from how often that was right: by what need not be
computed, and by as much again, which it saves the router that looks for it there next.

docs/evidence/race.md has the races by which this was chosen; `python -m loadtest simulate --sweep` moves its constants.
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

CROWD = 4.0  # how fast the weight of decoding falls with the median wait, measured in tie bands
BUSY_UNITS = 3.0  # mean backlog from which on requests may be held back: then no turn comes soon in any case
HELD_WORTH = 2.0  # a prompt may make others repeat so many times its own work before that counts as thrashing
SPREAD = 2  # streams by which a router's own replicas may be ahead of others that hold as much and begin as soon
EVENED = 4.0  # streams by which replicas that hold as much may differ: the next placements even that out
ELSEWHERE_MIN = 0.02  # a smaller chance means no other router: counters are late by as much
HOME_IN_FLIGHT = 1  # open leases that are no reason to leave home
QUEUE = 1.0  # how fast that weight falls with the median wait of replicas that prefill, measured in units
LEGS = 4  # replicas whose price is looked at for each of two legs
RING_CHOICES = 2  # places on the ring that a key has; it takes the less loaded one (Mitzenmacher 2001)
FOOTPRINT_SLACK_BLOCKS = 64  # some 8,000 tokens: a difference of less than a conversation is no imbalance


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
        # Two loops over the candidates: a comprehension for each of their results would take twice as long.
        prices: dict[str, float] = {}
        longest, cheapest, best = 0, inf, candidates[0]
        weights = Weights.of(market)
        for c in candidates:
            prices[c.id] = c.price_ms = price_ms = price(c, weights)
            if price_ms < cheapest:
                cheapest, best = price_ms, c
            if c.cached_tokens > longest:
                longest = c.cached_tokens
        if market.elsewhere > ELSEWHERE_MIN:
            guess = self._guess(candidates, market, weights, prices, longest)
            if guess is not None and prices[guess.id] - cheapest <= market.tie_ms:
                return Choice(guess.id, guess.cached_tokens == longest, guessed=True)
        count, tie_ms, longest_in_band = market.replicas, market.tie_ms, 0
        even_ms, best_ms = _evened_ms(best, weights), _decoding_ms(best, weights)
        band: dict[str, Candidate] = {}
        for c in candidates:
            dearer_ms = prices[c.id] - cheapest
            if dearer_ms > tie_ms and even_ms and c.cached_tokens == best.cached_tokens:
                crowd_ms = _decoding_ms(c, weights) - best_ms
                if crowd_ms <= even_ms:
                    dearer_ms -= crowd_ms
            if dearer_ms <= tie_ms:
                band[c.id] = c
                if c.cached_tokens > longest_in_band:
                    longest_in_band = c.cached_tokens
        if len(band) == 1:
            return Choice(next(iter(band)))
        tied = longest_in_band == longest  # otherwise the longest holder was too dear: a spill
        bound = load_bound(market.in_flight + 1, count)
        home = band.get(market.home)
        if home is not None and _has_room(home, bound):
            return Choice(home.id, tied)
        order = self._order(market, band)
        if home is None and longest_in_band:
            holders = [c for c in order if c.cached_tokens == longest_in_band >= c.uncached_tokens]
            at_home = [c for c in holders if _has_room(c, bound)] if holders else holders
            if at_home:
                expected = [c for c in at_home if c.id == market.expected]
                return Choice(_soonest(expected or at_home, prices, market.own).id, tied)
        footprint_bound = load_bound(market.footprint_blocks + FOOTPRINT_SLACK_BLOCKS * count, count)
        kin = band.get(market.expected)
        roomy = kin is not None and kin.footprint_blocks < footprint_bound and _has_room(kin, bound)
        if kin is not None and roomy and kin.cached_tokens == longest_in_band:
            return Choice(kin.id, tied)
        return Choice(_least(_first(order, bound, footprint_bound), prices).id, tied)

    def _order(self, market: Market, some: dict[str, Candidate]) -> list[Candidate]:
        """The candidates `some`, the nearest to the ring key first."""
        ids = market.order or self._ring.walk(market.ring_key, some)
        return [some[id_] for id_ in ids if id_ in some]

    def _guess(
        self,
        candidates: Sequence[Candidate],
        market: Market,
        weights: Weights,
        prices: dict[str, float],
        longest: int,
    ) -> Candidate | None:
        """The place on the ring of a prompt most of which nobody is known to hold; lowers its price by what is probably
        held there. None where somebody holds most of the prompt, or events say exactly what is held there."""
        prompt_tokens = candidates[0].cached_tokens + candidates[0].uncached_tokens
        if 2 * longest > prompt_tokens:
            return None
        ids = {c.id: c for c in candidates}
        guess = self._order(market, ids)[0]
        if guess.grade is Grade.EXACT:
            return None
        decoding_ms = weights.decoding * (guess.decode_ms + guess.slowed_ms)  # the same if the prompt is held
        saved_ms = prices[guess.id] - wait_ms(guess) - decoding_ms + guess.uncached_ms
        prices[guess.id] -= market.elsewhere * saved_ms
        return guess


def _decoding_ms(candidate: Candidate, weights: Weights) -> float:
    """What decoding, its own and others', makes out in the price."""
    return weights.decoding * (candidate.decode_ms + candidate.slowed_ms + candidate.stalled_ms)


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


def _evened_ms(cheapest: Candidate, weights: Weights) -> float:
    """What EVENED streams make out in the price of a replica that holds most of the prompt; 0 where it does not."""
    if cheapest.cached_tokens < cheapest.uncached_tokens or not cheapest.in_flight:
        return 0.0
    # One stream more delays each of the others by its steps, and is delayed as much by theirs.
    one_ms = (2 * cheapest.slowed_ms + cheapest.stalled_ms) / cheapest.in_flight
    return EVENED * weights.decoding * one_ms


def _has_room(home: Candidate, bound: int) -> bool:
    return home.in_flight < bound or home.in_flight <= HOME_IN_FLIGHT


def _first(order: list[Candidate], bound: int, footprint_bound: int) -> list[Candidate]:
    """The key's places on the ring: the first ones under both bounds; without any, the first ones under the bound of
    leases; without any, the first ones."""
    roomy = []
    for c in order:
        if c.in_flight < bound and c.footprint_blocks < footprint_bound:
            roomy.append(c)
            if len(roomy) == RING_CHOICES:
                return roomy
    return roomy or ([c for c in order if c.in_flight < bound] or order)[:RING_CHOICES]


def _least(candidates: list[Candidate], prices: dict[str, float]) -> Candidate:
    """The least loaded candidate; of several the cheapest, and of several such the first."""
    least, *others = candidates
    for c in others:
        if c.in_flight < least.in_flight or (c.in_flight == least.in_flight and prices[c.id] < prices[least.id]):
            least = c
    return least


def _soonest(holders: list[Candidate], prices: dict[str, float], own: Collection[str]) -> Candidate:
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
    return _least(least, prices)


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
        backlog = market.backlog
        bands = market.median_backlog * market.unit_ms / market.tie_ms if market.tie_ms else 0.0
        return Weights(1 / market.unit_ms, market.unit_ms, backlog, 1 / (1 + backlog) ** 2, 1 / (1 + CROWD * bands))

    @staticmethod
    def of_legs(market: Market, waits_ms: Sequence[float]) -> Weights:
        """The weights in a market where replicas that wait for so long may take the prefill: their queues count as the
        fleet's do."""
        weights = Weights.of(market)
        if waits_ms and max(waits_ms):
            backlog = sum(waits_ms) / len(waits_ms) / market.unit_ms
            weights.load_max = max(weights.load_max, backlog)
            units = sorted(waits_ms)[(len(waits_ms) - 1) // 2] / market.unit_ms
            weights.decoding = min(weights.decoding, 1 / (1 + QUEUE * units))
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
        + weights.decoding * (candidate.decode_ms + candidate.slowed_ms + candidate.stalled_ms)
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
        + weights.decoding * (candidate.decode_ms + candidate.slowed_ms)
    )
