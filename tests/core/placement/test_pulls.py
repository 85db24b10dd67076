"""When a replica is to bring a prompt from another one's memory, from which, and what that teaches."""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import dataclass, field

import pytest

from router.core.estimators.tier_load import LoadModel
from router.core.fleet import stall_detector
from router.core.fleet.lease import Lease
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain, token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, EndReason, Outcome, PlacementReason, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec
from router.core.types.tiers import CPU, PEER
from tests.core.placement.tiered_fleet import PULL_GUESS, TOKENS, TieredFleet
from tests.core.ready import router_of
from tests.support.examples import examples

RUNS = examples(int(os.environ.get("WARMROUTE_PULL_RUNS", "300")))


def _fleet(names: str = "abc") -> TieredFleet:
    """Replicas that send each other what their memory holds; `a` has a prompt there and on its GPU."""
    fleet = TieredFleet(names)
    for name in names:
        fleet.router.set_p2p_address(name, f"{name}:5710")
    fleet.says("a", "GPU", "CPU")
    return fleet


def _busy(fleet: TieredFleet, name: str, prompts: int = 3) -> None:
    """Prompts that nobody holds wait there."""
    for seed in range(90, 90 + prompts):
        fleet.place(seed=seed, only=name)


def test_a_pull_beats_waiting_and_computing() -> None:
    """Where the holder has work that waits, an idle replica brings the prompt from the holder's memory instead of
    computing it; the receipt tells from where, and how much."""
    fleet = _fleet()
    _busy(fleet, "a")
    lease = fleet.place()
    pull = lease.receipt.pull
    assert pull is not None
    assert (lease.replica in "bc", pull.source, pull.address, pull.tokens) == (True, "a", "a:5710", TOKENS)
    assert pull.fetch_ms == pytest.approx(PULL_GUESS.ms(TOKENS))
    assert (lease.receipt.reason, lease.receipt.spill) == (PlacementReason.PULL, "")
    assert (lease.receipt.predicted_cached_tokens, lease.cached_tokens) == (TOKENS, TOKENS)
    assert lease.expected_ms == pytest.approx(pull.fetch_ms + pull.uncached_ms)


def test_the_holder_is_asked_while_it_is_idle() -> None:
    """Nothing is pulled where the prompt can be had at once."""
    lease = _fleet().place()
    assert (lease.replica, lease.receipt.pull) == ("a", None)


def test_a_slow_way_is_left_alone() -> None:
    """Where pulling takes longer than computing, the prompt is computed."""
    fleet = _fleet()
    fleet.router.fleet.means.load_guesses[PEER] = LoadModel(1_000.0, 0.1)
    _busy(fleet, "a")
    lease = fleet.place()
    assert (lease.replica == "a", lease.receipt.pull, lease.receipt.spill) == (False, None, "queue")


def test_what_only_a_gpu_holds_is_not_pulled() -> None:
    """The source's GPU has all of it and its memory a half: a half comes."""
    fleet = TieredFleet("ab")
    for name in "ab":
        fleet.router.set_p2p_address(name, f"{name}:5710")
    fleet.says("a", "GPU")
    _busy(fleet, "a")
    assert fleet.place().receipt.pull is None
    fleet = TieredFleet("ab")
    for name in "ab":
        fleet.router.set_p2p_address(name, f"{name}:5710")
    fleet.says("a", "GPU")
    fleet.says("a", "CPU", blocks=500)
    _busy(fleet, "a")
    pull = fleet.place().receipt.pull
    assert pull is not None
    assert pull.tokens == TOKENS // 2


def test_a_source_that_rests_is_left_alone() -> None:
    """Until its time is over; one without an address is none at all."""
    fleet = _fleet("ab")
    _busy(fleet, "a")
    fleet.router.fleet.pulls.rest("a", fleet.now_s + 10)
    assert fleet.place(only="b").receipt.pull is None
    fleet.now_s += 10
    fleet.says("a", "GPU", "CPU", seed=1)
    assert fleet.place(only="b", seed=1).receipt.pull is not None
    fleet.says("a", "GPU", "CPU", seed=2)
    fleet.router.set_p2p_address("a", "")
    assert fleet.place(only="b", seed=2).receipt.pull is None


def test_pulls_from_one_source_are_a_queue() -> None:
    """The next one waits for those before it, which go on with the clock, and another source that has as much is asked
    instead; a pull that is over, or whose client has left, is waited for no longer."""
    fleet = _fleet()
    fleet.says("a", "GPU", "CPU", seed=1)
    first = fleet.place(only="b")
    assert first.receipt.pull is not None
    took_ms = PULL_GUESS.ms(TOKENS)
    second = fleet.place(only="c", seed=1)
    assert second.receipt.pull is not None
    assert second.receipt.pull.fetch_ms == pytest.approx(2 * took_ms)
    pulls = fleet.router.fleet.pulls
    fleet.now_s += took_ms / 2 / 1e3
    assert pulls.pending_ms("a", "c", fleet.now_s) == pytest.approx(1.5 * took_ms)
    fleet.router.first_token(first, fleet.now_s)
    assert pulls.pending_ms("a", "c", fleet.now_s) == pytest.approx(took_ms)
    fleet.router.finish(second, Outcome(EndReason.CLIENT_LEFT), fleet.now_s)
    assert pulls.pending_ms("a", "c", fleet.now_s) == 0.0
    for seed in (2, 3):
        fleet.says("a", "GPU", "CPU", seed=seed)
    fleet.says("b", "GPU", "CPU", seed=3)
    assert fleet.place(only="c", seed=2).receipt.pull is not None
    third = fleet.place(only="c", seed=3).receipt.pull
    assert third is not None
    assert third.source in "ab"


def test_a_replica_that_leaves_ends_its_pulls() -> None:
    """Its source is free once its requests are given back, whichever of the two is gone by then."""
    for gone in "ab":
        fleet = _fleet()
        lease = fleet.place(only="b")
        assert lease.receipt.pull is not None
        fleet.router.replace(Replica(name) for name in "abc" if name != gone)
        fleet.router.finish(lease, Outcome(EndReason.FAILED), fleet.now_s)
        peers = fleet.router.fleet.pulls.peers
        assert gone not in peers
        assert not any(len(link) for peer in peers.values() for link in (peer.outgoing, peer.incoming))


def test_pulls_are_learned_for_each_pair() -> None:
    """What a first token took beyond the modelled prefill is the pull's. 40 answers show each of two pairs to within
    10 %, one of them four times slower than the other; and nothing of prefill."""
    fleet = _fleet()
    truths = {"b": LoadModel(20.0, 0.007), "c": LoadModel(80.0, 0.028)}
    for seed in range(1, 81):
        fleet.says("a", "GPU", "CPU", seed=seed)
        to = "bc"[seed % 2]
        lease = fleet.place(only=to, seed=seed)
        assert lease.receipt.pull is not None
        fleet.answers(lease, (truths[to].ms(TOKENS) + lease.prefill_ms) / 1e3, TOKENS)
        fleet.now_s += 10.0
    pulls, members = fleet.router.fleet.pulls, fleet.router.fleet.members
    for to, truth in truths.items():
        learned = pulls.model("a", to, members[to].speeds.loads)
        assert learned.ms(TOKENS) == pytest.approx(truth.ms(TOKENS), rel=0.1)
        assert members[to].own_speed.prefill_factor.observations == 0


def test_a_pull_that_brought_nothing_teaches_nothing() -> None:
    """Neither how long pulls take, nor that the replica's own events are wrong."""
    fleet = _fleet("ab")
    lease = fleet.place(only="b")
    fleet.answers(lease, 2.0, 0)
    assert not fleet.router.fleet.pulls._fits
    assert fleet.router.knowledge.checks("b") == (1, 1)
    assert fleet.router.knowledge.grade_of("b")[0] is Confidence.EXACT


def test_a_replica_that_pulls_is_not_late() -> None:
    """Its silence says nothing of the replica, which may wait for its source: the proxy has a limit of its own for
    that. A request beside it that pulls nothing is late as ever."""
    fleet = _fleet("ab")
    member = fleet.router.fleet.members["b"]
    member.speeds.prefill.observations = 100
    fleet.router.fleet.means.load_guesses[PEER] = LoadModel(700.0, 0.0)
    lease = fleet.place(only="b")
    assert lease.receipt.pull is not None
    quick = fleet.place(only="b", seed=50)
    assert quick.receipt.pull is None
    assert not stall_detector.is_late(member, lease, fleet.now_s + 200.0, 3.0)
    assert stall_detector.is_late(member, quick, fleet.now_s + 200.0, 3.0)


def test_without_peers_nothing_is_different() -> None:
    """A fleet that has tiers and no peer decides as before, with nothing in receipts."""
    fleet = TieredFleet("abc")
    fleet.says("a", "GPU", "CPU")
    _busy(fleet, "a")
    lease = fleet.place()
    assert (lease.receipt.pull, lease.receipt.spill) == (None, "queue")


# Histories

NAMES = "abc"
BLOCK, BLOCKS = 16, 12
IDENTITIES = (("", b""), ("", b"tenant-1"), ("", b"tenant-2"), ("lora", b""))
MEDIUMS = ("GPU", "CPU", "STORAGE")
BOTH = "GPU and CPU"  # as an engine that offloads all that it computes


_Step = tuple[str, str, int, int, str, int, int]
"""(what, replica, prompt, identity, medium or ending, first block or milliseconds, blocks)"""


@dataclass(slots=True)
class _Truth:
    """What engines hold, by replica and medium, as keys that name a prompt's beginning and its identity."""

    held: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    proved: set[str] = field(default_factory=set)
    resting_s: dict[str, float] = field(default_factory=dict)

    def of(self, name: str, medium: str) -> set[int]:
        """Keys that a replica has there."""
        return self.held.setdefault((name, medium), set())


def _keys(prompt: int, identity: int) -> tuple[bytes, list[int]]:
    adapter, salt = IDENTITIES[identity]
    ids = array("I", [prompt * 1_000 + n for n in range(BLOCK * BLOCKS + 5)]).tobytes()
    return ids, token_chain(ids, BLOCK, token_root(adapter, salt, BLOCK))


def _history(rng: random.Random) -> list[_Step]:
    """Random steps: what engines store and lose, requests, and what becomes known of addresses."""
    steps = list[_Step]()
    for _ in range(rng.randint(20, 60)):
        kind, name, identity = rng.random(), rng.choice(NAMES), rng.randrange(len(IDENTITIES))
        if kind < 0.4:
            what, how = rng.choice(("store",) * 4 + ("remove", "clear")), rng.choice((BOTH,) * 4 + MEDIUMS)
            first, number = rng.choice((0, 0, 0, 1, 4, BLOCKS - 1)), rng.choice((BLOCKS, BLOCKS, 1, 5))
            steps.append((what, name, rng.randrange(2), identity, how, first, number))
        elif kind < 0.8:
            how = rng.choice(("ok", "left", "open"))
            steps.append(("place", rng.choice(("", *NAMES)), rng.randrange(2), identity, how, rng.randrange(3_000), 0))
        else:
            what = rng.choice(("prove", "prove", "doubt", "rest", "restart"))
            steps.append((what, name, 0, 0, "", 0, rng.randint(0, 5)))
    return steps


@pytest.mark.timeout(1_800)
def test_no_pull_is_wrong() -> None:
    """Whatever is stored, evicted, proved, rested, restarted and asked: nothing is pulled from the replica itself, from
    one whose address is not proved or that rests, for another identity, or that the source's CPU memory lacks. Every
    second history has a pull, or they would show nothing."""
    pulls = 0
    for seed in range(RUNS):
        history = _History()
        try:
            history.run(_history(random.Random(seed)))
        except AssertionError as error:
            error.add_note(f"history {seed}")
            raise
        pulls += history.pulls
    assert pulls > 0.3 * RUNS


class _History:
    """Three replicas whose computing is slow and whose pulls are quick, so that nearly every pull that may be is."""

    def __init__(self) -> None:
        self.router = router_of(NAMES, load_guesses={CPU: LoadModel(1, 0.001), PEER: LoadModel(0.0, 0.0)})
        self.truth, self.now_s, self.pulls = _Truth(), 100.0, 0
        for name in NAMES:
            self.router.observations.observe_models(name, [ServedModel("m"), ServedModel("lora", parent="m")])
            self._join(name)
            self._change("prove", name, 0)

    def _join(self, name: str) -> None:
        self.router.knowledge.set_untokenizable(name, "")
        self.router.knowledge.grade(name, Confidence.EXACT, "joined", self.now_s)
        self.router.observations.observe_load(name, Load(kv_tokens_max=200_000, block_tokens=BLOCK))
        self._event("store", name, 2, 1, "GPU", 0, 1)  # a salted block: it is an engine whose events name salts

    def run(self, history: list[_Step]) -> None:
        """All of it, in its order."""
        for what, name, prompt, identity, how, first, count in history:
            self.now_s += 0.01
            if what == "place":
                self._place(name, prompt, identity, how, first)
            elif what in {"store", "remove", "clear"}:
                for medium in ("GPU", "CPU") if how == BOTH else (how,):
                    self._event(what, name, prompt, identity, medium, first, count)
            else:
                self._change(what, name, count)

    def _event(self, what: str, name: str, prompt: int, identity: int, medium: str, first: int, count: int) -> None:
        ids, keys = _keys(prompt, identity)
        adapter, salt = IDENTITIES[identity]
        first = 0 if medium == "GPU" or what == "clear" else first
        some, held = keys[first : first + count], self.truth.of(name, medium)
        if what == "clear":
            self.router.knowledge.apply(name, Cleared(), self.now_s)
            for each in MEDIUMS:
                self.truth.of(name, each).clear()
        elif what == "remove":
            gone = [key for key in some if key in held]
            if gone:
                self.router.knowledge.apply(name, Removed(gone, medium, 0), self.now_s)
                held.difference_update(gone)
        elif not first or keys[first - 1] in set().union(*(self.truth.of(name, each) for each in MEDIUMS)):
            fresh = [key for key in some if key not in held]
            at = keys.index(fresh[0]) if fresh else 0
            if fresh and fresh == keys[at : at + len(fresh)]:
                parent = keys[at - 1] if at else None
                told = ids[4 * BLOCK * at : 4 * BLOCK * (at + len(fresh))]
                event = Stored(fresh, parent, told, BLOCK, adapter, salt, None, medium, 0, prefix=True)
                self.router.knowledge.apply(name, event, self.now_s)
                held.update(fresh)

    def _change(self, what: str, name: str, count: int) -> None:
        if what == "prove":
            self.router.set_p2p_address(name, f"{name}:5710")
            self.truth.proved.add(name)
        elif what == "doubt":
            self.router.set_p2p_address(name, "")
            self.truth.proved.discard(name)
            self.truth.resting_s.pop(name, None)
        elif what == "rest":
            until_s = self.now_s + count / 50
            self.router.fleet.pulls.rest(name, until_s)
            if name in self.truth.proved:
                self.truth.resting_s[name] = max(until_s, self.truth.resting_s.get(name, 0.0))
        else:
            self.router.observations.forget(name)
            self._event("clear", name, 0, 0, "GPU", 0, 0)

    def _place(self, only: str, prompt: int, identity: int, ending: str, tokens: int) -> None:
        ids, keys = _keys(prompt, identity)
        adapter, salt = IDENTITIES[identity]
        token_prompt = TokenPrompt(ids, adapter, salt, {BLOCK: keys})
        ask = RequestSpec("m", Prompt(text=b"", first_user_end=0, skipped_bytes=len(ids)), stream=True)
        wanted = PlacementRequest(ask, adapter or "m", Chain([], 0, prompt, (), 0), "key", token_prompt)
        lease = self.router.route(wanted, self.now_s, only=only or None)
        self._check(lease, keys)
        if ending != "open":
            self.router.first_token(lease, self.now_s + tokens / 1e3)
            how = EndReason.OK if ending == "ok" else EndReason.CLIENT_LEFT
            usage = Usage(len(ids) // 4, 3, lease.cached_tokens) if ending == "ok" else None
            self.router.finish(lease, Outcome(how, usage), self.now_s + tokens / 1e3)

    def _check(self, lease: Lease, keys: list[int]) -> None:
        pull, truth = lease.receipt.pull, self.truth
        if pull is None:
            return
        self.pulls += 1
        assert pull.source != lease.replica
        assert {pull.source, lease.replica} <= truth.proved
        assert pull.address == f"{pull.source}:5710"
        assert truth.resting_s.get(pull.source, 0.0) <= self.now_s
        end = lease.cached_tokens // BLOCK
        assert lease.cached_tokens % BLOCK == 0 < pull.tokens
        assert set(keys[:end]) <= truth.of(pull.source, "CPU")
