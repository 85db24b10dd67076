from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.fleet.engine_counters import SHARE_TOKENS_MIN
from router.core.fleet.lease import Lease, LeaseMeasurements, LeasePrompt, PrefillBatch
from router.core.fleet.lease_learning import learn
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.types.placements import Confidence, EndReason, Outcome, PlacementReason, Receipt, Usage
from router.core.types.replicas import Load, Replica, ServedModel

RECEIPT = Receipt("a", "warm", PlacementReason.COLD, Confidence.ESTIMATED, 0, 0)


def lease(id_: int, *, prefill_ms: float = 100.0, streams: bool = True, now_s: float = 0.0, tokens: int = 50) -> Lease:
    """A placed request of which only the queue matters."""
    return Lease(
        id=id_,
        replica="a",
        receipt=RECEIPT,
        placed_s=now_s,
        model="m",
        streams=streams,
        prompt=LeasePrompt([], tokens),
        prompt_tokens=tokens,
        cached_tokens=0,
        prefill_ms=prefill_ms,
        measurements=LeaseMeasurements(),
    )


@dataclass
class _NaiveQueue:
    """First in, first out: (lease, modelled ms, whether its first token can be seen); the head works since `since`."""

    waiting: list[tuple[int, float, bool]] = field(default_factory=list)
    since_s: float = 0.0

    def advance(self, now_s: float) -> None:
        while self.waiting and not self.waiting[0][2] and (now_s - self.since_s) * 1e3 >= self.waiting[0][1]:
            self.since_s += self.waiting.pop(0)[1] / 1e3

    def open(self, item: tuple[int, float, bool], now_s: float) -> None:
        self.advance(now_s)
        if not self.waiting:
            self.since_s = now_s
        self.waiting.append(item)

    def leave(self, id_: int, now_s: float) -> None:
        self.advance(now_s)
        if self.waiting and self.waiting[0][0] == id_:
            self.since_s = now_s
        self.waiting = [item for item in self.waiting if item[0] != id_]

    def pending_ms(self, now_s: float) -> float:
        self.advance(now_s)
        done_ms = min((now_s - self.since_s) * 1e3, self.waiting[0][1]) if self.waiting else 0.0
        return sum(ms for _, ms, _ in self.waiting) - done_ms


STEPS = st.tuples(
    st.sampled_from(["open", "open", "first", "close", "close again", "look"]),
    st.integers(0, 7),  # which lease
    st.integers(1, 64).map(lambda n: n / 64),  # seconds since the step before; exact in binary, as are the works
    st.sampled_from([0.0, 125.0, 500.0, 3_000.0]),
    st.booleans(),
)


@given(st.lists(STEPS, max_size=40))
@settings(deadline=None)
def test_pending_work_is_a_queue_and_leases_come_back(steps: list[tuple[str, int, float, float, bool]]) -> None:
    """Pending prefill agrees with a naive queue whatever the order of opens, first tokens and closes, repeated ones
    included; with all leases closed nothing is left in use."""
    member, naive, now_s = ReplicaState(Replica("a")), _NaiveQueue(), 0.0
    leases: list[Lease] = []
    for action, which, gap_s, prefill_ms, streams in steps:
        now_s += gap_s
        if action == "open":
            leases.append(lease(len(leases), prefill_ms=prefill_ms, streams=streams, now_s=now_s))
            member.open(leases[-1], now_s)
            naive.open((leases[-1].id, prefill_ms, streams), now_s)
        elif leases and action != "look":
            chosen = leases[which % len(leases)]
            was_open = chosen.id in member.leases
            if action == "first":
                if was_open and chosen.streams and chosen.first_token_s is None:
                    member.on_first_token(chosen, now_s)
                    naive.leave(chosen.id, now_s)
            else:
                assert member.close(chosen, now_s) == was_open
                naive.leave(chosen.id, now_s)
        if action == "look":
            assert member.queue.pending_ms(now_s) == pytest.approx(naive.pending_ms(now_s))
        assert member.work.kv.own_tokens == 50 * len(member.leases)
    assert member.queue.pending_ms(now_s) == pytest.approx(naive.pending_ms(now_s))
    for open_ in leases:
        member.close(open_, now_s)
    assert (member.leases, member.work.kv.own_tokens, member.queue.pending_ms(now_s)) == ({}, 0, 0.0)


def test_the_head_decays_and_the_rest_waits() -> None:
    """Work under way shrinks with the clock; an overdue head is due any moment, and those behind it still wait."""
    member = ReplicaState(Replica("a"))
    for id_ in (0, 1):
        member.open(lease(id_), 10.0)
    assert [member.queue.pending_ms(now_s) for now_s in (10.0, 10.05, 10.1, 99.0)] == pytest.approx(
        [200, 150, 100, 100]
    )
    member.on_first_token(member.leases[0], 99.0)
    assert member.queue.pending_ms(99.0) == pytest.approx(100.0)


def test_an_answer_that_does_not_stream_leaves_on_time() -> None:
    """Its first token cannot be seen, so its modelled time counts, and the next one starts where it ended."""
    member = ReplicaState(Replica("a"))
    for id_ in (0, 1):
        member.open(lease(id_, streams=False), 0.0)
    assert member.queue.pending_ms(0.15) == pytest.approx(50.0)
    assert member.queue.pending_ms(0.25) == 0.0


def test_service_time_is_without_the_queue() -> None:
    """A first token's service time starts at the first token before it, not at placement."""
    member = ReplicaState(Replica("a"))
    first, second = lease(0, now_s=1.0), lease(1, now_s=1.0)
    member.open(first, 1.0)
    member.open(second, 1.0)
    member.on_first_token(first, 1.3)
    member.on_first_token(second, 1.4)
    assert first.measurements.service_ms == pytest.approx(300.0)
    assert second.measurements.service_ms == pytest.approx(100.0)


def test_a_batch_takes_its_time_once() -> None:
    """First tokens that come together share, by their tokens, the time since the batch could begin, whichever of them
    is seen first; one that was asked for after them, or comes later, is no part of it."""
    member = ReplicaState(Replica("a"))
    leases = [lease(n, now_s=placed_s, tokens=100 * (n + 1)) for n, placed_s in enumerate((1.0, 1.1, 1.2, 1.25, 1.503))]
    for each in leases:
        member.open(each, each.placed_s)
    for n, now_s in ((1, 1.5), (2, 1.502), (0, 1.502), (4, 1.504), (3, 1.6)):
        member.on_first_token(leases[n], now_s)
    assert [each.measurements.service_ms for each in leases] == pytest.approx([502 / 6, 502 / 3, 502 / 2, 96.0, 1.0])


def test_what_the_engine_computed_is_a_part_of_the_batch() -> None:
    """Of two prompts in a batch one was believed cached and was not: when the engine says so, both have the time that
    their tokens took, whichever answer ends first."""
    fleet = Fleet()
    fleet.replace([Replica("a")])
    member, miss, other = fleet.members["a"], lease(0, tokens=9_000), lease(1, tokens=1_000)
    miss.cached_tokens = 8_000
    for each in (miss, other):
        member.open(each, 0.0)
    for each in (miss, other):
        member.on_first_token(each, 1.0)
    assert miss.measurements.service_ms == other.measurements.service_ms == pytest.approx(500.0)
    for each, tokens in ((miss, 9_000), (other, 1_000)):
        learn(member, each, Outcome(EndReason.OK, Usage(tokens, 5, 0)), 2.0)
    assert (miss.measurements.service_ms, other.measurements.service_ms) == pytest.approx((900.0, 100.0))
    assert member.prefill_model.ms(9_000, 0) == pytest.approx(900.0, rel=0.1)


def test_prompts_of_no_known_size_have_no_service_time() -> None:
    """Nothing is learned from them, and nothing fails."""
    fleet = Fleet()
    fleet.replace([Replica("a")])
    member, empty = fleet.members["a"], lease(0, tokens=0)
    member.open(empty, 0.0)
    member.on_first_token(empty, 0.4)
    learn(member, empty, Outcome(EndReason.OK, None), 1.0)
    assert empty.measurements.service_ms is None
    assert (fleet.means.common.shorts, fleet.means.common.prefill.observations) == (0, 0)


@given(
    st.lists(st.lists(st.integers(1, 64).map(lambda n: 25 * n), min_size=1, max_size=5), min_size=1, max_size=6),
    st.randoms(),
)
@settings(deadline=None)
def test_what_was_served_is_the_time_it_took(batches: list[list[int]], rng: Random) -> None:
    """However an engine puts prompts together, and in whatever order their first tokens are seen, their service times
    add up to the time in which it was busy, and each is what its tokens took at the engine's speed."""
    member, now_s = ReplicaState(Replica("a")), 1.0
    placed = [[lease(100 * n + i, now_s=now_s, tokens=t) for i, t in enumerate(b)] for n, b in enumerate(batches)]
    for batch in placed:
        for each in batch:
            member.open(each, now_s)
    for batch in placed:
        now_s += sum(each.uncached_tokens for each in batch) / 1_000
        for each in rng.sample(batch, len(batch)):
            member.on_first_token(each, now_s)
            now_s += 1e-6
    for batch in placed:
        for each in batch:
            assert each.measurements.service_ms == pytest.approx(each.uncached_tokens, rel=1e-3)


def test_the_fastest_in_a_batch_is_not_the_fastest() -> None:
    """A replica that prefills two prompts together is learned to be as fast as it is, though one of their first tokens
    comes at once behind the other's."""
    fleet = Fleet()
    fleet.replace([Replica("a")])
    member, usage = fleet.members["a"], Usage(2_000, 5, 0)
    pair = [lease(n, tokens=2_000) for n in range(2)]
    for each in pair:
        member.open(each, 0.0)
    for each in pair:
        member.on_first_token(each, 0.4)
    for each in reversed(pair):
        learn(member, each, Outcome(EndReason.OK, usage), 1.0)
        assert member.prefill_model.ms(2_000, 0) == pytest.approx(200.0, rel=0.1)


def test_a_new_set_of_replicas_is_swapped_in() -> None:
    """Who stays keeps its state, who left is gone, who joined is not ready before it answers."""
    fleet = Fleet()
    assert fleet.replace([Replica("a"), Replica("b")]) == (["a", "b"], [])
    fleet.observe_health("a", ok=True)
    kept = fleet.members["a"]
    assert fleet.replace([Replica("c"), Replica("a")]) == (["c"], ["b"])
    assert fleet.members["a"] is kept
    assert [member.id for member in fleet.ready()] == ["a"]


def test_models_are_those_of_ready_replicas() -> None:
    """A model served only by an unfit replica is not offered."""
    fleet = Fleet()
    fleet.replace([Replica("a"), Replica("b")])
    for id_, names in {"a": ["m", "x"], "b": ["y"]}.items():
        fleet.observe_models(fleet.members[id_], [ServedModel(name) for name in names])
    fleet.observe_health("a", ok=True)
    assert fleet.model_names() == {"m", "x"}


def test_who_is_ready_follows_every_observation() -> None:
    """Health, models and departures change at once who is ready, and who serves what, in discovery's order."""
    fleet = Fleet()
    fleet.replace([Replica(id_) for id_ in "abc"])
    assert (fleet.ready(), fleet.list_serving("m")) == ([], [])
    for id_ in "cab":
        fleet.observe_models(fleet.members[id_], [ServedModel("m"), ServedModel(id_)])
        assert fleet.observe_health(id_, ok=True)
    assert [m.id for m in fleet.ready()] == [m.id for m in fleet.list_serving("m")] == ["a", "b", "c"]
    fleet.observe_models(fleet.members["b"], [ServedModel("b")])
    assert [m.id for m in fleet.list_serving("m")] == ["a", "c"]
    assert fleet.observe_health("a", ok=False, proof=True)
    assert not fleet.observe_health("a", ok=False, proof=True)
    assert [m.id for m in fleet.ready()] == ["b", "c"]
    assert [m.id for m in fleet.list_serving("m")] == ["c"]
    fleet.replace([Replica("a"), Replica("b")])
    assert ([m.id for m in fleet.ready()], fleet.list_serving("m")) == (["b"], [])
    assert not fleet.observe_health("c", ok=True)


def test_a_replica_speaks_for_itself_once_it_has_answered() -> None:
    """The fleet's prefill model is the prior; one observation makes a replica's own."""
    fleet = Fleet()
    fleet.replace([Replica("a"), Replica("b")])
    slow, usage = lease(0, tokens=8_000), Usage(10_000, 5, 2_000)
    slow.measurements.batch, slow.measurements.batch_tokens = PrefillBatch(0.0, 0.0, 8.0, 8_000), 8_000
    for n in range(30):
        learn(fleet.members["a"], slow, Outcome(EndReason.OK, usage), float(n))
    own, others = fleet.members["a"].prefill_model, fleet.members["b"].prefill_model
    assert own.ms(8_000, 2_000) == pytest.approx(8_000, rel=0.1)
    assert others == fleet.means.common.prefill.model
    assert fleet.means.common.mean_open_ms > 0
    assert fleet.means.common.mean_work_ms > 0


def probed(member: ReplicaState, sent_tokens: int, seen_total: float) -> float:
    """Send a request, let the engine count, and say what our share is now."""
    member.open(lease(len(member.leases), tokens=sent_tokens), 0.0)
    member.observe_load(Load(prompt_tokens_total=seen_total))
    return member.counters.share


def test_our_share_of_a_replica_is_learned() -> None:
    """A replica that computes twice what we send is half ours; one that counts what we send is all ours."""
    ours, shared = ReplicaState(Replica("a")), ReplicaState(Replica("b"))
    for n in range(40):
        all_, half = probed(ours, 5_000, n * 5_000.0), probed(shared, 5_000, n * 10_000.0)
        if n * 5_000 < SHARE_TOKENS_MIN / 2:
            assert all_ == half == 1.0
    assert all_ == 1.0
    assert half == pytest.approx(0.5, abs=0.05)


def test_a_restarted_or_silent_engine_teaches_no_share() -> None:
    """Counters that are absent or went back change nothing."""
    member = ReplicaState(Replica("a"))
    for total in (10_000_000.0, 5.0, None, 20_000_000.0):
        member.observe_load(Load(prompt_tokens_total=total))
    assert (member.counters.share, member.counters.engine_prompt_tokens) == (1.0, 0.0)


def test_foreign_load_is_the_mean_of_the_last_probes() -> None:
    """Waiting requests beyond ours are somebody else's, as many as the last three probes saw on the mean; ours never
    are."""
    member = ReplicaState(Replica("a"))
    for id_ in range(3):
        member.open(lease(id_), 0.0)
    seen = []
    for waiting in (2, 3, 9, 9, 9, 3, None, None):
        member.observe_load(Load(waiting=waiting))
        seen.append(member.counters.untracked_waiting)
    assert seen == [0, 0, 2, 4, 6, 4, 2, 0]


# -- held until it is warm -------------------------------------------------------------------------------------------


def fleet_of(**models: tuple[str, ...]) -> Fleet:
    """Ready members that serve these."""
    fleet = Fleet()
    fleet.replace(Replica(id_) for id_ in models)
    for id_, names in models.items():
        fleet.observe_models(fleet.members[id_], [ServedModel(name) for name in names])
        fleet.observe_health(id_, True)
    return fleet


def test_who_is_held_gets_nothing_while_others_serve() -> None:
    """Not what it serves, either; and all again when it is let go. Telling it twice is no news."""
    fleet = fleet_of(a=("m",), b=("m",))
    assert fleet.warm_up("b", True)
    assert not fleet.warm_up("b", True)
    assert [[m.id for m in members] for members in (fleet.ready(), fleet.usable(), fleet.list_serving("m"))] == [
        ["a"]
    ] * 3
    assert list(fleet.warming_up) == ["b"]
    assert not fleet.panics
    assert fleet.warm_up("b", False)
    assert [m.id for m in fleet.list_serving("m")] == ["a", "b"]
    assert not fleet.warming_up
    assert not fleet.warm_up("nobody", True)


def test_nobody_is_held_whose_model_nobody_else_serves() -> None:
    """Nor is it any more from the moment on that the others are gone; then again, once they are back."""
    fleet = fleet_of(a=("m",), b=("m", "lora"))
    fleet.warm_up("b", True)
    assert [m.id for m in fleet.list_serving("lora")] == ["b"]
    fleet.observe_models(fleet.members["b"], [ServedModel("m")])
    assert [m.id for m in fleet.ready()] == ["a"]
    fleet.observe_health("a", False, proof=True)
    assert [m.id for m in fleet.list_serving("m")] == ["b"]
    assert not fleet.warming_up
    fleet.observe_health("a", True)
    assert [m.id for m in fleet.list_serving("m")] == ["a"]


def test_not_all_are_held() -> None:
    """Where all are to be warmed, all serve."""
    fleet = fleet_of(a=("m",), b=("m",))
    fleet.warm_up("a", True)
    fleet.warm_up("b", True)
    assert [m.id for m in fleet.ready()] == ["a", "b"]
