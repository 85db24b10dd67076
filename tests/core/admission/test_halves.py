"""Whose turn it is where one replica prefills what another one decodes: whole requests find room only at replicas that
take them, and two legs at two replicas that are a pair."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.config.schema import AdmissionSettings
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.types.disagg_types import Role
from tests.core.admission.fleet import asked
from tests.core.admission.overload import placer_of
from tests.core.placement.paired import APART, PairedFleet
from tests.core.placement.test_split_sglang import MIXED, sglang
from tests.support.examples import examples

ONE_PREFILLS = {"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
ONE_OF_EACH = {"p": Role.PREFILL, "d": Role.DECODE}


class Halves:
    """Requests of a fleet in which some replicas take one leg only, and what was answered to them."""

    def __init__(self, fleet: PairedFleet, **limits: Any) -> None:
        self.fleet = fleet
        self.placer = placer_of(fleet, **limits)
        self.admission = self.placer.admission
        self.seeds = 0

    def ask(
        self,
        tokens: int = 2_000,
        *,
        tenant: str = "",
        due_in_s: float | None = None,
        exclude: frozenset[str] = frozenset(),
        may_split: bool = True,
    ) -> list[Any]:
        """A list that holds the answer, or will. Each prompt is new."""
        self.seeds += 1
        wanted = self.fleet.wanted(self.seeds, tokens, may_split=may_split)
        wanted.tenant = tenant
        if due_in_s is not None:
            wanted.due_s = self.fleet.now_s + due_in_s
        return asked(self.placer, wanted, exclude)

    def split(self, **how: Any) -> Lease:
        """A request that is placed at once, in two legs."""
        (lease,) = self.ask(**how)
        assert lease.receipt.leg is not None
        assert isinstance(lease, Lease)
        return lease

    def prefilled(self, lease: Lease) -> None:
        """The prefill leg ends now, well."""
        self.fleet.now_s += 0.2
        self.placer.finish_prefill(lease, self.fleet.ok(lease), self.fleet.now_s)

    def finish(self, lease: Lease) -> None:
        """The answer ends now, well."""
        self.placer.finish(lease, self.fleet.ok(lease), self.fleet.now_s)


def legs(answers: list[Any]) -> tuple[str, str]:
    """Replicas (prefill, decode) of a request that has been placed."""
    (lease,) = answers
    return lease.receipt.leg.replica, lease.replica


def test_what_goes_whole_waits_for_whoever_takes_it() -> None:
    """SGLang's server that decodes is idle, and takes no whole request: those wait for the one that does, within its
    window, while those that may go in two legs pass them."""
    halves = Halves(sglang(MIXED), in_flight_max=1)
    (first,) = halves.ask(may_split=False)
    assert first.replica == "w"
    waits = halves.ask(may_split=False)
    assert waits == []
    assert legs(halves.ask()) == ("p", "d")
    assert waits == []
    halves.finish(first)
    assert waits[0].replica == "w"


def test_two_legs_wait_for_a_replica_that_prefills() -> None:
    """Where nobody takes a request in one leg, the places of replicas that prefill count as soon as they are taken, and
    the end of a prefill gives its place to the next in line at once, long before the answer ends."""
    halves = Halves(sglang(ONE_PREFILLS), in_flight_max=1)
    first = halves.split()
    waits = halves.ask()
    assert waits == []
    halves.prefilled(first)
    assert legs(waits) == ("p", ({"d", "e"} - {first.replica}).pop())


def test_an_answer_that_ends_first_gives_both_places_back() -> None:
    """Where nobody tells of the prefill leg's end, it has ended with the decode leg."""
    halves = Halves(sglang(ONE_PREFILLS), in_flight_max=1)
    first = halves.split()
    waits = halves.ask()
    assert waits == []
    halves.finish(first)
    assert legs(waits)[0] == "p"


def test_whoever_takes_whole_requests_needs_no_room_where_others_prefill() -> None:
    """vLLM's replicas that decode take a request in one leg: a full replica that prefills keeps nobody waiting."""
    halves = Halves(PairedFleet(ONE_PREFILLS), in_flight_max=1)
    halves.fleet.place(only="p", may_split=False)
    halves.admission.tick()
    assert {halves.ask()[0].replica for _ in range(2)} == {"d", "e"}
    assert halves.ask() == []


def test_replicas_that_only_prefill_are_no_places() -> None:
    """While another tenant is about, one finds no room beyond its share of what takes whole requests and decodes: two
    of four, and not of the eight that both replicas have."""
    halves = Halves(PairedFleet(ONE_OF_EACH), in_flight_max=4, tenant_share_max=0.5)
    halves.ask(tenant="other")
    placed = [bool(halves.ask(40, tenant="greedy")) for _ in range(3)]
    assert placed == [True, True, False]


def test_calm_is_where_prompts_are_prefilled() -> None:
    """While requests with deadlines come, one without waits while the only replica that would prefill it has long
    prompts to do, however idle those are that decode."""
    halves = Halves(sglang(ONE_OF_EACH))
    urgent = halves.split(tokens=20_000, due_in_s=5.0)
    waits = halves.ask()
    assert waits == []
    halves.prefilled(urgent)
    assert legs(waits) == ("p", "d")


def test_calm_is_whoever_takes_it_whole() -> None:
    """vLLM's replicas that decode can prefill a request themselves, and while none waits there it goes to them."""
    halves = Halves(PairedFleet(ONE_OF_EACH))
    halves.fleet.place(tokens=20_000, only="p", may_split=False)
    halves.ask(40, due_in_s=5.0)
    (lease,) = halves.ask()
    assert (lease.replica, lease.receipt.leg) == ("d", None)


def test_who_waits_goes_on_waiting_while_all_that_prefill_rest() -> None:
    """Replicas that asked for a rest have no room for now, which is no reason to turn away who waits."""
    halves = Halves(sglang(ONE_OF_EACH), in_flight_max=1)
    first = halves.split()
    waits = halves.ask()
    halves.fleet.router.rest("p", halves.fleet.now_s + 10.0)
    halves.finish(first)
    assert waits == []
    halves.fleet.now_s += 10.0
    halves.admission.tick()
    assert legs(waits) == ("p", "d")


def cold_second(*, in_flight_max: int = 1) -> Halves:
    """Two replicas that prefill, of which only `p` is a warm pair with those that decode."""
    fleet = sglang(APART, warm=False)
    while pairs := fleet.router.disaggregator.pairs_to_warm(fleet.now_s):
        for pair in pairs:
            fleet.router.disaggregator.pair_warmed(*pair, ok=pair[0] == "p", now_s=fleet.now_s)
    return Halves(fleet, in_flight_max=in_flight_max)


def test_room_is_room_of_a_pair() -> None:
    """An idle replica that is no pair with those that decode is no room: the request waits for the one that is, and is
    not told that there is none."""
    halves = cold_second()
    first = halves.split()
    halves.admission.tick()
    waits = halves.ask()
    assert waits == []
    halves.prefilled(first)
    assert legs(waits) == ("p", ({"d", "e"} - {first.replica}).pop())


def test_a_retry_takes_a_full_pair_where_no_other_is_warm() -> None:
    """A retry does not wait: it goes to replicas that are full rather than nowhere."""
    halves = cold_second()
    first = halves.split()
    halves.admission.tick()
    again = halves.ask(exclude=frozenset({first.replica}))
    assert legs(again) == ("p", ({"d", "e"} - {first.replica}).pop())


def test_without_any_warm_pair_they_hear_that() -> None:
    """Whoever waits for replicas of which none is a pair any more is told so, and does not wait for what will not
    come."""
    halves = Halves(sglang(ONE_OF_EACH), in_flight_max=1)
    first = halves.split()
    waits = halves.ask()
    assert waits == []
    halves.fleet.router.disaggregator.set_connector("p", None, "")
    halves.finish(first)
    assert isinstance(waits[0], NoReplicaReady)


def test_those_that_only_prefill_stand_in_for_all_others_within_their_windows() -> None:
    """Where vLLM's replicas that decode are gone, those that prefill take whole requests, as many as they have places
    for."""
    halves = Halves(PairedFleet(ONE_OF_EACH), in_flight_max=1)
    halves.fleet.router.fleet.observe_health("d", ok=False, proof=True)
    (first,) = halves.ask()
    assert (first.replica, first.receipt.leg) == ("p", None)
    waits = halves.ask()
    assert waits == []
    halves.finish(first)
    assert waits[0].replica == "p"


class PlacesOfPairs(RuleBasedStateMachine):
    """SGLang's servers of each kind, with two places each, and requests of both kinds that come, go on and end."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves(sglang({"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE, "w": Role.BOTH}))
        self.halves.admission.configure(AdmissionSettings(in_flight_max=2, queue_timeout_s=1e6))
        self.asked: list[tuple[bool, list[Any]]] = []  # may be split; the answer

    def open(self) -> list[Lease]:
        """Leases whose answers have not ended."""
        members = self.halves.fleet.router.fleet.members
        return [given for _, (given, *_) in self.placed() if given.id in members[given.replica].leases]

    def placed(self) -> list[tuple[bool, list[Any]]]:
        """Those that wait no longer."""
        return [(may_split, answers) for may_split, answers in self.asked if answers]

    @rule(may_split=st.booleans())
    def comes(self, may_split: bool) -> None:
        """A request comes."""
        if len(self.asked) - len(self.placed()) < 20:
            self.asked.append((may_split, self.halves.ask(500, may_split=may_split)))

    @rule(data=st.data(), ends=st.booleans())
    def goes_on(self, data: st.DataObject, ends: bool) -> None:
        """A prefill leg ends, or an answer with all of its legs."""
        if leases := self.open():
            lease = data.draw(st.sampled_from(leases))
            (self.halves.finish if ends else self.halves.prefilled)(lease)

    @rule()
    def looked_at(self) -> None:
        """Time for whatever else makes room."""
        self.halves.fleet.now_s += 0.1
        self.halves.admission.tick()

    @invariant()
    def nobody_has_more_than_its_places(self) -> None:
        """Prefill legs count as any other lease."""
        assert all(len(m.leases) <= 2 for m in self.halves.fleet.router.fleet.members.values())

    @invariant()
    def nobody_waits_beside_a_place(self) -> None:
        """Whole requests wait only while `w` is full, and others only while there is no room for either way."""
        free = {m.id for m in self.halves.fleet.router.fleet.members.values() if len(m.leases) < 2}
        waiting = {may_split for may_split, answers in self.asked if not answers}
        assert not waiting or "w" not in free
        assert True not in waiting or "p" not in free or not free & {"d", "e"}

    @invariant()
    def whole_requests_are_where_they_are_taken(self) -> None:
        """Whatever else is idle."""
        assert all(lease.replica == "w" for may_split, (lease, *_) in self.placed() if not may_split)


TestPlacesOfPairs = PlacesOfPairs.TestCase
TestPlacesOfPairs.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
