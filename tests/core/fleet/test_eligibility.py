"""Who may be sent a request: breakers, rests, panic, slow start."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.breaker import BACKOFF_MIN_S, BREAKER_FAILURES, Cause, State
from router.core.fleet.eligibility import SLOW_START_LEASES
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.types.placements import EndReason, Outcome, Shed
from router.core.types.requests import RequestSpec
from tests.core import ready
from tests.core.work import interpreted, steps

IDS = ["http://a", "http://b", "http://c"]


router_of = partial(ready.router_of, policy="least_loaded")  # spreads requests evenly


def place(router: Router, now_s: float, *, only: str | None = None, exclude: frozenset[str] = frozenset()) -> Lease:
    """Place a small request."""
    return router.route(
        PlacementRequest(RequestSpec("m"), "m", None, "k", body_tokens=100), now_s, only=only, exclude=exclude
    )


@pytest.mark.promise("A request that fails by the client's own fault ejects no replica.", "faults")
def test_refused_requests_never_count() -> None:
    """10,000 times 400: nobody is out, and a breaker that is open does not close for that either."""
    router = router_of(IDS)
    for n in range(10_000):
        router.finish(place(router, n / 100), Outcome(EndReason.REFUSED_BY_ENGINE), n / 100)
    assert not router.fleet.restricted
    for _ in range(BREAKER_FAILURES):
        router.finish(place(router, 100.0, only=IDS[0]), Outcome(EndReason.FAILED), 100.0)
    trial = place(router, 102.0, only=IDS[0])
    router.finish(trial, Outcome(EndReason.REFUSED_BY_ENGINE), 102.0)
    assert router.fleet.members[IDS[0]].state(102.0) is State.HALF_OPEN


@pytest.mark.parametrize("ending", [EndReason.CLIENT_LEFT, EndReason.REFUSED_BY_ENGINE, EndReason.FAILED, EndReason.OK])
def test_a_trial_ends_whatever_its_end(ending: EndReason) -> None:
    """A trial whose client leaves makes room for the next; so does every other end."""
    router = router_of(IDS)
    breaker = router.fleet.members[IDS[0]].breaker
    for _ in range(BREAKER_FAILURES):
        router.finish(place(router, 0.0, only=IDS[0]), Outcome(EndReason.FAILED), 0.0)
    trial = place(router, 1.5, only=IDS[0])
    assert breaker.trial == trial.id
    assert {place(router, 1.5).replica for _ in range(10)} == set(IDS[1:])
    router.finish(trial, Outcome(ending), 1.6)
    assert breaker.trial is None
    assert breaker.allows(1.6 + 2 * BACKOFF_MIN_S)


def test_rests_are_kept() -> None:
    """A replica that asked for it gets nothing before its time, not even for want of others; when all rest, the
    client hears when the first of them is back. A rest is no failure."""
    router = router_of(IDS)
    router.rest(IDS[0], 10.0)
    router.rest("http://gone", 10.0)
    assert {place(router, 1.0).replica for _ in range(10)} == set(IDS[1:])
    router.rest(IDS[1], 7.0)
    router.rest(IDS[2], 30.0)
    router.rest(IDS[2], 20.0)  # the longer one counts
    for how in ({}, {"exclude": frozenset({IDS[2]})}):
        with pytest.raises(Shed) as shed:
            place(router, 5.0, **how)
        assert (shed.value.code, shed.value.retry_after_s) == ("overloaded", 2.0)
    with pytest.raises(Shed) as shed:
        place(router, 5.0, exclude=frozenset(IDS[:2]))
    assert shed.value.retry_after_s == 25.0
    assert place(router, 7.0).replica == IDS[1]
    assert router.fleet.members[IDS[2]].state(7.0) is State.RESTING
    assert router.fleet.members[IDS[2]].breaker.failures == 0
    place(router, 30.0)
    assert not router.fleet.restricted


def test_a_full_queue_is_tried_by_one_at_a_time() -> None:
    """A replica that rests since its queue was full gets nothing while there are others, and then one request at a
    time; one that asked for its rest still gets none."""
    router = router_of(IDS)
    router.rest(IDS[0], 10.0, full=True)
    assert {place(router, 1.0).replica for _ in range(10)} == set(IDS[1:])
    router.rest(IDS[1], 10.0, full=True)
    router.rest(IDS[2], 5.0)
    trials = [place(router, 2.0), place(router, 2.0, exclude=frozenset({IDS[2]}))]
    assert {trial.replica for trial in trials} == set(IDS[:2])
    with pytest.raises(Shed) as shed:
        place(router, 2.0)
    assert shed.value.retry_after_s == 3.0
    router.finish(trials[0], Outcome(EndReason.REFUSED_BY_ENGINE), 2.0)
    assert place(router, 2.0).replica == trials[0].replica
    router.rest(IDS[0], 12.0)
    router.rest(IDS[1], 12.0)
    router.finish(trials[1], Outcome(EndReason.OK), 2.0)
    with pytest.raises(Shed):
        place(router, 2.0)
    assert not any(member.breaker.failures for member in router.fleet.members.values())


def test_rests_outlast_panic() -> None:
    """With all others failing, one that asked to be left alone is left alone."""
    router = router_of(IDS)
    router.rest(IDS[0], 10.0)
    for id_ in IDS[1:]:
        for _ in range(BREAKER_FAILURES):
            router.finish(place(router, 0.0, only=id_), Outcome(EndReason.FAILED), 0.0)
    assert {place(router, 0.1).replica for _ in range(10)} == set(IDS[1:])
    assert router.fitness.panics >= 10


def test_checks_without_an_answer_are_no_outage() -> None:
    """When health checks of all replicas time out requests still go there; not to one that refuses connections, nor to
    one that says itself it cannot serve, nor to any while one is fit."""
    router = router_of(IDS)
    for id_ in IDS[:2]:
        for _ in range(2):
            router.fleet.observe_health(id_, False, "no answer in time", silent=True)
    assert {place(router, 1.0).replica for _ in range(5)} == {IDS[2]}
    router.fleet.observe_health(IDS[2], False, "connection refused", proof=True)
    assert router.models.resolve("m") == router.models.resolve(None) == "m"
    assert {place(router, 1.0).replica for _ in range(10)} == set(IDS[:2])
    assert router.fitness.panics == 10
    assert router.fleet.ready() == []
    for model in ("m", None):
        assert [member.id for member in router.disaggregator.filter_prefilling(model, None, False, 1.0)] == IDS[:2]
    router.fleet.observe_health(IDS[0], False, "/health: status 503")
    assert {place(router, 1.0).replica for _ in range(10)} == {IDS[1]}
    router.fleet.observe_health(IDS[1], False, "connection refused", proof=True)
    with pytest.raises(NoReplicaReady):
        place(router, 1.0)
    router.fleet.observe_health(IDS[0], True)
    assert place(router, 2.0).replica == IDS[0]


def test_an_outage_is_over_with_the_first_answer() -> None:
    """With all breakers open for 30 seconds, one answer is enough: its replica gets everything from then on."""
    router = router_of(IDS, slow_start_s=10.0)
    now_s = 0.0
    for _ in range(12):
        for id_ in IDS:
            for _ in range(BREAKER_FAILURES):
                router.finish(place(router, now_s, only=id_), Outcome(EndReason.FAILED), now_s)
        now_s += 30.0
    now_s -= 29.0
    assert all(m.breaker.until_s > now_s + 20 for m in router.fleet.members.values())
    first = place(router, now_s)
    router.finish(first, Outcome(EndReason.OK), now_s + 0.1)
    assert {place(router, now_s + 0.2).replica for _ in range(20)} == {first.replica}


def test_slow_start() -> None:
    """A replica that was out gets a request at once, and then as its age allows; one that is new does not start
    slowly, since it is not alone in that."""
    router = router_of(IDS, slow_start_s=10.0)
    assert {place(router, 0.0).replica for _ in range(30)} == set(IDS)
    for lease in list(router.fleet.members[IDS[0]].leases.values()):
        router.finish(lease, Outcome(EndReason.CLIENT_LEFT), 1.0)
    router.fleet.observe_health(IDS[0], False, "connection refused", proof=True)
    router.fleet.observe_health(IDS[0], True)
    assert place(router, 2.0).replica == IDS[0]
    assert {place(router, 2.0).replica for _ in range(5)} == set(IDS[1:])
    held = []
    for age_s in (2.0, 5.0, 9.9):
        for _ in range(40):
            place(router, 2.0 + age_s)
        peers = [len(router.fleet.members[id_].leases) for id_ in IDS[1:]]
        held.append(len(router.fleet.members[IDS[0]].leases))
        assert held[-1] <= 1 + age_s / 10 * (sum(peers) / 2 + SLOW_START_LEASES) + 1
    assert held == sorted(set(held))
    for _ in range(200):
        place(router, 12.1)
    assert len(router.fleet.members[IDS[0]].leases) >= max(peers)
    assert not router.fleet.restricted


def test_the_only_one_starts_at_once() -> None:
    """With nobody else there a replica that came back takes everything."""
    router = router_of(IDS[:1], slow_start_s=10.0)
    router.fleet.observe_health(IDS[0], False, proof=True)
    router.fleet.observe_health(IDS[0], True)
    assert [place(router, 1.0).replica for _ in range(10)] == IDS[:1] * 10


STEPS = st.tuples(
    st.sampled_from(
        ["place", "place", "ok", "failed", "refused", "left", "token", "rest", "trip", "down", "silent", "up"]
    ),
    st.integers(0, 5),
    st.integers(0, 200).map(lambda n: n / 100),
)
ENDINGS = {
    "ok": EndReason.OK,
    "failed": EndReason.FAILED,
    "refused": EndReason.REFUSED_BY_ENGINE,
    "left": EndReason.CLIENT_LEFT,
}


@given(st.lists(STEPS, max_size=80), st.sampled_from([0.0, 5.0]))
@settings(deadline=None)
def test_whatever_happens_somebody_serves(steps: list[tuple[str, int, float]], slow_start_s: float) -> None:
    """In any history: who rests gets nothing; who is open gets nothing while another is closed and awake; a half-open
    one has one trial at a time; a request is placed unless all rest or none is there; guards go when all is well."""
    router, now_s = router_of(IDS, slow_start_s=slow_start_s), 0.0
    members, open_ = router.fleet.members, list[Lease]()
    for action, which, gap_s in steps:
        now_s += gap_s
        id_ = IDS[which % 3]
        if action == "place":
            _place_and_check(router, open_, now_s)
        elif action in ENDINGS and open_:
            router.finish(open_.pop(which % len(open_)), Outcome(ENDINGS[action]), now_s)
        elif action == "token" and open_:
            router.first_token(open_[which % len(open_)], now_s)
        elif action == "rest":
            router.rest(id_, now_s + 3.0)
        elif action == "trip":
            router.fitness.trip(members[id_], Cause.STUCK, "said so", now_s)
        elif action in ("down", "silent", "up"):
            router.fleet.observe_health(id_, action == "up", proof=action == "down", silent=action == "silent")
        for member in members.values():
            assert member.breaker.trial is None or member.breaker.trial in member.leases
    for lease in open_:
        router.finish(lease, Outcome(EndReason.OK), now_s)
    for id_ in IDS:
        router.fleet.observe_health(id_, True)
        router.finish(place(router, now_s + 40.0, only=id_), Outcome(EndReason.OK), now_s + 40.0)
        router.first_token(
            lease := router.route(
                PlacementRequest(RequestSpec("m", stream=True), "m", None, ""), now_s + 40.0, only=id_
            ),
            now_s + 40.1,
        )
        router.finish(lease, Outcome(EndReason.OK), now_s + 40.2)
    place(router, now_s + 60.0)
    assert not router.fleet.restricted


def _place_and_check(router: Router, open_: list[Lease], now_s: float) -> None:
    members = router.fleet.list_serving("m")
    awake = [m for m in members if m.restrictions.rest_until_s <= now_s]
    back = set(router.fleet.returned)
    allowed = {m.id for m in awake if m.breaker.allows(now_s) or m.id in back}
    try:
        lease = place(router, now_s)
    except Shed:
        assert members
        assert not awake
        return
    except NoReplicaReady:
        assert not members
        return
    open_.append(lease)
    assert lease.replica in (allowed or {m.id for m in awake})


def fail(router: Router, id_: str, now_s: float, times: int, ending: EndReason = EndReason.FAILED) -> None:
    """So many requests of this replica end so."""
    for _ in range(times):
        router.finish(place(router, now_s, only=id_), Outcome(ending), now_s)


def test_a_fleet_that_is_down_is_not_asked_twice() -> None:
    """With all breakers open a first attempt is made, a retry is not; but one that answered within the last second, or
    that could only not be reached in time, is worth one."""
    router, retry = router_of(IDS), frozenset(IDS[:1])
    for id_ in IDS:
        fail(router, id_, 100.0, BREAKER_FAILURES)
    assert place(router, 100.5).replica in IDS
    with pytest.raises(NoReplicaReady):
        place(router, 100.5, exclude=retry)
    router.fleet.members[IDS[1]].evidence.alive_s = 100.0
    assert place(router, 100.5, exclude=retry).replica == IDS[1]
    router = router_of(IDS)
    for id_, ending in zip(IDS, (EndReason.FAILED, EndReason.FAILED, EndReason.UNREACHED), strict=True):
        fail(router, id_, 100.0, BREAKER_FAILURES, ending)
    assert place(router, 100.5, exclude=retry).replica == IDS[2]
    fail(router, IDS[2], 100.5, 1)  # reached, and it failed
    with pytest.raises(NoReplicaReady):
        place(router, 100.6, exclude=retry)


def test_a_retry_goes_to_whoever_has_not_just_failed() -> None:
    """A replica with a failure to its name gives way to one without, before any breaker opens."""
    router = router_of(IDS)
    fail(router, IDS[1], 100.0, 1)
    assert {place(router, 100.1, exclude=frozenset(IDS[:1])).replica for _ in range(10)} == {IDS[2]}
    assert place(router, 100.1, exclude=frozenset((IDS[0], IDS[2]))).replica == IDS[1]


def many(count: int, *, back: bool) -> Router:
    """So many replicas with an open lease each; with `back` all of their checks failed, and all came back."""
    router = router_of([f"http://{n}" for n in range(count)], slow_start_s=10.0)
    for _ in range(count):
        place(router, 0.0)
    for ok in (False, True) if back else ():
        for id_ in router.fleet.members:
            router.fleet.observe_health(id_, ok, proof=not ok)
    place(router, 1.0)
    return router


@interpreted
def test_a_blip_of_all_checks_costs_no_more_than_twice() -> None:
    """While all of 256 replicas start slowly a placement is at most twice the work that it is usually, and grows no
    faster than the fleet."""

    def spent(count: int, *, back: bool) -> int:
        router = many(count, back=back)
        assert len(router.fleet.restricted) == count * back
        return steps(lambda: place(router, 3.0))

    usual, blip = spent(256, back=False), spent(256, back=True)
    assert blip < 2 * usual
    assert blip < 4.5 * spent(64, back=True)


@interpreted
def test_who_is_still_guarded_is_not_looked_at_again_and_again() -> None:
    """As long as no time is up nothing is done about guards, be they 20 or 400; when one is, only about that."""

    def spent(count: int) -> tuple[int, int]:
        router = many(count, back=True)
        router.rest("http://7", 1.0 + 10.0 - 1.0)
        router.fleet.members["http://7"].restrictions.slow_start_at_s = 0.0
        router.fitness.slow_start_s = 10.0
        nothing = steps(lambda: router.fitness._forget(5.0))
        before = len(router.fleet.restricted)
        something = steps(lambda: router.fitness._forget(10.5))
        assert before - len(router.fleet.restricted) == 1
        return nothing, something

    (few, one), (nothing, other) = spent(20), spent(400)
    assert nothing == few
    assert other < 1.1 * one


def test_another_slow_start_counts_from_now_on() -> None:
    """Members that start slowly stop when the setting says so, sooner or later than was thought."""
    for slow_start_s, at_s, left in ((2.0, 4.0, 0), (30.0, 12.0, 3), (30.0, 32.0, 0)):
        router = router_of(IDS, slow_start_s=10.0)
        for ok in (False, True):
            for id_ in IDS:
                router.fleet.observe_health(id_, ok, proof=not ok)
        place(router, 1.0)
        router.configure(slow_start_s=slow_start_s, stall_timeout_s=3.0)
        place(router, at_s)
        assert len(router.fleet.restricted) == left
