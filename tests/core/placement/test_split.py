"""When one replica is to prefill what another one decodes, which two, and what becomes of both leases."""

from __future__ import annotations

import pytest

from router.core.disagg.pairs import PAIR_REST_S
from router.core.estimators.tier_load import LoadModel
from router.core.fleet import stall_detector
from router.core.fleet.models import NoReplicaReady
from router.core.insights.breakdown import Explainer
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason, Outcome, PlacementReason, Usage
from router.core.types.replicas import Load
from tests.core.placement.paired import APART, TOKENS, TRANSFER, PairedFleet

BOTH = dict.fromkeys("abcd", Role.BOTH)


def busy(roles: dict[str, Role] = APART) -> PairedFleet:
    """A fleet where answers go on at all replicas that decode."""
    fleet = PairedFleet(roles)
    fleet.streams(*[name for name, role in roles.items() if role is not Role.PREFILL])
    return fleet


def test_a_long_prompt_is_prefilled_where_it_interrupts_nobody() -> None:
    """Streams go on wherever the answer could decode, so the prompt is prefilled apart; the receipt says by whom."""
    fleet = busy()
    lease, leg = fleet.split()
    assert (lease.replica in "de", leg.replica in "pq", lease.receipt.reason) == (True, True, PlacementReason.SPLIT)
    assert (leg.connector, leg.address) == (KvConnector.NIXL, f"{leg.replica}:8998")
    assert leg.transfer_ms == pytest.approx(TRANSFER.ms(lease.prompt_tokens))
    assert lease.expected_ms == pytest.approx(leg.uncached_ms + leg.transfer_ms)
    prefill = fleet.router.disaggregator.pairs.open[lease.id]
    assert (prefill.id, prefill.role, lease.role) == (leg.lease, "prefill", "decode")
    assert fleet.router.fleet.members[leg.replica].queue.pending_ms(fleet.now_s) == pytest.approx(leg.uncached_ms)
    assert fleet.router.fleet.members[lease.replica].queue.pending_ms(fleet.now_s) == 0.0


def test_one_leg_where_nothing_is_won() -> None:
    """A short prompt, one that is nearly all cached where its answer decodes, and one that finds a replica at which
    nobody decodes, go in one leg."""
    fleet = busy()
    assert fleet.place(1, 200).receipt.leg is None
    home = fleet.serve(2)
    fleet.now_s += 1.0
    again = fleet.place(2, TOKENS + 200)
    assert (again.receipt.leg, again.replica) == (None, home.replica)
    assert PairedFleet().place().receipt.leg is None


def test_a_queue_before_the_prefill_is_an_end_to_it() -> None:
    """Once prompts wait where they are prefilled apart, others are computed where they are decoded."""
    fleet = busy()
    legs = [fleet.place(seed).receipt.leg for seed in range(12)]
    assert {leg.replica for leg in legs if leg is not None} == {"p", "q"}
    assert legs[0] is not None
    assert any(leg is None for leg in legs)


def test_a_slow_way_is_left_alone() -> None:
    """Where the transfer takes longer than it saves, one replica does both."""
    fleet = busy()
    fleet.router.fleet.means.load_guesses["leg"] = LoadModel(60_000.0, 0.0)
    assert fleet.place().receipt.leg is None


def test_only_those_that_decode_take_whole_requests() -> None:
    """A replica that only prefills takes one only where nobody else may."""
    fleet = PairedFleet()
    assert {fleet.place(seed, 500, may_split=False).replica for seed in range(20)} == {"d", "e"}
    assert fleet.place(0, 500, may_split=False, exclude=frozenset("de")).replica in "pq"
    assert fleet.place(0, 500, only="p").replica == "p"
    with pytest.raises(NoReplicaReady):
        fleet.place(0, 500, exclude=frozenset("pqde"))


def test_a_request_that_may_not_be_split_is_not() -> None:
    """Nor is one that belongs to one replica."""
    fleet = busy()
    assert fleet.place(may_split=False).receipt.leg is None
    assert fleet.place(only="d").receipt.leg is None


def test_replicas_that_do_everything_prefill_for_each_other() -> None:
    """Where one of them has no streams and little room for another one, it prefills for those that have."""
    fleet = PairedFleet(BOTH)
    fleet.streams("a", "b", "c", count=12)
    fleet.streams("d", count=1)
    fleet.router.observations.observe_load("d", Load(kv_tokens_max=30_000, block_tokens=16, kv_usage=0.9))
    lease = fleet.place(0, 2_500)
    leg = lease.receipt.leg
    assert leg is None or leg.replica != lease.replica


def test_both_caches_hold_the_prompt_afterwards() -> None:
    """The prefill replica has computed it and the decode replica was sent it, the answer behind it."""
    fleet = busy()
    lease = fleet.serve()
    leg = lease.receipt.leg
    assert leg is not None
    blocks = len(lease.prompt.keys)
    assert fleet.depth(leg.replica) == fleet.depth(lease.replica) == blocks
    for lease_ in list(fleet.router.fleet.members["d"].leases.values()):
        fleet.finish(lease_)
    for lease_ in list(fleet.router.fleet.members["e"].leases.values()):
        fleet.finish(lease_)
    assert fleet.idle()


@pytest.mark.parametrize("order", ["prefill first", "answer first", "never told", "client leaves", "prefill fails"])
def test_leases_end_in_any_order(order: str) -> None:
    """Whatever is told first, or never: nothing is left, and what was not computed is not held."""
    fleet = busy()
    lease, leg = fleet.split()
    if order == "prefill first":
        fleet.prefilled(lease)
    if order == "prefill fails":
        fleet.prefilled(lease, ending=EndReason.FAILED)
    elif order != "client leaves":
        fleet.router.first_token(lease, fleet.now_s + 1.0)
    left = order in {"client leaves", "prefill fails"}
    fleet.finish(lease, EndReason.CLIENT_LEFT if left else EndReason.OK)
    fleet.prefilled(lease)
    fleet.finish(lease)
    held = fleet.depth(leg.replica), fleet.depth(lease.replica)
    assert held == ((0, 0) if left else (len(lease.prompt.keys),) * 2)
    for name in "de":
        for each in list(fleet.router.fleet.members[name].leases.values()):
            fleet.finish(each)
    assert fleet.idle()


def test_an_answer_that_does_not_stream_decodes_from_the_end_of_its_prefill() -> None:
    """Nothing is seen of it before its end, so it counts among those that decode once its prompt is there."""
    fleet = PairedFleet()
    fleet.streams("d", "e")
    lease, _ = fleet.split(stream=False)
    member = fleet.router.fleet.members[lease.replica]
    before = member.work.decoding
    fleet.prefilled(lease)
    assert member.work.decoding == before + 1
    fleet.finish(lease)
    assert member.work.decoding == before


def test_an_answer_that_nobody_sees_ends_its_prefill_by_the_clock() -> None:
    """At a gateway's picker most answers do not come by: the prefill is over when it should be, and the lease with the
    answer."""
    fleet = busy()
    lease, leg = fleet.split(unseen=True)
    member = fleet.router.fleet.members[leg.replica]
    fleet.now_s += leg.uncached_ms / 1e3 + 0.1
    assert (member.queue.pending_ms(fleet.now_s), len(member.leases)) == (0.0, 1)
    fleet.router.finish(lease, Outcome(EndReason.OK, unobserved=True), fleet.now_s)
    assert (len(member.leases), fleet.depth(leg.replica)) == (0, len(lease.prompt.keys))


def test_the_prefill_replica_is_blamed_for_its_leg() -> None:
    """Its failures open its own breaker and not that of the replica that would have decoded, and a retry leaves it out;
    the other way round likewise."""
    fleet = busy()
    for _ in range(20):
        lease = fleet.place()
        leg = lease.receipt.leg
        if leg is None or leg.replica == "q":
            fleet.finish(lease, EndReason.CLIENT_LEFT)
            breaker = fleet.router.fleet.members["q"].breaker
            breaker.backoff_s, breaker.until_s = 60.0, fleet.now_s + 60.0
            continue
        fleet.prefilled(lease, ending=EndReason.FAILED)
        fleet.finish(lease, EndReason.CLIENT_LEFT)
        members = fleet.router.fleet.members
        if members["p"].breaker.backoff_s:
            break
    assert members["p"].breaker.backoff_s
    assert not any(members[name].breaker.failures for name in "de")
    members["q"].breaker.backoff_s = 0.0
    lease, leg = fleet.split(exclude=frozenset("p"))
    assert (leg.replica, lease.receipt.reason) == ("q", PlacementReason.RETRY)
    fleet.finish(lease, EndReason.FAILED)
    assert (members[lease.replica].breaker.failures, members["q"].breaker.failures) == (1, 0)


def test_a_decode_leg_is_late_from_the_end_of_its_prefill_on() -> None:
    """While another replica prefills, silence says nothing of the one that decodes; afterwards it does."""
    fleet = busy()
    lease, leg = fleet.split()
    members = fleet.router.fleet.members
    members["d"].speeds.prefill.observations = 100
    assert not stall_detector.is_late(members[lease.replica], lease, fleet.now_s + 500.0, 3.0)
    assert stall_detector.is_late(
        members[leg.replica], fleet.router.disaggregator.pairs.open[lease.id], fleet.now_s + 500.0, 3.0
    )
    fleet.now_s += 5.0
    fleet.prefilled(lease)
    assert stall_detector.is_late(members[lease.replica], lease, fleet.now_s + 500.0, 3.0)


# What is learned


def test_transfers_are_learned_for_each_pair() -> None:
    """40 answers show each of two pairs to within 10 %, one four times slower than the other; and nothing of how fast
    the decoding replica prefills."""
    fleet = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE})
    truths = {"d": LoadModel(30.0, 0.008), "e": LoadModel(120.0, 0.032)}
    for seed in range(1, 81):
        streams = fleet.streams("de"[seed % 2], count=3) + fleet.streams("de"[1 - seed % 2], count=9)
        lease, leg = fleet.split(seed)
        fleet.now_s += leg.uncached_ms / 1e3
        fleet.prefilled(lease)
        fleet.now_s += truths[lease.replica].ms(lease.prompt_tokens) / 1e3
        fleet.router.first_token(lease, fleet.now_s)
        for each in [lease, *streams]:
            fleet.finish(each)
        fleet.now_s += 10.0
    legs, members = fleet.router.disaggregator.pairs, fleet.router.fleet.members
    for name, truth in truths.items():
        assert legs.model("p", name, members[name].speeds.loads).ms(TOKENS) == pytest.approx(truth.ms(TOKENS), rel=0.1)
        assert members[name].own_speed.longest_tokens < TOKENS
    assert members["p"].own_speed.prefill_factor.observations > 0


def test_what_prefill_legs_compute_is_remembered_as_the_longest() -> None:
    """Others' prompts are believed to be as long as those of late, in however many legs they went: a replica that
    serves other routers, too, is not taken for dead while it computes such a one."""
    fleet = busy()
    for seed in range(200):
        fleet.serve(seed)
    assert fleet.router.fleet.members["d"].speeds.longest_tokens > 0.95 * TOKENS


def test_a_first_token_in_two_legs_is_foretold_apart() -> None:
    """Predictions of one leg learn nothing from two, nor the reverse."""
    fleet = busy()
    speeds = fleet.router.fleet.members["d"].speeds
    whole = speeds.first_tokens.seen
    fleet.serve()
    assert (speeds.first_tokens.seen - whole, speeds.first_tokens_split.seen) == (1, 1)  # the prefill leg's own


def test_a_replica_that_prefills_keeps_its_price_of_one_leg() -> None:
    """Among the candidates of a receipt each has the price of doing both, whichever of them prefills: the same for four
    that are alike."""
    fleet = PairedFleet(dict.fromkeys("pqde", Role.BOTH), pair=False)
    fleet.pair(KvConnector.SGLANG)
    lease, leg = fleet.split()
    prices_ms = {each.id: each.price_ms for each in lease.receipt.candidates}
    assert (leg.replica in prices_ms, len(prices_ms), len(set(prices_ms.values()))) == (True, 4, 1)


def test_the_prefill_legs_count_is_the_truth() -> None:
    """What the decoding engine counts as cached may have come from elsewhere: it proves nothing, and disproves
    nothing."""
    fleet = busy()
    for seed in range(5):
        fleet.serve(seed)
    for name in "de":
        assert fleet.router.fleet.members[name].own_speed.longest_tokens < TOKENS
    told = Usage(1_000, 50, 999)
    assert told.with_prefill_hits(Usage(1_000, 1, 300)) == Usage(1_000, 50, 300)
    assert told.with_prefill_hits(None) == Usage(1_000, 50, None)


def test_tokens_land_in_one_place_each() -> None:
    """The breakdown is of what the prefilling replica holds, whatever the decoding one has: the first time all is new
    or cold, the second time what the same replica holds is a hit, and hits and misses add up."""
    fleet = PairedFleet(explainer=Explainer(10_000, replay_window_s=0.0))
    fleet.streams("d", "e")
    lease, leg = fleet.split()
    miss = lease.receipt.miss
    assert miss is not None
    assert (miss.hit, miss.hit + sum(miss.misses.values())) == (0, lease.prompt_tokens)
    fleet.now_s += leg.uncached_ms / 1e3
    fleet.prefilled(lease)
    fleet.finish(lease, EndReason.CLIENT_LEFT)  # the decoding replica has not come to it
    again, other = fleet.split()
    miss = again.receipt.miss
    assert miss is not None
    assert (other.replica, other.cached_tokens) == (leg.replica, miss.hit)
    assert miss.hit == again.receipt.predicted_cached_tokens > 0.9 * TOKENS
    assert miss.hit + sum(miss.misses.values()) == again.prompt_tokens


def test_a_pair_that_broke_rests_until_it_is_warmed() -> None:
    """A request whose blocks did not come over a warm pair tells of it: the pair takes no further ones, others do, and
    it is warmed again when it has rested; many requests that tell of one break have it rest no longer than one."""
    fleet = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE})
    router, members = fleet.router, fleet.router.fleet.members
    for _ in range(20):
        router.disaggregator.pair_broke("p", "d", now_s=fleet.now_s)
    assert not router.disaggregator.pairs.is_warm(members["p"], members["d"])
    assert router.disaggregator.pairs.is_warm(members["p"], members["e"])
    assert router.disaggregator.pairs_to_warm(fleet.now_s + PAIR_REST_S - 0.1) == []
    assert router.disaggregator.pairs_to_warm(fleet.now_s + PAIR_REST_S) == [("p", "d")]
    router.disaggregator.pair_broke("p", "d", now_s=fleet.now_s)  # of a request from before
    router.disaggregator.pair_warmed("p", "d", ok=True, now_s=fleet.now_s + PAIR_REST_S)
    assert router.disaggregator.pairs.is_warm(members["p"], members["d"])
    router.disaggregator.pair_broke("x", "d", now_s=fleet.now_s)


def test_the_last_pair_of_sglangs_goes_on() -> None:
    """Its servers take no request in one leg, so a pair that may be broken is better than none."""
    fleet = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}, pair=False)
    fleet.pair(KvConnector.SGLANG)
    legs, members = fleet.router.disaggregator.pairs, fleet.router.fleet.members
    for name in "de":
        fleet.router.disaggregator.pair_broke("p", name, now_s=fleet.now_s)
    assert [legs.is_warm(members["p"], members[name]) for name in "de"] == [False, True]
    fleet.router.disaggregator.pair_warmed("p", "d", ok=True, now_s=fleet.now_s)
    for _ in range(3):
        fleet.router.fleet.observe_health("d", ok=False)
    assert not members["d"].ready
    fleet.router.disaggregator.pair_broke("p", "e", now_s=fleet.now_s)
    assert legs.is_warm(members["p"], members["e"])
