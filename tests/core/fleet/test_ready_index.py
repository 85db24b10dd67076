"""Who is ready, who serves what, who is held: kept a member at a time, and equal to looking at all of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.types.replicas import Replica, ServedModel
from tests.core.work import interpreted, steps
from tests.support.examples import examples

IDS, NAMES = "abcd", ["m", "n", "lora"]


def naive(fleet: Fleet) -> dict[str, Any]:
    """What there is to be asked, by looking at everybody."""
    members = list(fleet.members.values())
    warm = {
        name for m in members if m.id not in fleet.warming and m.health.fit and m.replica.ready for name in m.models
    }
    held = {m.id: m for m in members if m.id in fleet.warming and warm.issuperset(m.models)}
    ready = [m for m in members if m.health.fit and m.replica.ready and m.id not in held]
    serving: dict[str, list[ReplicaState]] = {}
    for m in ready:
        for name in m.models:
            serving.setdefault(name, []).append(m)
    served = set(serving)
    unfit = [m for m in members if m.replica.ready and not m.health.fit]
    silent = [m for m in unfit if m.health.served and m.health.silent]
    doubted = [m for m in silent if not served.issuperset(m.models)]
    usable = {m.id: m for m in ready + doubted}
    for m in doubted:
        for name in m.models.keys() - served:
            serving.setdefault(name, []).append(m)
    return {
        "ready": [m.id for m in ready],
        "usable": list(usable),
        "serving": {name: [m.id for m in listed] for name, listed in serving.items()},
        "panics": bool(doubted),
        "held": [m.id for m in held.values() if m.health.fit and m.replica.ready],
        "kinds": {
            names: [m.id for m in members if m.id in usable and m.models.keys() == names]
            for names in {frozenset(m.models) for m in usable.values()}
        },
    }


class Fleets(RuleBasedStateMachine):
    """Anything that can happen to replicas, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.given: list[tuple[list[ReplicaState], list[ReplicaState]]] = []

    @rule(
        there=st.lists(
            st.tuples(st.sampled_from(IDS), st.sampled_from(["", "one", "two"]), st.booleans()),
            unique_by=lambda each: each[0],
        )
    )
    def replace(self, there: list[tuple[str, str, bool]]) -> None:
        """Discovery's set: some join, some leave, some are others at the same address, some are not ready by it."""
        self.fleet.replace([Replica(id_, instance=instance, ready=ready) for id_, instance, ready in there])

    @rule(id_=st.sampled_from(IDS), how=st.sampled_from(["ok", "refused", "silent", "failed"]))
    def health(self, id_: str, how: str) -> None:
        """A health check."""
        self.fleet.observe_health(id_, how == "ok", proof=how == "refused", silent=how == "silent")

    @rule(id_=st.sampled_from(IDS), names=st.sets(st.sampled_from(NAMES)))
    def models(self, id_: str, names: set[str]) -> None:
        """Its page of models."""
        if id_ in self.fleet.members:
            before = set(self.fleet.members[id_].models)
            news = self.fleet.observe_models(self.fleet.members[id_], [ServedModel(name) for name in names])
            assert news is (before != names)

    @rule(id_=st.sampled_from(IDS), warming=st.booleans())
    def hold(self, id_: str, warming: bool) -> None:
        """Its cache is to be filled, or is."""
        self.fleet.warm_up(id_, warming)

    @invariant()
    def agrees(self) -> None:
        """What it says is what a look at everybody says, and what it said before is as it was."""
        fleet = self.fleet
        lists = [fleet.ready(), fleet.usable(), *(fleet.list_serving(name) for name in NAMES)]
        assert {
            "ready": [m.id for m in fleet.ready()],
            "usable": [m.id for m in fleet.usable()],
            "serving": {name: [m.id for m in fleet.list_serving(name)] for name in NAMES if fleet.list_serving(name)},
            "panics": fleet.panics,
            "held": list(fleet.warming_up),
            "kinds": {names: [m.id for m in members] for names, members in fleet.roster.kinds()},
        } == naive(fleet)
        assert fleet.model_names() == {name for name in NAMES if fleet.list_serving(name)}
        assert all(fleet.roster.kind(m) == m.models.keys() for m in fleet.members.values())
        for given, copy in self.given[-20:]:
            assert len(given) == len(copy)
            assert all(one is other for one, other in zip(given, copy, strict=True))
        self.given += [(given, list(given)) for given in lists]


Fleets.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
TestFleets = Fleets.TestCase


def served_by(count: int, models: int) -> Fleet:
    """Ready replicas that all serve the same."""
    fleet = Fleet()
    fleet.replace([Replica(f"http://{n}") for n in range(count)])
    for id_, member in fleet.members.items():
        fleet.observe_models(member, [ServedModel(f"m{n}") for n in range(models)])
        fleet.observe_health(id_, True)
    return fleet


@interpreted
def test_a_flip_is_the_work_of_one() -> None:
    """One of 400 replicas that goes or comes costs what it costs with 20, and not twenty times as much."""

    def spent(count: int) -> int:
        fleet = served_by(count, 16)
        return steps(lambda: [fleet.observe_health("http://7", ok, proof=True) for ok in (False, True)])

    assert spent(400) < 1.1 * spent(20)


@interpreted
def test_models_that_are_still_the_same_are_no_work() -> None:
    """A round of probes in which nothing is new makes no list and no map anew, however many replicas there are."""

    def spent(count: int) -> int:
        fleet = served_by(count, 16)
        before, member = fleet.list_serving("m3"), fleet.members["http://7"]
        work = steps(lambda: fleet.observe_models(member, [ServedModel(f"m{n}") for n in range(16)]))
        assert fleet.list_serving("m3") is before
        return work

    assert spent(400) == spent(20)


@interpreted
def test_who_has_learned_is_not_asked_how_slow_it_looks() -> None:
    """In a fleet whose speeds are all known nobody looks through the replicas for those that only seem slow."""

    def spent(count: int) -> int:
        fleet = served_by(count, 1)
        for member in fleet.members.values():
            member.own_speed.prefill_factor.observe(100.0, fleet.means.common.prefill.model.ms(2_000, 0), 0.0)
        assert fleet.slowness(1.0) == {}
        return steps(lambda: fleet.slowness(2.0))

    assert spent(400) == spent(20)


def test_a_set_of_replicas_is_not_copied() -> None:
    """What discovery found is kept as it is, unless an engine is known from before that it does not tell this time."""
    fleet, found = Fleet(), [Replica("a"), Replica("b", instance="one")]
    fleet.replace(found)
    again = [Replica("a", node="x"), Replica("b", node="x")]
    fleet.replace(again)
    assert fleet.members["a"].replica is again[0]
    assert fleet.members["b"].replica == Replica("b", instance="one", node="x")


def test_who_serves_another_model_has_its_speed_to_learn_again() -> None:
    """A replica whose speed was known is looked at again for seeming slow once it serves other models: what was learned
    of its speed is gone."""
    fleet = served_by(2, 1)
    for member in fleet.members.values():
        member.own_speed.prefill_factor.observe(100.0, fleet.means.common.prefill.model.ms(2_000, 0), 0.0)
    assert fleet.slowness(1.0) == {}
    assert not fleet.unlearned.members
    changed = next(iter(fleet.members.values()))
    assert fleet.observe_models(changed, [ServedModel("another")])
    assert (changed.own_speed.prefill_factor.observations, list(fleet.unlearned.members)) == (0, [changed.id])
