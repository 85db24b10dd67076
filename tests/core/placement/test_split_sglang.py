"""Requests to SGLang's servers that prefill or decode, which take none in one leg."""

from __future__ import annotations

import pytest

from router.core.disagg import pairs
from router.core.fleet.breaker import Cause
from router.core.fleet.models import NoReplicaReady
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason, Outcome, Shed
from tests.core.placement.paired import APART, PairedFleet


def sglang(roles: dict[str, Role], *, warm: bool = True) -> PairedFleet:
    """Servers by their roles; one that does everything shakes no hands."""
    fleet = PairedFleet(roles, pair=False)
    for name, role in roles.items():
        if role is not Role.BOTH:
            fleet.router.disaggregator.set_connector(name, KvConnector.SGLANG, f"{name}:8998")
    while warm and (pairs := fleet.router.disaggregator.pairs_to_warm(fleet.now_s)):
        for pair in pairs:
            fleet.router.disaggregator.pair_warmed(*pair, ok=True, now_s=fleet.now_s)
    return fleet


MIXED = {"p": Role.PREFILL, "d": Role.DECODE, "w": Role.BOTH}


def test_a_whole_server_takes_what_no_pair_does() -> None:
    """While the pair is cold, and while the prefill replica rests, all go to the server that takes whole requests,
    though the other one that decodes is cheaper; and to the pair again once it is there."""
    fleet = sglang(MIXED, warm=False)
    leases = [fleet.place(seed, 500) for seed in range(8)]
    assert {lease.replica for lease in leases} == {"w"}
    for pair in fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
        fleet.router.disaggregator.pair_warmed(*pair, ok=True, now_s=fleet.now_s)
    assert {fleet.place(seed, 500).replica for seed in range(8, 40)} == {"w", "d"}
    fleet.router.rest("p", fleet.now_s + 10.0)
    assert {fleet.place(seed, 500).replica for seed in range(40, 60)} == {"w"}


def test_a_request_may_be_split_at_its_next_attempt() -> None:
    """That one attempt found no pair says nothing of the next."""
    fleet = sglang(MIXED, warm=False)
    wanted = fleet.wanted(1, 500)
    assert fleet.router.route(wanted, fleet.now_s).replica == "w"
    assert wanted.may_split


def test_a_full_prefill_replica_is_better_than_none() -> None:
    """Replicas that are full are passed over for the prefill leg while there are others, and taken where there are
    none."""
    fleet = sglang(APART)
    assert {fleet.split(seed, full={"p"})[1].replica for seed in range(6)} == {"q"}
    assert fleet.split(7, full={"p", "q"})[1].replica in "pq"


def test_resting_prefill_replicas_are_waited_for() -> None:
    """Where all of them asked for a rest, the client is told when it ends, as for any other replica."""
    fleet = sglang(APART)
    for name, after_s in (("p", 20.0), ("q", 10.0)):
        fleet.router.rest(name, fleet.now_s + after_s)
    with pytest.raises(Shed) as shed:
        fleet.place()
    assert shed.value.retry_after_s == pytest.approx(10.0)
    fleet.now_s += 10.0
    assert fleet.split()[1].replica == "q"


def test_prefill_replicas_that_failed_are_better_than_none() -> None:
    """Where the breakers of all of them are open they get requests, and a retry does not."""
    fleet = sglang(APART)
    for name in "pq":
        member = fleet.router.fleet.members[name]
        fleet.router.fitness.trip(member, Cause.FAILURES, "for a test", fleet.now_s)
    assert fleet.split()[1].replica in "pq"
    with pytest.raises(NoReplicaReady):
        fleet.place(1, exclude=frozenset("e"))


def test_decode_replicas_that_failed_are_better_than_none() -> None:
    """Servers that prefill cannot stand in for them: it is a panic, as in any other fleet."""
    fleet = sglang(APART)
    for name in "de":
        member = fleet.router.fleet.members[name]
        fleet.router.fitness.trip(member, Cause.FAILURES, "for a test", fleet.now_s)
    lease, _ = fleet.split()
    assert (lease.replica in "de", fleet.router.fitness.panics) == (True, 1)
    fleet.router.finish(lease, Outcome(EndReason.CLIENT_LEFT), fleet.now_s)


@pytest.mark.parametrize("why", ["open", "slow start"])
def test_who_only_prefills_does_not_take_the_place_of_who_decodes(why: str) -> None:
    """With vLLM's engines they take whole requests where all others fail, and none while others start slowly."""
    fleet = PairedFleet(APART, slow_start_s=60.0)
    if why == "open":
        for name in "de":
            fleet.router.fitness.trip(fleet.router.fleet.members[name], Cause.FAILURES, "for a test", fleet.now_s)
    else:
        fleet.discover()
        for name in "de":
            for ok in (False, False, False, False, True, True, True):
                fleet.router.fleet.observe_health(name, ok=ok)
    found = {fleet.place(seed, 500, may_split=False).replica for seed in range(40)}
    assert found == (set("pq") if why == "open" else set("de"))


def test_any_warm_pair_is_found() -> None:
    """One warm pair among many replicas, however dear: each other pair of the ten prefillers and ten decoders is
    cold."""
    roles = {f"p{n}": Role.PREFILL for n in range(10)} | {f"d{n}": Role.DECODE for n in range(10)}
    fleet = sglang(roles, warm=False)
    while pairs := fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
        for pair in pairs:
            fleet.router.disaggregator.pair_warmed(*pair, ok=pair == ("p9", "d9"), now_s=fleet.now_s)
    for seed in range(6):
        lease, leg = fleet.split(seed, 2_000)
        assert (leg.replica, lease.replica) == ("p9", "d9")


@pytest.mark.parametrize("why", ["idle", "full", "resting", "tripped", "tried"])
def test_what_goes_whole_goes_to_no_half_of_a_pair(why: str) -> None:
    """Whatever is wrong with the server that takes whole requests: the others would refuse them all."""
    fleet = sglang(MIXED)
    how = {"full": {"full": {"w"}}, "tried": {"exclude": frozenset("w")}}.get(why, {})
    if why == "resting":
        fleet.router.rest("w", fleet.now_s + 10.0)
    elif why == "tripped":
        fleet.router.fitness.trip(fleet.router.fleet.members["w"], Cause.STUCK, "", fleet.now_s)
    try:
        assert fleet.place(may_split=False, **how).replica == "w"
    except (NoReplicaReady, Shed):
        assert why in ("resting", "tried")


@pytest.mark.inside
def test_in_a_large_fleet_a_pair_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica is a pair with few others of many: the best ones for either leg need not be pairs, and yet no
    request is turned away while all are up."""
    monkeypatch.setattr(pairs, "PAIRS_MAX", 80)
    prefill, decode = ([f"{leg}{n}" for n in range(40)] for leg in "pd")
    fleet = sglang(dict.fromkeys(prefill, Role.PREFILL) | dict.fromkeys(decode, Role.DECODE))
    for seed in range(200):
        assert fleet.place(seed, 500 + 100 * (seed % 7)).receipt.leg is not None
        fleet.now_s += 0.01
