"""Which replicas take the legs of a request when some of them fail, rest, are full or too small."""

from __future__ import annotations

import pytest

from router.core.types.disagg_types import Role
from router.core.types.placements import EndReason, Outcome
from router.core.types.replicas import ServedModel
from tests.core.placement.paired import TOKENS, PairedFleet

ONE_EACH = {"p": Role.PREFILL, "d": Role.DECODE}


def broken() -> PairedFleet:
    """One prefill replica, whose breaker three failed legs have opened."""
    fleet = PairedFleet(ONE_EACH)
    fleet.streams("d")
    for seed in range(3):
        lease, _ = fleet.split(seed)
        fleet.prefilled(lease, ending=EndReason.FAILED)
        fleet.finish(lease, EndReason.CLIENT_LEFT)
    assert fleet.router.fleet.members["p"].breaker.backoff_s
    return fleet


def test_a_prefill_replica_comes_back_by_a_trial() -> None:
    """It gets no legs while its breaker is open, one at a time when its rest is over, and all again when that one went
    well."""
    fleet = broken()
    assert fleet.place(3).receipt.leg is None
    fleet.now_s += 1.5
    trial, _ = fleet.split(4)
    assert fleet.place(5).receipt.leg is None
    fleet.prefilled(trial)
    assert not fleet.router.fleet.members["p"].breaker.backoff_s
    assert fleet.split(6)[1].replica == "p"


def test_a_trial_that_fails_is_followed_by_a_longer_rest() -> None:
    """A second failure of a prefill replica keeps it away for twice as long."""
    fleet = broken()
    fleet.now_s += 1.5
    trial, _ = fleet.split(4)
    fleet.prefilled(trial, ending=EndReason.FAILED)
    fleet.finish(trial, EndReason.CLIENT_LEFT)
    fleet.now_s += 1.5
    assert fleet.place(5).receipt.leg is None
    fleet.now_s += 1.0
    assert fleet.split(6)[1].replica == "p"


def test_a_prefill_replica_with_too_short_a_context_gets_no_leg() -> None:
    """Its engine would refuse the prompt; one that says nothing of its context gets it."""
    fleet = PairedFleet({"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE})
    fleet.streams("d")
    fleet.router.observations.observe_models("p", [ServedModel("m", max_model_len_tokens=TOKENS // 2)])
    for seed in range(4):
        lease, leg = fleet.split(seed)
        assert leg.replica == "q"
        fleet.finish(lease, EndReason.CLIENT_LEFT)
    fleet.router.observations.observe_models("q", [ServedModel("m", max_model_len_tokens=TOKENS // 2)])
    assert fleet.place(5).receipt.leg is None
    assert fleet.split(6, TOKENS // 4)[1].replica in "pq"


@pytest.mark.parametrize("unseen", [False, True])
def test_the_work_of_a_request_is_that_of_its_prefill_leg(unseen: bool) -> None:
    """What requests take on average counts prompts that were computed elsewhere, whether their answers came by or
    not."""
    fleet = PairedFleet(ONE_EACH)
    fleet.streams("d")
    speeds = fleet.router.fleet.members["d"].speeds
    lease, leg = fleet.split(unseen=unseen)
    speeds.mean_work_ms = before = leg.uncached_ms
    fleet.now_s += 2.0
    if not unseen:
        fleet.prefilled(lease)
        fleet.router.first_token(lease, fleet.now_s)
    fleet.router.finish(lease, Outcome(EndReason.OK, unobserved=unseen), fleet.now_s)
    assert speeds.mean_work_ms == pytest.approx(before)


@pytest.mark.parametrize("ends", ["answer", "client leaves"])
def test_a_prompt_that_nobody_prefilled_waits_where_it_decodes(ends: str) -> None:
    """Once nothing comes of its prefill leg, its prefill is pending at the decoding replica, and keeps the streams
    there waiting, until the first token or the end; nothing is learned of transfers or speeds from it."""
    fleet = PairedFleet(ONE_EACH)
    fleet.streams("d")
    member, legs = fleet.router.fleet.members["d"], fleet.router.disaggregator.pairs
    before = (
        member.work.decoding,
        legs.model("p", "d", member.speeds.loads),
        member.own_speed.prefill_factor.observations,
    )
    lease, leg = fleet.split()
    fleet.now_s += 3.0
    leg.alone = True
    fleet.prefilled(lease, ending=EndReason.REFUSED_BY_ENGINE)
    whole_ms = member.prefill_model.ms(lease.prompt_tokens, 0)
    assert member.queue.pending_ms(fleet.now_s) == pytest.approx(whole_ms)
    fleet.now_s += whole_ms / 2e3
    assert member.queue.pending_ms(fleet.now_s) == pytest.approx(whole_ms / 2)
    assert (member.work.decoding, member.queue.computing) == (before[0], 1)
    if ends == "answer":
        fleet.router.first_token(lease, fleet.now_s)
        assert (member.queue.pending_ms(fleet.now_s), member.work.decoding, member.work.awaiting_transfer) == (
            0.0,
            before[0] + 1,
            set(),
        )
    fleet.finish(lease, EndReason.OK if ends == "answer" else EndReason.CLIENT_LEFT)
    assert (member.work.decoding, member.queue.count_waiting(), member.queue.computing) == (before[0], 0, 0)
    assert (legs.model("p", "d", member.speeds.loads), member.own_speed.prefill_factor.observations) == before[1:]
