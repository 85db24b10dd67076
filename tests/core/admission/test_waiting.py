"""Who waits, for how long, and in whose turn."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.config.schema import AdmissionSettings
from router.core.admission.concurrency_windows import ConcurrencyLimiter, DequeueRate
from router.core.admission.queue import Ticket
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import chain_of
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.replicas import Replica, ServedModel
from router.core.types.requests import Priority
from tests.core.admission.fleet import Fleet, want
from tests.core.placement.placing import MODEL, chat
from tests.support.examples import examples
from tests.support.patient import Patient


def test_a_queue_of_none_turns_away_at_once() -> None:
    """queue_requests_max 0: 429 while the fleet is full, with a time to come again."""
    fleet = Fleet(in_flight_max=1, queue_requests_max=0)
    fleet.ask()
    (shed,) = fleet.ask()
    assert (shed.code, shed.retry_after_s >= 1) == ("overloaded", True)


def test_bytes_are_bounded() -> None:
    """Bodies that wait are no more than queue_bytes_max together."""
    fleet = Fleet(in_flight_max=1, queue_bytes_max=100)
    fleet.ask()
    assert fleet.ask(size=60) == []
    assert isinstance(fleet.ask(size=41)[0], Shed)
    assert fleet.ask(size=40) == []
    assert fleet.admission.count_queued()[1] == 100


def test_limits_can_be_changed_while_some_wait() -> None:
    """New limits count from then on; who waited goes on waiting, or gets the room there is now."""
    fleet = Fleet(in_flight_max=1)
    fleet.ask()
    waits = [fleet.ask() for _ in range(3)]
    fleet.admission.configure(AdmissionSettings(in_flight_max=3))
    fleet.admission.tick()
    assert [len(each) for each in waits] == [1, 1, 0]


def test_a_tenant_with_its_share_waits_while_others_are_about() -> None:
    """While another asked within a minute, a tenant may hold three quarters of the places; the other finds room at
    once. After that minute, or alone, it may have all."""
    fleet = Fleet(in_flight_max=8, queue_timeout_s=1_000.0)
    (early,) = fleet.ask("b")
    answers = [fleet.ask("a") for _ in range(7)]
    assert [len(each) for each in answers] == [1] * 6 + [0]
    assert len(fleet.ask("b")) == 1
    fleet.finish(answers[0][0])
    assert len(answers[6]) == 1
    waits = fleet.ask("a")
    fleet.finish(early)
    assert waits == []
    fleet.world.now_s += 61.0
    fleet.admission.tick()
    assert len(waits) == 1


class Tenant:
    """Has a rate of tokens."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = 60.0


def test_tokens_are_taken_on_arrival_and_corrected_at_the_end() -> None:
    """A prompt is taken as believed, its answer as counted; a request that failed, was retried and then answered is
    counted once; one that never got a place costs nothing."""
    fleet = Fleet("ab", in_flight_max=1, queue_timeout_s=10.0)
    fleet.admission.set_tenants({"t": Tenant()})

    def level() -> float:
        return fleet.admission.quotas._bucket("t", True, 60.0, fleet.world.now_s).level

    (first,) = fleet.ask("t")
    assert level() == 50
    fleet.finish(first, Outcome(EndReason.FAILED))
    (retry,) = fleet.ask("t", exclude=frozenset({first.replica}))
    fleet.finish(retry, Outcome(EndReason.OK, Usage(12, 30)))
    assert level() == 60 - 42
    fleet.ask("x")
    fleet.ask("x")
    answers: list[Any] = []
    ticket = fleet.placer.admission.admit(want("t"), frozenset(), answers.append)
    assert isinstance(ticket, Ticket)
    assert level() == 8
    fleet.admission.cancel(ticket)
    fleet.admission.cancel(ticket)
    assert level() == 18
    assert not fleet.admission._charged
    assert not answers


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans(), st.integers(0, 5)), max_size=40))
@settings(deadline=None)
def test_the_rate_of_turns_is_between_what_was_seen_and_what_was_expected(steps: list[tuple[float, bool, int]]) -> None:
    """Whatever happens it is a number, not negative, and nothing is learned while nobody waits."""
    rate, now_s = DequeueRate(), 0.0
    for gap_s, waiting, turns in steps:
        now_s += gap_s
        before = (rate.turns, rate.waited_s)
        rate.pass_time(now_s, waiting=waiting)
        if waiting:
            rate.turns += turns
        else:
            assert (rate.turns, rate.waited_s) == before
        assert 0 <= rate.per_s(3.0) < 1e9
        assert rate.waited_s <= 10.0 + 5.0


class Doors(RuleBasedStateMachine):
    """Requests come, wait, leave and end in any order, on replicas that come, go and close their windows."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet("ab", in_flight_max=3, queue_requests_max=4, queue_timeout_s=20.0, engine_waiting_max=1)
        self.open: list[Lease] = []
        self.waiting: dict[int, Ticket] = {}
        self.asked = self.answered = self.taken_back = 0

    def told(self, number: int, answer: Lease | Exception) -> None:
        """One was answered, once."""
        self.answered += 1
        self.waiting.pop(number, None)
        if isinstance(answer, Lease):
            self.open.append(answer)
        else:
            assert isinstance(answer, Shed | NoReplicaReady)

    @rule(tenant=st.sampled_from("xyz"), priority=st.sampled_from(Priority), model=st.sampled_from([MODEL, "n", None]))
    def comes(self, tenant: str, priority: Priority, model: str | None) -> None:
        """A request."""
        self.asked += 1
        number = self.asked
        try:
            answer = self.fleet.placer.admission.admit(
                want(tenant, priority, model=model), frozenset(), lambda answer: self.told(number, answer)
            )
        except (Shed, NoReplicaReady) as error:
            self.told(number, error)
        else:
            if isinstance(answer, Ticket):
                self.waiting[number] = answer
            else:
                self.told(number, answer)

    @rule(which=st.integers(0, 9))
    def ends(self, which: int) -> None:
        """An answer."""
        if self.open:
            lease = self.open.pop(which % len(self.open))
            self.fleet.finish(lease)
            self.fleet.finish(lease)

    @rule(which=st.integers(0, 9))
    def leaves(self, which: int) -> None:
        """Somebody who waits."""
        if self.waiting:
            number = list(self.waiting)[which % len(self.waiting)]
            self.fleet.admission.cancel(self.waiting.pop(number))
            self.taken_back += 1

    @rule(replica=st.sampled_from("ab"), waiting=st.sampled_from([None, 0, 1, 2, 5]))
    def probed(self, replica: str, waiting: int | None) -> None:
        """A probe."""
        if replica in self.fleet.world.router.fleet.members:
            self.fleet.load(replica, waiting)

    @rule(ids=st.sampled_from(["a", "b", "ab", "ab", ""]), ok=st.booleans())
    def replicas(self, ids: str, ok: bool) -> None:
        """Come, go, fail and serve."""
        router = self.fleet.world.router
        router.replace([Replica(id_) for id_ in ids])
        for id_ in ids:
            router.observations.observe_models(id_, [ServedModel(MODEL), *([ServedModel("n")] if id_ == "a" else [])])
            router.fleet.observe_health(id_, ok=ok or id_ == "a", proof=True)

    @rule(gap_s=st.floats(0.1, 15.0))
    def time_goes_by(self, gap_s: float) -> None:
        """And a tick comes."""
        self.fleet.world.now_s += gap_s
        self.fleet.admission.tick()
        for ticket in self.waiting.values():
            self.fleet.admission._admission.fits(
                ticket.pool, ticket.tenant, self.fleet.world.now_s
            )  # somebody serves it

    @invariant()
    def all_adds_up(self) -> None:
        """Everybody was answered, waits or left; counts are those of what is open."""
        core: ConcurrencyLimiter = self.fleet.admission._admission
        assert self.asked == self.answered + self.taken_back + len(self.waiting)
        assert len(core.queue) == len(self.waiting) <= 4
        assert {lease.id for lease in self.open} == set(core.tenants)
        assert sum(core._open_of_tenant.values()) == len(self.open)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """After a tick, whoever waits for a model either finds all its replicas full or its tenant at its share."""
        self.fleet.admission.tick()
        core, now_s = self.fleet.admission._admission, self.fleet.world.now_s
        members = self.fleet.world.router.fleet.members
        assert core.full == {m.id for m in members.values() if len(m.leases) >= core.window(m.id)}
        for ticket in self.waiting.values():
            with suppress(NoReplicaReady):  # which it is told at the next tick
                assert not core.fits(ticket.pool, ticket.tenant, now_s)


Doors.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


TestDoors = pytest.mark.promise(
    "The admission queue is bounded in requests, bytes and time, and holds no client that left.", "clients"
)(Doors.TestCase)


def test_all_that_wait_are_bounded_together() -> None:
    """What is held back and what waits for a place share one limit of requests, and one of bytes."""
    fleet = Fleet(in_flight_max=1, queue_requests_max=3, queue_bytes_max=100)
    fleet.world.router.policy = Patient()
    held = [fleet.ask(size=10) for _ in range(2)]
    assert fleet.admission.held_back() == 2
    cast("Patient", fleet.world.router.policy).hold = False
    assert len(fleet.ask(size=10)) == 1  # placed: the only place there is
    queued = [fleet.ask(size=10) for _ in range(3)]
    assert sum(fleet.admission.count_queued()[0].values()) == 3
    assert [len(each) for each in held] == [0, 0]
    assert sorted(len(each) for each in queued) == [0, 1, 1]
    many = Fleet(in_flight_max=1, queue_bytes_max=25)
    many.world.router.policy = Patient()
    assert not many.ask(size=20)
    assert len(many.ask(size=20)) == 1  # no room to hold it: it goes


def test_one_deadline_for_all_waiting() -> None:
    """Held back for a while and without a place then, a request is told so `queue_timeout_s` after it came, not
    later."""
    fleet = Fleet(in_flight_max=1, defer_max_s=6.0, queue_timeout_s=10.0)
    policy = fleet.world.router.policy = Patient()
    held = fleet.ask()
    policy.hold = False
    fleet.ask()
    fleet.world.now_s += 7.0
    fleet.admission.tick()
    assert (fleet.admission.held_back(), held) == (0, [])
    assert sum(fleet.admission.count_queued()[0].values()) == 1
    fleet.world.now_s += 3.1
    fleet.admission.tick()
    assert isinstance(held[0], Shed)


@pytest.mark.parametrize("told", [False, True])
def test_who_comes_again_goes_on_waiting(told: bool) -> None:
    """A client that leaves after eight seconds of being held, or is told 429, and asks for the same prompt again is
    held for two seconds more, of ten; another prompt for all ten."""
    fleet = Fleet(defer_max_s=10.0, queue_timeout_s=10.0)
    fleet.world.router.policy = Patient()
    ask = chat("the same")
    chain = chain_of(ask, MODEL)

    def again(asked: PlacementRequest) -> tuple[list[Any], Ticket]:
        answers: list[Any] = []
        ticket = fleet.placer.admission.admit(asked, frozenset(), answers.append)
        assert isinstance(ticket, Ticket)
        return answers, ticket

    wanted = PlacementRequest(ask, MODEL, chain, "k", body_bytes=1)
    _, ticket = again(wanted)
    fleet.world.now_s += 8.0
    if told:
        fleet.admission._turn_away(ticket, fleet.world.now_s)
        fleet.admission._holding.remove(ticket)
    else:
        fleet.admission.cancel(ticket)
    fleet.world.now_s += 5.0
    answers, _ = again(wanted)
    other, _ = again(PlacementRequest(chat("another"), MODEL, chain_of(chat("another"), MODEL), "k", body_bytes=1))
    fleet.world.now_s += 1.9
    fleet.admission.tick()
    assert answers == other == []
    fleet.world.now_s += 0.2
    fleet.admission.tick()
    assert (len(answers), other) == (1, [])
