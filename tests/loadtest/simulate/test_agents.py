"""Agents that start sub-agents, on simulated replicas that have other things to do: where sub-agents begin."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from loadtest.common.runs import merged_runs
from loadtest.common.traces import Request
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.placer import SimView
from loadtest.simulate.engine.workload import SimRequest, Workload, prepare
from loadtest.simulate.engine.world import Simulation
from router.core.placement.policies.warm import Warm
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

PIECE_TOKENS = 512
SYSTEM_PIECES = 24  # instructions and tools that all agents of the fleet begin with: some 12,000 tokens
SESSIONS, ACTIVE, REPLICAS = 120, 40, 8
BLOCK_TOKENS = 64
THERE = 0.95


class Session:
    """What one session asks, in its order: an agent that works, and sub-agents that it starts on the way. They begin
    with the instructions that all have, or with the notes on what the session works on too, or with all that their
    parent has said and heard."""

    def __init__(self, number: int, seed: int) -> None:
        self._rng, self._number = random.Random(f"{seed}/{number}"), number
        self._next = 1_000 * (number + 1)
        self._first: dict[str, int] = {}  # tokens up to the end of each agent's first message
        self.requests: list[Request] = []
        notes = [(0, SYSTEM_PIECES), self._more(12)]
        main = [*notes, self._more(8)]
        self._ask(main, "")
        for agent in range(1, self._rng.randrange(3, 6)):
            main = [*main, self._more(3)]
            self._ask(main, "")
            own = [*self._rng.choice((notes[:1], notes, main)), self._more(3)]
            for _ in range(self._rng.randrange(1, 4)):
                self._ask(own, f"agent-{agent}")
                own = [*own, self._more(2)]
        self._ask([*main, self._more(3)], "")

    def _more(self, pieces_max: int) -> tuple[int, int]:
        count = self._rng.randrange(1, pieces_max + 1)
        self._next += count
        return self._next - count, count

    def _ask(self, runs: Sequence[tuple[int, int]], agent: str) -> None:
        tokens = PIECE_TOKENS * sum(count for _, count in runs)
        first = self._first.setdefault(agent, tokens)
        self.requests.append(
            Request(
                at_s=0.0,
                think_s=self._rng.uniform(0.5, 4.0),
                input_tokens=tokens,
                output_tokens=self._rng.randrange(40, 400),
                namespace="agents",
                block_tokens=PIECE_TOKENS,
                runs=merged_runs(list(runs)),
                cuts=(first,) if first < tokens else (),
                agent=agent,
            )
        )


@dataclass(slots=True)
class Watching:
    """The policy of the product, and a look at each placement that it makes."""

    policy: Warm = field(default_factory=Warm)
    cache_aware: bool = True
    name: str = "warm"
    there: int = 0  # first requests of sub-agents that went where as much of them is held as at their parent's replica
    same: int = 0  # those that went to that replica itself
    roomy: int = 0  # all for which that replica had room
    all_: int = 0
    _turn: SimRequest | None = None
    _market: PlacementContext | None = None
    _candidates: Sequence[Candidate] = ()
    _of: dict[tuple[str, str], str] = field(default_factory=dict)  # (session, agent) -> replica of its last prompt

    def order_by_ring(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """As the policy has it."""
        return self.policy.order_by_ring(ring_key, ids)

    def see(self, sight: SimView) -> None:
        """Remember whose request is placed next."""
        self._turn = sight.turn

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Let the policy choose."""
        self._market, self._candidates = market, candidates
        return self.policy.choose(market, candidates)

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Count it, if it is a sub-agent's first request."""
        agent, session = turn.request.agent or "", turn.session
        parent = self._of.get((session, ""))
        if agent and parent and (session, agent) not in self._of:
            self.all_ += 1
            held = {each.id: each.cached_tokens for each in self._candidates}
            if self._has_room(parent):
                self.roomy += 1
                self.there += held[replica] >= held[parent]
                self.same += replica == parent
        self._of[session, agent] = replica

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Nothing is made of it."""

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Nothing is made of it."""

    def _has_room(self, replica: str) -> bool:
        """Nothing waits there for its prefill, and it has no more open requests than the mean replica."""
        assert self._market is not None
        parent = next(each for each in self._candidates if each.id == replica)
        return not parent.wait_ms and parent.in_flight * self._market.replicas <= self._market.in_flight


def run(seed: int, *, told: bool, routers: int = 1) -> list[Watching]:
    """The policies of all routers behind a run."""
    sessions = []
    for number in range(SESSIONS):
        pairs = [(f"s{number}", request) for request in Session(number, seed).requests]
        turns = prepare(pairs, BLOCK_TOKENS, output_tokens_max=1_000)
        for turn in turns:
            turn.kin = turn.kin if told else None
        sessions.append(tuple(turns))
    workload = Workload("agents", tuple(sessions), False, BLOCK_TOKENS, active=ACTIVE, ramp_s=20.0)
    watching: list[Watching] = []

    def policy() -> Watching:
        watching.append(Watching())
        return watching[-1]

    setting = ClusterSpec(replicas=REPLICAS, seed=seed, routers=routers, share_delay_s=0.005 if routers > 1 else None)
    result = Simulation(workload, setting, policy).run()
    assert not [sent for sent in result.sent if sent.failure]
    return watching


@pytest.mark.long
def test_sub_agents_begin_where_their_parents_are() -> None:
    """Of their first requests at least 95 % land where as much of their parent's prefix is held as at their parent's
    replica, where that has room, in the runs of three seeds together; and with each more of them at that very replica
    than without a word of whose they are."""
    all_there = all_roomy = 0
    for seed in (1, 2, 3):
        (told,), (untold,) = run(seed, told=True), run(seed, told=False)
        for name, seen in (("told", told), ("untold", untold)):
            there, same = seen.there / seen.roomy, seen.same / seen.roomy
            with_room = f"{seen.roomy} with room ({seen.all_} in all)"
            print(f"\nseed {seed}, {name}: {there:.1%} of {with_room}, {same:.1%} the same")
        assert told.roomy > 100
        assert told.same / told.roomy > untold.same / untold.roomy
        all_there, all_roomy = all_there + told.there, all_roomy + told.roomy
    assert all_there >= THERE * all_roomy
