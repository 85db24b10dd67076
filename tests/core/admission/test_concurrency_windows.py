from __future__ import annotations

from typing import Any

import pytest

from router.config.schema import AdmissionSettings
from router.core.admission.concurrency_windows import BURST_MAX, WINDOW_MIN
from router.core.admission.queue import Ticket
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.types.replicas import Replica, ServedModel
from tests.core.admission.fleet import Fleet, want
from tests.core.placement.placing import MODEL


def test_a_window_is_what_the_engine_works_on_and_a_few_more() -> None:
    """More than engine_waiting_max waiting closes the window to what the engine works on plus engine_waiting_max; when
    fewer wait it opens by as many, when none does and it binds by a quarter at least, and by a tenth when it does not;
    and then it is open again."""
    fleet = Fleet(engine_waiting_max=8)
    for waiting, in_flight, expected in [
        (0, 0, BURST_MAX),
        (8, 100, 100 + BURST_MAX),
        (40, 100, 68),
        (20, 68, 56),
        (4, 56, 60),
        (0, 60, 75),
        (0, 20, 83),
        (0, 20, 92),
        (100, 50, WINDOW_MIN),
        (0, 4, 12),
    ]:
        fleet.load("a", waiting, in_flight)
        assert fleet.admission.window("a") == expected
    for _ in range(60):
        fleet.load("a", 0, 3)
    assert fleet.admission.window("a") == 3 + BURST_MAX


@pytest.mark.promise("Absurd, old or missing metrics of an engine block no request.", "engines")
@pytest.mark.parametrize("waiting", [None, -1, 10**9])
def test_absurd_or_missing_metrics_never_block(waiting: int | None) -> None:
    """An engine that does not say how many wait there, or says what cannot be, may have in_flight_max."""
    fleet = Fleet(in_flight_max=50)
    fleet.load("a", 45, 45)
    assert fleet.admission.window("a") < 50
    fleet.load("a", waiting, 45)
    assert fleet.admission.window("a") == 50


@pytest.mark.promise("Absurd, old or missing metrics of an engine block no request.", "engines")
def test_stale_metrics_never_block() -> None:
    """What an engine said three probes ago says nothing any more: whoever waited because of it is placed."""
    fleet = Fleet(queue_timeout_s=100.0)
    leases = [fleet.ask() for _ in range(50)]
    fleet.load("a", 50)
    waits = fleet.ask()
    assert waits == []
    fleet.world.now_s += 2.9
    fleet.admission.tick()
    assert waits == []
    fleet.world.now_s += 0.2
    fleet.admission.tick()
    assert isinstance(waits[0], Lease)
    assert all(len(each) == 1 for each in leases)


def test_what_was_sent_since_the_probe_counts() -> None:
    """Between two probes no more is sent than the last one left room for; the rest goes to others, then waits."""
    fleet = Fleet("ab", engine_waiting_max=5)
    for id_, in_flight in (("a", 0), ("b", 0)):
        fleet.load(id_, 6, in_flight)
    answers = [fleet.ask() for _ in range(2 * WINDOW_MIN + 3)]
    placed = [each[0].replica for each in answers if each]
    assert sorted(placed) == ["a"] * WINDOW_MIN + ["b"] * WINDOW_MIN
    assert sum(not each for each in answers) == 3
    fleet.load("a", 0)
    assert [each[0].replica for each in answers[-3:]] == ["a"] * 3


def test_turns_on_a_replica_that_is_used_for_want_of_another() -> None:
    """A model whose only replica does not answer its health checks is served there, and who waits for it gets a turn,
    whether or not those that are ready are full."""
    fleet = Fleet("ab", in_flight_max=1)
    router = fleet.world.router
    router.observations.observe_models("b", [ServedModel("n")])
    for _ in range(2):
        router.fleet.observe_health("b", False, "no answer in time", silent=True)
    fleet.ask()
    placed, waits = fleet.ask(model="n"), fleet.ask(model="n")
    assert (placed[0].replica, waits) == ("b", [])
    fleet.finish(placed[0])
    assert waits[0].replica == "b"


def test_other_limits_do_not_open_what_is_known_to_be_full() -> None:
    """A reload keeps windows that bind, and lowers them if need be."""
    fleet = Fleet("ab", engine_waiting_max=8)
    fleet.load("a", 40, 100)
    fleet.admission.configure(AdmissionSettings(in_flight_max=90))
    assert [fleet.admission.window(id_) for id_ in "ab"] == [68, 90]
    fleet.admission.configure(AdmissionSettings(in_flight_max=10))
    assert [fleet.admission.window(id_) for id_ in "ab"] == [10, 10]


def test_a_lease_that_ends_makes_room_at_once() -> None:
    """The first in line is placed in the same moment, and told how long it waited."""
    fleet = Fleet(in_flight_max=1)
    (first,) = fleet.ask()
    wanted = want()
    answers: list[Any] = []
    assert isinstance(fleet.placer.admission.admit(wanted, frozenset(), answers.append), Ticket)
    later = fleet.ask()
    fleet.world.now_s += 1.5
    fleet.finish(first)
    assert isinstance(answers[0], Lease)
    assert wanted.queued_s == 1.5
    assert later == []


def test_a_replica_that_joins_makes_room() -> None:
    """Within a tick of being ready."""
    fleet = Fleet(in_flight_max=1)
    fleet.ask()
    waits = fleet.ask()
    fleet.world.router.replace([Replica("a"), Replica("b")])
    fleet.world.router.observations.observe_models("b", [ServedModel(MODEL)])
    fleet.world.router.fleet.observe_health("b", ok=True)
    fleet.admission.tick()
    assert waits[0].replica == "b"


def test_when_nobody_is_left_they_hear_that() -> None:
    """Who waits for replicas that are gone is told so (503), not that there are too many (429)."""
    fleet = Fleet(in_flight_max=1)
    fleet.ask()
    waits = fleet.ask()
    fleet.world.router.fleet.observe_health("a", ok=False, proof=True)
    fleet.admission.tick()
    assert isinstance(waits[0], NoReplicaReady)


def test_a_model_that_is_full_does_not_hold_up_another() -> None:
    """Requests wait for replicas that serve their model; others pass them."""
    fleet = Fleet("ab", in_flight_max=1)
    fleet.world.router.observations.observe_models("b", [ServedModel("n")])
    fleet.ask()
    waits = fleet.ask()
    assert waits == []
    (other,) = fleet.ask(model="n")
    assert other.replica == "b"
    also = fleet.ask(model="n")
    fleet.finish(other)
    assert also[0].replica == "b"
    assert waits == []


def test_a_retry_does_not_wait() -> None:
    """It goes to another that has room, or else to one that has none: its request was let in before."""
    fleet = Fleet("abc", in_flight_max=1)
    (first,) = fleet.ask()
    others = {"a", "b", "c"} - {first.replica}
    (second,) = fleet.ask()
    (retry,) = fleet.ask(exclude=frozenset({first.replica}))
    assert retry.replica == (others - {second.replica}).pop()
    (again,) = fleet.ask(exclude=frozenset({first.replica}))
    assert again.replica in others
