"""Histories of pairs: whatever is discovered, proved, warmed, placed and ended in whatever order, no pair is a wrong
one, and nothing is left of what is over."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.core.fleet.lease import Lease
from router.core.fleet.models import NoReplicaReady
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from tests.core.placement.paired import PairedFleet
from tests.core.work import interpreted, steps
from tests.support.examples import examples

RUNS = examples(int(os.environ.get("WARMROUTE_SPLIT_RUNS", "300")))
ROLES = {"p": Role.PREFILL, "q#dp0": Role.PREFILL, "b": Role.BOTH, "d": Role.DECODE, "q#dp1": Role.DECODE}
NAMES = list(ROLES)
REVISIONS, MODELS, BLOCKS = ("", "1", "2"), ("m", "other"), (16, 32)
ENDINGS = (EndReason.OK, EndReason.OK, EndReason.FAILED, EndReason.CLIENT_LEFT)


@dataclass(slots=True)
class _Truth:
    """What is known of one replica."""

    revision: str = ""
    model: str = "m"
    block_tokens: int = 16
    handshake: KvConnector | None = KvConnector.NIXL
    last: KvConnector | None = KvConnector.NIXL  # how it shook hands when it last did
    there: bool = True


@dataclass(slots=True)
class History:
    """Five replicas, two of them ranks of one server, and the requests under way."""

    rng: random.Random
    fleet: PairedFleet = field(default_factory=lambda: PairedFleet(ROLES, pair=False))
    truth: dict[str, _Truth] = field(default_factory=lambda: {name: _Truth() for name in NAMES})
    warm: set[tuple[str, str]] = field(default_factory=set)
    warming: list[tuple[str, str]] = field(default_factory=list)
    open: list[Lease] = field(default_factory=list)
    splits: int = 0

    def run(self, steps: int) -> None:
        """So many random steps, and then the end of all that is under way."""
        for name in NAMES:
            self.fleet.router.disaggregator.set_connector(name, KvConnector.NIXL, f"{name}:8998")
        for _ in range(self.rng.choice((1, 3, 12))):
            self.look()
            while self.warming and self.rng.random() < 0.9:
                self.told()
        self.open += self.fleet.streams("b", "d", "q#dp1", count=3)
        acts = (self.place,) * 8 + (self.end,) * 4 + (self.first_token,) * 2 + (self.prefilled,) * 3
        for _ in range(steps):
            self.fleet.now_s += self.rng.choice((0.01, 0.5, 3.0))
            self.rng.choice((*acts, self.discover, self.change, self.prove, self.look, self.look, self.told))()
        while self.open:
            self.end()
        assert self.fleet.idle()

    def place(self) -> None:
        """A request that may be split, long or short, of which answers are seen or not."""
        how: dict[str, Any] = {"stream": self.rng.random() < 0.7, "unseen": self.rng.random() < 0.2}
        if self.rng.random() < 0.2:
            how["exclude"] = frozenset(self.rng.sample(NAMES, 1))
        try:
            lease = self.fleet.place(self.rng.randrange(4), self.rng.choice((300, 8_000, 40_000)), **how)
        except NoReplicaReady:
            return
        self.open.append(lease)
        leg = lease.receipt.leg
        if leg is None:
            return
        self.splits += 1
        first, second = self.truth[leg.replica], self.truth[lease.replica]
        assert leg.replica != lease.replica
        assert {leg.replica, lease.replica} != {"q#dp0", "q#dp1"}
        assert ROLES[leg.replica] is not Role.DECODE
        assert ROLES[lease.replica] is not Role.PREFILL
        assert first.revision == second.revision
        assert first.model == second.model == "m"
        assert first.block_tokens == second.block_tokens
        assert first.handshake is second.handshake is leg.connector
        assert first.there
        assert second.there
        assert (leg.replica, lease.replica) in self.warm
        assert not {leg.replica, lease.replica} & how.get("exclude", frozenset())

    def first_token(self) -> None:
        """The first token of any request, maybe not for the first time."""
        if self.open:
            self.fleet.router.first_token(self.rng.choice(self.open), self.fleet.now_s)

    def prefilled(self) -> None:
        """The end of any prefill leg, maybe not for the first time, or of none."""
        if self.open:
            lease, ending = self.rng.choice(self.open), self.rng.choice(ENDINGS)
            usage = Usage(lease.prompt_tokens, 1, self.rng.choice((None, 0, lease.prompt_tokens // 2)))
            self.fleet.router.finish_prefill(
                lease, Outcome(ending, usage if ending is EndReason.OK else None), self.fleet.now_s
            )

    def end(self) -> None:
        """The end of any request, twice now and then."""
        if not self.open:
            return
        lease = self.open.pop(self.rng.randrange(len(self.open)))
        for _ in range(self.rng.choice((1, 1, 2))):
            self.fleet.finish(lease, self.rng.choice(ENDINGS))
        self.fleet.prefilled(lease)

    def discover(self) -> None:
        """Replicas leave and come, and roll out revisions."""
        name = self.rng.choice(NAMES)
        truth = self.truth[name]
        if not truth.there or self.rng.random() < 0.3:
            truth.there = not truth.there
        else:
            truth.revision = self.rng.choice(REVISIONS)
        there = [each for each in NAMES if self.truth[each].there]
        self.fleet.router.replace(
            [Replica(each, role=ROLES[each], revision=self.truth[each].revision) for each in there]
        )
        if not truth.there:
            truth.handshake = truth.last = None
            self._cold(name)
        elif name not in self.fleet.router.disaggregator.pairs.hands:
            self._observe(name)

    def change(self) -> None:
        """A replica serves another model, or has blocks of another size."""
        name = self.rng.choice(NAMES)
        if self.truth[name].there:
            self.truth[name].model = self.rng.choice((*MODELS, "m", "m", "m"))
            self.truth[name].block_tokens = self.rng.choice((*BLOCKS, 16, 16, 16))
            self._observe(name)

    def _observe(self, name: str) -> None:
        router, truth = self.fleet.router, self.truth[name]
        router.fleet.observe_health(name, ok=True)
        router.observations.observe_models(name, [ServedModel(truth.model)])
        router.observations.observe_load(name, Load(kv_tokens_max=2_000_000, block_tokens=truth.block_tokens))

    def prove(self) -> None:
        """A replica shakes hands otherwise than before, not at all, or as ever."""
        name = self.rng.choice(NAMES)
        truth = self.truth[name]
        if truth.there:
            truth.handshake = self.rng.choice((None, KvConnector.NIXL, KvConnector.NIXL, KvConnector.SGLANG))
            self.fleet.router.disaggregator.set_connector(name, truth.handshake, f"{name}:8998")
            if truth.handshake is not None and truth.handshake is not truth.last:
                truth.last = truth.handshake
                self._cold(name)

    def _cold(self, name: str) -> None:
        self.warm = {pair for pair in self.warm if name not in pair}
        self.warming = [pair for pair in self.warming if name not in pair]

    def look(self) -> None:
        """Whoever warms pairs asks which: each replica is in one at most."""
        pairs = self.fleet.router.disaggregator.pairs_to_warm(self.fleet.now_s)
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
        self.warming += pairs

    def told(self) -> None:
        """The warming of a pair went well, or did not."""
        if self.warming:
            pair = self.warming.pop(self.rng.randrange(len(self.warming)))
            ok = self.rng.random() < 0.8
            self.fleet.router.disaggregator.pair_warmed(*pair, ok=ok, now_s=self.fleet.now_s)
            (self.warm.add if ok else self.warm.discard)(pair)


@pytest.mark.timeout(1_800)
def test_no_pair_is_wrong_and_nothing_is_left() -> None:
    """Never a replica with itself or a rank of its own server, never across revisions, models, handshakes or sizes of
    blocks, never before it is warm, never with one that left; no lease, sum or stream outlives its request. Every
    second history splits several requests, or they would show nothing."""
    splits = 0
    for seed in range(RUNS):
        history = History(random.Random(seed))
        try:
            history.run(60)
        except AssertionError as error:
            error.add_note(f"history {seed}")
            raise
        splits += history.splits > 2
    assert splits > RUNS / 2


def test_pairs_are_warmed_once_and_rest_after_a_failure() -> None:
    """A new pair takes no traffic; one that failed is tried again after 5 s, then after 10 s; one that nobody answered
    for has failed; and a pair is not told twice."""
    fleet = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE}, pair=False)
    fleet.streams("d")
    for name in "pd":
        fleet.router.disaggregator.set_connector(name, KvConnector.MOONCAKE, f"{name}:8998")
    router = fleet.router
    assert fleet.place().receipt.leg is None
    assert router.disaggregator.pairs_to_warm(fleet.now_s) == [("p", "d")]
    assert router.disaggregator.pairs_to_warm(fleet.now_s + 59.0) == []
    router.disaggregator.pair_warmed("p", "d", ok=False, now_s=fleet.now_s)
    assert [router.disaggregator.pairs_to_warm(fleet.now_s + after_s) for after_s in (4.9, 5.0)] == [[], [("p", "d")]]
    fleet.now_s += 5.0 + 60.0
    assert router.disaggregator.pairs_to_warm(fleet.now_s) == []
    assert [router.disaggregator.pairs_to_warm(fleet.now_s + after_s) for after_s in (9.9, 10.0)] == [[], [("p", "d")]]
    router.disaggregator.pair_warmed("p", "d", ok=True, now_s=fleet.now_s + 10.0)
    assert fleet.place(2).receipt.leg is not None
    assert router.disaggregator.pairs_to_warm(fleet.now_s + 500.0) == []


def test_a_replica_that_is_back_has_its_pairs() -> None:
    """Nobody answered where it is asked for blocks, once: its pairs take no traffic and are not warmed meanwhile, and
    are warm when it answers as before. Another address, a replica that left, and an engine that is another process are
    strangers."""
    fleet = PairedFleet({"p": Role.PREFILL, "d": Role.DECODE})
    fleet.streams("d")
    router, where = fleet.router, "p:8998"
    assert fleet.place(1).receipt.leg is not None
    router.disaggregator.set_connector("p", None, "")
    assert router.disaggregator.pairs_to_warm(fleet.now_s) == []
    assert fleet.place(2).receipt.leg is None
    router.disaggregator.set_connector("p", KvConnector.NIXL, where)
    assert router.disaggregator.pairs_to_warm(fleet.now_s) == []
    assert fleet.place(3).receipt.leg is not None

    def moves() -> None:
        router.disaggregator.set_connector("p", None, "")
        router.disaggregator.set_connector("p", KvConnector.NIXL, where + "0")

    def leaves() -> None:
        fleet.discover("d")
        fleet.discover("p", "d")
        router.observations.observe_load("p", Load(kv_tokens_max=2_000_000, block_tokens=16))
        router.disaggregator.set_connector("p", KvConnector.NIXL, where)

    for happens in (moves, leaves, lambda: router.observations.forget("p")):
        happens()
        assert router.disaggregator.pairs_to_warm(fleet.now_s) == [("p", "d")]
        router.disaggregator.pair_warmed("p", "d", ok=True, now_s=fleet.now_s)
        assert router.disaggregator.pairs_to_warm(fleet.now_s) == []


def test_a_large_fleet_has_a_limited_number_of_pairs() -> None:
    """200 replicas that do everything would be 39,800 pairs: each has as many partners as 4,096 pairs allow."""
    fleet = PairedFleet(dict.fromkeys([f"r{n}" for n in range(200)], Role.BOTH), pair=False)
    warmed = fleet.pair()
    assert len(warmed) == len(set(warmed)) == 200 * (4_096 // 200)
    assert len({prefill for prefill, _ in warmed}) == len({decode for _, decode in warmed}) == 200


@interpreted
def test_pairs_are_found_once() -> None:
    """Where nothing has changed to find those to be warmed takes a fraction of the work; a pair is new again once one
    of its replicas changed and changed back."""
    fleet = PairedFleet(dict.fromkeys([f"r{n}" for n in range(40)], Role.BOTH), pair=False)
    for name in fleet.roles:
        fleet.router.disaggregator.set_connector(name, KvConnector.NIXL, f"{name}:8998")
    first, later = (steps(lambda: fleet.router.disaggregator.pairs_to_warm(fleet.now_s)) for _ in range(2))
    assert later < first / 3
    fleet.pair()
    for block_tokens in (32, 16):
        fleet.router.observations.observe_load("r0", Load(kv_tokens_max=2_000_000, block_tokens=block_tokens))
        found = fleet.router.disaggregator.pairs_to_warm(fleet.now_s)
    assert {name for pair in found for name in pair} >= {"r0"}


def test_without_handshakes_nothing_is_different() -> None:
    """Replicas whose handshakes nobody proved take whole requests, and no pair is named."""
    fleet = PairedFleet(dict.fromkeys("abcd", Role.BOTH), pair=False)
    fleet.streams("a", "b", "c", "d")
    assert fleet.place().receipt.leg is None
    assert fleet.router.disaggregator.pairs_to_warm(fleet.now_s) == []
