"""Every policy keeps the same promises; `warm` a few more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.placement.policies import POLICIES, Policy
from router.core.placement.policies.warm import Warm
from router.core.placement.policies.warm.constants import DECODING, DEFER_RATIO
from router.core.placement.policies.warm.cost import weigh
from router.core.placement.policies.warm.tie_break import TIE_BREAKERS
from router.core.placement.policies.warm.warm_policy import PRICE, RING_GUESS
from router.core.placement.ring import Ring
from router.core.types.placements import Candidate, Confidence, FirstTokenExtras, PlacementContext, PolicyDecision
from tests.support.examples import examples
from tests.support.records import replace

IDS = [f"http://10.0.0.{n}:8000" for n in range(6)]
TIMES = st.floats(0, 10_000)


def candidate(id_: str, **fields: float) -> Candidate:
    """An idle replica that holds nothing of a prompt of 1,000 tokens, but for these fields."""
    nothing: dict[str, Any] = dict.fromkeys(("cached_tokens", "pending_ms", "evicted_ms", "kv_wait_ms", "in_flight"), 0)
    return replace(Candidate(id=id_, uncached_tokens=1_000, uncached_ms=100.0, **nothing), **fields)


def market(
    key: str = "k",
    tie_ms: float = 150.0,
    backlog: float = 0.0,
    home: str = "",
    elsewhere: float = 0.0,
) -> PlacementContext:
    """Learned at 10,000 tokens/s: the band is the time of 1,500 tokens, the unit that of 16,000."""
    return PlacementContext(
        key, tie_ms, 1_620.0, backlog, backlog, last_replica=home, other_router_probability=elsewhere
    )


def chosen(asked: PlacementContext, candidates: Sequence[Candidate], policy: Policy | None = None) -> PolicyDecision:
    """The choice of a policy without its prices, `warm` unless told otherwise, where these are all replicas."""
    choice = (policy or Warm()).choose(whole(asked, candidates), candidates)
    choice.pricing = None
    return choice


def whole(asked: PlacementContext, candidates: Sequence[Candidate]) -> PlacementContext:
    """The market where these are all replicas."""
    return replace(asked, replicas=len(candidates), in_flight=sum(c.in_flight for c in candidates))


def price_of(c: Candidate, asked: PlacementContext) -> float:
    """As `warm` has it."""
    return weigh(asked).cost(c).total()


FLEETS = st.lists(
    st.builds(
        Candidate,
        id=st.sampled_from(IDS),
        cached_tokens=st.integers(0, 50_000),
        uncached_tokens=st.integers(1, 50_000),
        pending_ms=TIMES,
        uncached_ms=TIMES,
        evicted_ms=TIMES,
        kv_wait_ms=TIMES,
        extras=st.builds(FirstTokenExtras, delay_ms=TIMES) | st.none(),
        room_ms=TIMES,
        in_flight=st.integers(0, 40),
        decode_ms=TIMES,
        slowed_ms=TIMES,
        stalled_ms=TIMES,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda c: c.id,
)
QUESTIONS = st.builds(
    market,
    st.integers(0, 99).map(str),
    st.floats(0, 500),
    st.floats(0, 20),
    st.sampled_from(["", *IDS]),
    st.sampled_from([0.0, 0.0, 0.3, 0.9]),
)


@pytest.mark.parametrize("name", POLICIES)
@given(fleets=st.lists(st.tuples(QUESTIONS, FLEETS), min_size=1, max_size=6))
@settings(deadline=None, max_examples=examples(30))
def test_a_policy_chooses_a_candidate_and_can_be_repeated(
    name: str, fleets: list[tuple[PlacementContext, list[Candidate]]]
) -> None:
    """Whatever comes, the choice is one of the candidates, and a second run of the same questions is the same."""
    first, second = POLICIES[name](), POLICIES[name]()
    for asked, candidates in fleets:
        choice = chosen(asked, candidates, first)
        assert choice.id in {c.id for c in candidates}
        assert chosen(asked, candidates, second) == choice


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_known_by_its_name(name: str) -> None:
    """Receipts and metrics say which policy decided."""
    policy = POLICIES[name]()
    assert policy.name == name
    assert isinstance(policy.cache_aware, bool)


@pytest.mark.parametrize("name", POLICIES)
def test_one_candidate_is_taken(name: str) -> None:
    """However bad it is."""
    bad = candidate(IDS[3], pending_ms=1e9, in_flight=999)
    assert chosen(market(), [bad], POLICIES[name]()).id == IDS[3]


@pytest.mark.parametrize("name", POLICIES)
def test_equal_replicas_share_the_work(name: str) -> None:
    """Six hundred conversations over six equal replicas, none ever ending: nobody has more than 1.6 x the mean."""
    policy, in_flight = POLICIES[name](), Counter(dict.fromkeys(IDS, 0))
    for n in range(600):
        candidates = [candidate(id_, in_flight=in_flight[id_], pending_ms=100.0 * in_flight[id_]) for id_ in IDS]
        in_flight[chosen(market(f"session-{n}"), candidates, policy).id] += 1
    assert max(in_flight.values()) <= 160


@pytest.mark.parametrize("name", POLICIES)
def test_replicas_may_come_and_go(name: str) -> None:
    """A policy asked about other candidates each time answers about those."""
    policy = POLICIES[name]()
    for start in range(30):
        ids = [IDS[(start + n) % len(IDS)] for n in range(1 + start % 4)]
        assert chosen(market(str(start)), [candidate(id_) for id_ in ids], policy).id in ids


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name]().cache_aware])
def test_a_cache_aware_policy_follows_a_long_prompt(name: str) -> None:
    """Where nothing waits, the replica that saves seconds is chosen."""
    candidates = [candidate(id_, uncached_ms=3_000.0) for id_ in IDS]
    candidates[4] = candidate(IDS[4], cached_tokens=30_000, uncached_tokens=500, uncached_ms=50.0)
    assert chosen(market(), candidates, POLICIES[name]()).id == IDS[4]


@given(asked=QUESTIONS, candidates=FLEETS)
def test_the_terms_of_a_price_add_up_to_it(asked: PlacementContext, candidates: list[Candidate]) -> None:
    """All terms that are shown are those of the price by which the policy chose."""
    pricing = Warm().choose(whole(asked, candidates), candidates).pricing
    assert pricing is not None
    for c in candidates:
        cost = pricing.cost(c)
        assert sum(getattr(cost, name) for name in cost.__struct_fields__) == pytest.approx(c.price_ms)
        assert cost.total() == c.price_ms


@given(asked=QUESTIONS, candidates=FLEETS)
@settings(deadline=None)
def test_warm_never_leaves_the_tie_band(asked: PlacementContext, candidates: list[Candidate]) -> None:
    """Neither the ring nor a home nor a holder overrides a price outside the band; alone in it is no tie. What may be
    held is worth its chance of what it would save."""
    choice, asked = chosen(asked, candidates), whole(asked, candidates)
    prices = {c.id: price_of(c, asked) for c in candidates}
    if choice.guessed:
        (guess,) = (c for c in candidates if c.id == choice.id)
        decoding_ms = weigh(asked).decoding * DECODING * (guess.decode_ms + guess.slowed_ms)
        unsaved_ms = max(guess.pending_ms, guess.kv_wait_ms) + decoding_ms
        saved_ms = asked.other_router_probability * (prices[guess.id] - unsaved_ms + guess.uncached_ms)
        assert prices[guess.id] - saved_ms - min(prices.values()) <= asked.tie_ms + 1e-6
        assert choice.rule == RING_GUESS
        return
    band = [id_ for id_, ms in prices.items() if ms - min(prices.values()) <= asked.tie_ms]
    assert choice.id in band
    assert choice.rule in ({PRICE} if len(band) == 1 else {name for name, _ in TIE_BREAKERS})
    assert not choice.tied or len(band) > 1


@given(
    candidates=FLEETS,
    more=st.floats(1, 1e5),
    field=st.sampled_from(
        ["pending_ms", "uncached_ms", "kv_wait_ms", "room_ms", "evicted_ms", "decode_ms", "stalled_ms"]
    ),
)
@settings(deadline=None)
def test_warm_likes_nobody_for_being_dearer(candidates: list[Candidate], more: float, field: str) -> None:
    """With no band, a replica that was not chosen is not chosen for getting dearer."""
    asked = market(tie_ms=0.0)
    best = chosen(asked, candidates).id
    for n, other in enumerate(candidates):
        if other.id != best:
            dearer = replace(other, **{field: getattr(other, field) + more})
            assert chosen(asked, [*candidates[:n], dearer, *candidates[n + 1 :]]).id != other.id


def test_warm_counts_a_queue_against_a_hit() -> None:
    """Two seconds of saved prefill are worth waiting one second for, and not three."""
    cold = candidate(IDS[0], uncached_ms=2_100.0)
    for pending_ms, expected in [(1_000.0, IDS[1]), (3_000.0, IDS[0])]:
        holder = candidate(IDS[1], cached_tokens=20_000, uncached_ms=100.0, pending_ms=pending_ms)
        assert chosen(market(), [cold, holder]).id == expected


def test_work_weighs_more_where_others_wait_behind_it() -> None:
    """The longer the fleet's queues, the more a hit is worth against computing again in a queue; on an idle replica
    there is nobody to delay, so that hot prefixes spread."""
    holder = candidate(IDS[1], cached_tokens=20_000, uncached_ms=100.0, pending_ms=4_000.0)
    busy = candidate(IDS[0], uncached_ms=2_000.0, pending_ms=1_620.0)
    assert chosen(market(backlog=0.0), [busy, holder]).id == IDS[0]
    assert chosen(market(backlog=1.0), [busy, holder]).id == IDS[1]
    for backlog in (0.0, 1.0, 100.0):
        assert chosen(market(backlog=backlog), [replace(busy, pending_ms=0.0), holder]).id == IDS[0]


def test_a_crowd_is_dearer_than_a_copy_where_few_answers_run() -> None:
    """Where the mean replica has few answers under way, a prefix is computed once more rather than decoded in a crowd;
    where it has many, so that the crowd is gone long before the answer ends, it is not."""
    crowd = candidate(IDS[1], cached_tokens=20_000, uncached_ms=50.0, decode_ms=16_000.0, slowed_ms=4_000.0)
    calm = candidate(IDS[0], uncached_ms=2_000.0, decode_ms=12_000.0, slowed_ms=1_000.0)
    assert chosen(market(), [calm, crowd]).id == IDS[0]
    assert chosen(market(), [replace(c, in_flight=9) for c in (calm, crowd)]).id == IDS[1]


def test_decoding_counts_less_the_more_answers_run() -> None:
    """An answer's own time and the delay of others count half of what a stalled step does, and all of that counts less
    the more answers the mean replica has under way; nothing else changes by them."""
    still = candidate(IDS[0])
    weights = [price_of(replace(still, stalled_ms=1.0), replace(market(), replicas=2, in_flight=n)) for n in (0, 1, 4)]
    assert weights[0] == price_of(still, market()) + 1.0
    assert weights[0] > weights[1] > weights[2] > price_of(still, market())
    for field in ("decode_ms", "slowed_ms"):
        assert price_of(replace(still, **{field: 1.0}), market()) == price_of(still, market()) + DECODING
    for in_flight in (0, 100):
        assert price_of(still, replace(market(), replicas=2, in_flight=in_flight)) == price_of(still, market())


def test_a_prefill_is_dearer_where_it_interrupts_many() -> None:
    """Of two idle queues a cold prompt takes the one beside which fewer answers stall."""
    busy = candidate(IDS[0], uncached_ms=900.0, stalled_ms=20 * 900.0)
    free = candidate(IDS[1], uncached_ms=900.0)
    assert {chosen(market(f"session-{n}"), [busy, free]).id for n in range(20)} == {IDS[1]}


def test_eviction_has_a_price() -> None:
    """A new prompt goes where it pushes nothing out that will be asked for again."""
    full, roomy = candidate(IDS[0], evicted_ms=400.0), candidate(IDS[1])
    assert chosen(market(), [full, roomy]).id == IDS[1]


def test_what_would_thrash_is_held_back_while_the_fleet_is_busy() -> None:
    """A miss that makes others repeat more than DEFER_RATIO of its own work is held while each replica has three units
    of prefill before it, on the mean, and never below that, nor where half of them have none; where most of it is
    cached, where it is short, and where it does no such harm, it goes at once."""
    miss = {"cached_tokens": 1_000, "uncached_tokens": 9_000, "uncached_ms": 900.0}
    thrashing = candidate(IDS[0], **miss, evicted_ms=1.01 * DEFER_RATIO * 900.0)
    for backlog, hold in ((9.0, True), (3.0, True), (2.99, False), (1.0, False), (0.0, False)):
        assert chosen(market(backlog=backlog), [thrashing]).hold_back is hold
    few_wait = replace(market(backlog=9.0), median_backlog=0.9)
    assert not chosen(few_wait, [thrashing]).hold_back
    for change in ({"cached_tokens": 9_000}, {"uncached_ms": 150.0}, {"evicted_ms": 0.99 * DEFER_RATIO * 900.0}):
        assert not chosen(market(backlog=3.0), [replace(thrashing, **change)]).hold_back
    elsewhere = candidate(IDS[1], **miss)
    assert chosen(market(backlog=3.0), [thrashing, elsewhere]) == PolicyDecision(IDS[1], rule=PRICE)


def test_the_place_on_the_ring_is_guessed_unless_its_cache_is_known() -> None:
    """What another router may have sent is looked for at one place, whoever has less to do; what events tell exactly
    is no guess, and neither is what somebody holds."""
    for n in range(20):
        asked = market(f"session-{n}", elsewhere=0.9)
        place = Ring().walk(asked.ring_key, dict.fromkeys(IDS))[0]
        others = [candidate(id_, uncached_ms=2_000.0) for id_ in IDS if id_ != place]
        busy = candidate(place, uncached_ms=2_000.0, pending_ms=1_000.0, in_flight=9)
        assert chosen(asked, [*others, busy]) == PolicyDecision(place, tied=True, guessed=True, rule=RING_GUESS)
        for known in (
            [*others, replace(busy, grade=Confidence.EXACT)],
            [replace(others[0], cached_tokens=900, uncached_tokens=100, uncached_ms=200.0), *others[1:], busy],
        ):
            choice = chosen(asked, known)
            assert choice.id != place
            assert not choice.guessed


def test_a_guess_is_worth_a_longer_queue() -> None:
    """Whoever looks for a conversation at its place on the ring the next time has it there, so as much again may be
    waited for as it saves now; beyond that it goes elsewhere."""
    asked = market("session", elsewhere=0.9)
    place = Ring().walk(asked.ring_key, dict.fromkeys(IDS))[0]
    others = [candidate(id_, uncached_ms=2_000.0) for id_ in IDS if id_ != place]
    for pending_ms, goes in ((3_500.0, True), (4_500.0, False)):
        queue = candidate(place, uncached_ms=2_000.0, pending_ms=pending_ms)
        assert (chosen(asked, [*others, queue]).id == place) is goes


def test_waits_for_room_and_for_prefill_are_one() -> None:
    """Both go by at the same time."""
    asked = market(backlog=2.0)
    prices = [
        price_of(candidate(IDS[0], pending_ms=pending_ms, kv_wait_ms=kv_wait_ms), asked)
        for pending_ms, kv_wait_ms in ((900.0, 0.0), (0.0, 900.0), (900.0, 900.0), (900.0, 300.0))
    ]
    assert len(set(prices)) == 1


def test_a_short_conversation_stays_at_home_while_home_has_room() -> None:
    """In the band, whoever holds most of the prompt keeps it; over the load bound it does not."""
    asked = [market(f"session-{n}") for n in range(20)]
    home = candidate(IDS[2], cached_tokens=600, uncached_tokens=100, uncached_ms=30.0)
    others = [candidate(id_, uncached_tokens=700) for id_ in IDS[:2]]
    assert {chosen(q, [*others, home]).id for q in asked} == {IDS[2]}
    crowded = replace(home, in_flight=9)
    assert {chosen(q, [*others, crowded]).id for q in asked} == set(IDS[:2])


@pytest.mark.parametrize("field", ["pending_ms", "kv_wait_ms"])
def test_of_equal_holders_one_can_begin_first(field: str) -> None:
    """In the band, of those that hold as much of most of a prompt the one where least waits is taken, whatever it
    decodes within the load bound; where as much waits, the one with the fewest leases."""
    hot = candidate("", cached_tokens=8_000, uncached_tokens=800, uncached_ms=60.0, in_flight=20)
    for n in range(20):
        holders = [replace(hot, id=id_, **{field: 10.0 * (1 + (n + i) % 6)}) for i, id_ in enumerate(IDS)]
        soonest = IDS[-n % 6]
        busier = [replace(c, in_flight=23) if c.id == soonest else c for c in holders]
        assert chosen(market(f"session-{n}"), busier) == PolicyDecision(soonest, tied=True, rule="prefix_holder")
        crowded = [replace(c, in_flight=40) if c.id == soonest else c for c in holders]
        assert chosen(market(f"session-{n}"), crowded).id == IDS[(1 - n) % 6]
        alike = [replace(c, in_flight=19) if c.id == IDS[3] else c for c in (replace(hot, id=id_) for id_ in IDS)]
        assert chosen(market(f"session-{n}"), alike).id == IDS[3]


def test_a_router_takes_its_own_of_equal_holders_first() -> None:
    """Of those that hold as much and begin as soon a router's own go before others with two streams less, and not with
    three; where its own have to wait, another one is taken."""
    hot = candidate("", cached_tokens=8_000, uncached_tokens=800, uncached_ms=60.0, in_flight=20)
    holders = [replace(hot, id=id_, in_flight=22 if id_ == IDS[4] else 20) for id_ in IDS]
    asked = replace(market(), preferred_replicas=frozenset({IDS[4]}))
    assert chosen(asked, holders) == PolicyDecision(IDS[4], tied=True, rule="prefix_holder")
    assert chosen(market(), holders).id != IDS[4]
    for busier in ({"in_flight": 23}, {"pending_ms": 10.0}):
        some = [replace(c, **busier) if c.id == IDS[4] else c for c in holders]
        assert chosen(asked, some) == chosen(market(), some) != chosen(asked, holders)


def test_a_conversation_goes_home_in_the_band_only() -> None:
    """Whoever gave the last answer keeps the conversation, also when it holds little, while the price allows it."""
    questions = [market(f"session-{n}", home=IDS[1]) for n in range(20)]
    home, others = candidate(IDS[1], in_flight=1), [candidate(IDS[0]), candidate(IDS[2], cached_tokens=600)]
    assert {chosen(asked, [*others, home]).id for asked in questions} == {IDS[1]}
    for elsewhere in (replace(home, pending_ms=400.0), replace(home, in_flight=20)):
        assert IDS[1] not in {chosen(asked, [*others, elsewhere]).id for asked in questions}
    busy = [replace(c, in_flight=5) for c in [*others, home]]
    assert {chosen(asked, busy).id for asked in questions} == {IDS[1]}
    gone = [replace(asked, last_replica="http://gone") for asked in questions]
    assert len({chosen(asked, [candidate(id_) for id_ in IDS]).id for asked in gone}) > 2


def test_a_newcomer_goes_where_its_agent_s_words_let_it_be_expected() -> None:
    """In the band a prompt without a home goes to the expected replica, if no other one holds more of it and that is
    under the load bound; to its home before that."""
    expected = replace(market("session"), expected_replica=IDS[1])
    others = [candidate(IDS[0]), candidate(IDS[2])]
    for held in (0, 300, 600):
        there = candidate(IDS[1], cached_tokens=held, uncached_tokens=1_000 - held, in_flight=1)
        assert chosen(expected, [*others, there]) == PolicyDecision(IDS[1], tied=True, rule="predicted_replica")
        deeper = replace(others[0], cached_tokens=held + 500, uncached_tokens=500 - held)
        if held < 500:
            assert chosen(expected, [deeper, others[1], there]).id == IDS[0]
        assert chosen(replace(expected, last_replica=IDS[2]), [*others, there]).id == IDS[2]
        for elsewhere in (replace(there, in_flight=20), replace(there, pending_ms=400.0)):
            assert chosen(expected, [*others, elsewhere]).id != IDS[1]


def test_a_shared_system_prompt_does_not_pull_newcomers_together() -> None:
    """A replica that holds less than half of a short prompt is no home: the ring spreads conversations."""
    holder = candidate(IDS[0], cached_tokens=300, uncached_tokens=700, uncached_ms=70.0)
    candidates = [holder, *(candidate(id_) for id_ in IDS[1:])]
    counts = Counter(chosen(market(f"session-{n}"), candidates).id for n in range(200))
    assert len(counts) == len(IDS)
    assert counts[IDS[0]] < 100


def test_in_the_band_the_load_bound_holds() -> None:
    """Among equal prices nobody over the load bound is chosen while somebody in the band is under it, however little
    the others hold."""
    band = [candidate(IDS[0], cached_tokens=900, uncached_tokens=100, in_flight=50), candidate(IDS[1])]
    outside = candidate(IDS[2], pending_ms=1e6)
    best = {chosen(market(f"session-{n}"), [*band, outside]).id for n in range(50)}
    assert best == {IDS[1]}
