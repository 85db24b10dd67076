"""Engines that come after one another to the same address: nothing of the former is the next one's."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.fleet.kv_reservations import shared_prefix_marks
from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.kv_events.batch_decoder import Stored
from router.core.types.placements import Confidence, EndReason, PlacementReason, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from tests.core.cache_state.known import prompt_of
from tests.core.placement.placing import MODEL, World, chat, words
from tests.support.examples import examples

pytestmark = pytest.mark.promise(
    "An engine at a reused address is credited with no block of its predecessor.", "discovery"
)

IDS = "abc"
INSTANCES = ("", "1", "2")
SHORT, LONG = "hi", words(1, 2_000)
ANSWER = words(2, 600)


def renewed(world: World, *replicas: Replica) -> None:
    """A new set, in which all are fit at once."""
    world.router.replace(replicas)
    for replica in replicas:
        world.router.fleet.observe_health(replica.id, ok=True)
        world.router.observations.observe_models(replica.id, [ServedModel(MODEL)])


class Lives(RuleBasedStateMachine):
    """A Router against a list of who is there, which life that is, and what was placed on it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World("")
        self.instances: dict[str, str] = {}  # as far as known
        self.lives: dict[str, int] = {}
        self.count = 0
        self.open: list[tuple[Lease, int]] = []  # and the life that it was placed on
        self.ended: list[Lease] = []
        self.used: dict[int, int] = defaultdict(int)  # leases that a life ever had

    @rule(instances=st.dictionaries(st.sampled_from(IDS), st.sampled_from(INSTANCES)))
    def replace(self, instances: dict[str, str]) -> None:
        """Discovery says who is there."""
        joined, left = self.world.router.replace([Replica(id_, one) for id_, one in instances.items()])
        gone = {id_ for id_ in self.instances if id_ not in instances}
        others = {
            id_ for id_ in instances.keys() & self.instances.keys()
            if instances[id_] and self.instances[id_] and instances[id_] != self.instances[id_]
        }  # fmt: skip
        assert sorted(left) == sorted(gone | others)
        assert sorted(joined) == sorted(instances.keys() - (self.instances.keys() - others))
        for id_ in joined:
            self.count += 1
            self.lives[id_] = self.count
            member = self.world.router.fleet.members[id_]
            assert not member.health.fit
            assert not member.own_speed.prefill_factor.is_known
        stay = instances.keys() - set(joined)
        known = {id_: instances[id_] or self.instances[id_] for id_ in stay}
        self.instances = dict(instances) | known

    @rule(id_=st.sampled_from(IDS))
    def ready(self, id_: str) -> None:
        """It answers its health check."""
        self.world.router.observations.observe_models(id_, [ServedModel(MODEL)])
        self.world.router.fleet.observe_health(id_, ok=True, proof=True)

    @rule(turns=st.sampled_from([(SHORT,), (LONG,), (SHORT, ANSWER, "and?"), (LONG, ANSWER, "and?")]))
    def place(self, turns: tuple[str, ...]) -> None:
        """A request; nobody is credited with anything who was sent nothing in this life."""
        index = self.world.router.index
        blocks = {id_: index.blocks(id_) for id_ in self.world.router.fleet.members}
        try:
            lease = self.world.place(chat(*turns))
        except NoReplicaReady:
            assert not self.world.router.fleet.ready()
            return
        for candidate in lease.receipt.candidates:
            if not self.used[self.lives[candidate.id]]:
                assert (candidate.cached_tokens, candidate.in_flight, blocks[candidate.id]) == (0, 0, 0)
        life = self.lives[lease.replica]
        assert not lease.prompt.credited_tokens or self.used[life]
        self.used[life] += 1
        self.open.append((lease, life))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), after_s=st.sampled_from([0.0, 0.5]))
    def first_token(self, which: int, after_s: float) -> None:
        """Of whichever life."""
        self.world.first_token(self.open[which % len(self.open)][0], after_s=after_s)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), ending=st.sampled_from(EndReason), again=st.booleans())
    def finish(self, which: int, ending: EndReason, again: bool) -> None:
        """An answer ends, once or twice, as it may."""
        lease, life = self.open.pop(which % len(self.open))
        member = self.world.router.fleet.members.get(lease.replica)
        blocks = self.world.router.index.blocks(lease.replica) if member else 0
        for _ in range(1 + again):
            self.world.finish(lease, ending, Usage(500, 600, 0) if ending is EndReason.OK else None)
        if member and self.lives[lease.replica] != life:
            assert self.world.router.index.blocks(lease.replica) == blocks, "the former's answer is not the next one's"

    @invariant()
    def books(self) -> None:
        """Each life has its own leases open, and no others."""
        members = self.world.router.fleet.members
        assert members.keys() == self.instances.keys()
        assert {id_: m.replica.instance for id_, m in members.items()} == self.instances
        for id_, member in members.items():
            own = {lease.id: lease for lease, life in self.open if life == self.lives[id_]}
            assert member.leases.keys() == own.keys()
            assert member.work.kv.own_tokens == sum(lease.prompt.unshared_tokens for lease in own.values())
            assert bool(member.work.kv.blocks) == any(
                shared_prefix_marks(len(lease.prompt.keys)) for lease in own.values()
            )
            if not own:
                assert member.queue.pending_ms(self.world.now_s) == 0.0
        assert self.world.router.index.holders.keys() == members.keys()
        assert self.world.router.knowledge._known.keys() <= members.keys()
        assert self.world.router.fleet.restricted.keys() <= members.keys()

    def teardown(self) -> None:
        """When all has ended nothing is left, of any life."""
        while self.open:
            self.finish(0, EndReason.OK, again=False)
        assert all(used == (0, 0, 0.0) for used in self.world.in_use())


Lives.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase


@pytest.mark.parametrize("question", [SHORT, LONG])
def test_another_engine_holds_nothing(question: str) -> None:
    """Neither a prompt nor an answer that the former gave, however short the prompt before it; nor is it where the
    conversation is at home. The same instance keeps all of it, and so does one that was not known before."""
    world, again = World("a"), chat(question, ANSWER, "and?")
    world.serve(chat(question), output_tokens=600)
    for instance in ("", "uid-1", "", "uid-1"):
        world.router.replace([Replica("a", instance, name=f"ns/{instance}")])
        lease = world.place(again)
        assert lease.prompt.credited_tokens > 0 or lease.cached_tokens > 0
        world.finish(lease, EndReason.FAILED)
    renewed(world, Replica("a", "uid-2"))
    lease = world.place(again)
    assert (lease.cached_tokens, lease.prompt.credited_tokens) == (0, 0)
    assert world.router.fleet.members["a"].replica == Replica("a", "uid-2")


def test_a_restart_in_place_holds_no_answer_either() -> None:
    """Counters that went back say that the process is another: its answers to short prompts are gone too."""
    world, again = World("a"), chat(SHORT, ANSWER, "and?")
    world.router.observations.observe_load("a", Load(prompt_tokens_total=1_000.0))
    world.serve(chat(SHORT), output_tokens=600)
    world.router.observations.observe_load("a", Load(prompt_tokens_total=1.0))
    assert world.place(again).prompt.credited_tokens == 0


def test_another_engine_says_for_itself_what_it_holds() -> None:
    """What events said of the former is forgotten with it, and its grade."""
    world, prompt = World("a"), prompt_of(160)
    world.router.models.observe_tokens(MODEL, "")
    knowledge = world.router.knowledge
    knowledge.grade("a", Confidence.EXACT, "joined", 0.0)
    hashes, ids = list(range(10)), prompt.ids
    knowledge.apply("a", Stored(hashes, None, ids, 16, "", b"", None, "GPU", 0, True), 0.0)  # by place: as in events
    assert knowledge.find_stored(prompt, 0.0)["a"].tokens == 160
    renewed(world, Replica("a", "uid-1"))
    assert knowledge.find_stored(prompt, 0.0)["a"].tokens == 160
    renewed(world, Replica("a", "uid-2"))
    assert knowledge.find_stored(prompt, 0.0) == {}
    assert not knowledge.masks.match(next(iter(prompt.keys.values())))
    assert world.router.fleet.members["a"].grade is Confidence.ESTIMATED


def test_an_estimate_goes_on_while_a_stream_joins() -> None:
    """A router that has just started credits what it has sent there itself, before all that engines tell is read."""
    world = World("")
    renewed(world, Replica("a"), Replica("b"))
    for id_ in "ab":
        world.router.knowledge.suspend(id_, "replay from batch 0", 0.0, doubt=False)
        world.router.knowledge.grade(id_, Confidence.CATCHING_UP, "replay from batch 0", 0.0)
    lease = world.place(chat(LONG))
    world.finish(lease)
    again = world.place(chat(LONG))
    assert (again.replica, again.receipt.reason) == (lease.replica, PlacementReason.WARM)
    assert again.receipt.predicted_cached_tokens > 1_000
    world.router.knowledge.suspend(lease.replica, "event connection lost", 1.0, doubt=True)
    assert world.place(chat(LONG)).receipt.predicted_cached_tokens == 0


def test_not_ready_by_discovery() -> None:
    """Nothing is placed there, not even for want of anybody else; what it holds, its open leases and its life stay."""
    world = World("")
    renewed(world, Replica("a", "1"))
    lease = world.place(chat(LONG))
    world.router.replace([Replica("a", "1", ready=False)])
    for _ in range(10):  # its health checks have no answer either: such a one is used where there is nobody else
        world.router.fleet.observe_health("a", ok=False, silent=True)
        with pytest.raises(NoReplicaReady):
            world.place(chat(LONG))
    world.router.fleet.observe_health("a", ok=True)
    with pytest.raises(NoReplicaReady):
        world.place(chat(LONG))
    world.finish(lease)
    assert all(used == (0, 0, 0.0) for used in world.in_use())
    world.router.replace([Replica("a", "1")])
    assert world.place(chat(LONG)).cached_tokens > 1_000


def test_a_start_that_the_metrics_tell_is_another_cache() -> None:
    """An engine that says that it began at another time has an empty cache, though its counters have passed ours; one
    that says nothing of it, or the same, keeps it."""
    world = World("a")
    ask = chat(words(1, 2_000))
    world.router.observations.observe_load("a", Load(prompt_tokens_total=5.0, started_s=100.5))
    world.serve(ask)
    for same in (Load(prompt_tokens_total=9.0), Load(prompt_tokens_total=9.0, started_s=100.5)):
        world.router.observations.observe_load("a", same)
        assert world.depth(ask, "a") > 10
    world.router.observations.observe_load("a", Load(prompt_tokens_total=10.0, started_s=200.5))
    assert not world.depth(ask, "a")
