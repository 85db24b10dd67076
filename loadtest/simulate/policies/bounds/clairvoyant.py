"""An upper bound: the best greedy placement with knowledge of the engines' state and of all future requests.

    argmin first token(q, r) + lost(q, r)

First token is the true wait and the true prefill on the replica (ground_truth.py). The prefill is of the tokens that
are really not cached, and that the replica does not compute for another request at the moment. Lost is the prefill of
the blocks that this request would evict there and that a later request needs. With arrivals at given times a block
counts only if it is needed before it would be evicted anyway, by the turnover of the replica's cache until now. All
seconds have the same weight; no constant is tuned. A copy of a block on another replica reduces no loss: in the race
that was worse on sessions, because their next turn then had no replica to return to.

It is greedy: it considers one request at a time, and a schedule of all of them would be better still. So it is a mark
for the worth of knowledge, and not a proof of a limit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice
from math import inf

from loadtest.simulate.engine.placer import SimView
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.shared_cache import known_depth
from loadtest.simulate.engine.workload import SimRequest, Workload
from loadtest.simulate.policies.active import ActiveBlocks
from loadtest.simulate.policies.base import SimPolicy
from loadtest.simulate.policies.bounds.ground_truth import GroundTruth, Work, work
from router.core.placement.policies import Policy
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision


class Future:
    """Times of the next requests for each block. Closed loops have no times: every future use counts as soon."""

    def __init__(self, workload: Workload) -> None:
        self._uses: dict[int, list[float]] = {}
        self._begun: set[SimRequest] = set()
        turns = [turn for session in workload.sessions for turn in session]
        for turn in sorted(turns, key=lambda turn: -turn.at_s):
            at_s = turn.at_s if workload.open else 0.0
            for key in turn.engine_keys:
                self._uses.setdefault(key, []).append(at_s)

    def begin(self, turn: SimRequest) -> None:
        """Count a turn as sent now; a second try is not a second use."""
        if turn not in self._begun:
            self._begun.add(turn)
            for key in turn.engine_keys:
                self._uses[key].pop()

    def asked_before(self, key: int, when_s: float) -> bool:
        """True if the next use is before `when_s`."""
        uses = self._uses.get(key)
        return bool(uses) and uses[-1] < when_s  # type: ignore[index]


class Clairvoyant(SimPolicy):
    """Policy with true knowledge. All routers of one world share that knowledge."""

    name = "clairvoyant"

    def __init__(self) -> None:
        self._truth = GroundTruth({})
        self._computing: dict[str, ActiveBlocks] = {}
        self._future = Future(Workload("", (), True, 1))
        self._at: dict[SimRequest, str] = {}
        self._own: dict[str, Work] = {}

    def prepare_run(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """Receive the replicas and the workload."""
        if isinstance(first, Clairvoyant) and first is not self:
            self._truth, self._future, self._computing = first._truth, first._future, first._computing  # noqa: SLF001
            return
        self._truth, self._future = GroundTruth(replicas), Future(workload)
        self._computing = {name: ActiveBlocks() for name in replicas}

    def see(self, sight: SimView) -> None:
        """Keep the router's input and count the turn as sent."""
        super().see(sight)
        self._future.begin(sight.turn)

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the candidate with the lowest price; of several, the fewest requests in flight and then the first."""
        prices = {c.id: (self._price_s(c.id), c.in_flight) for c in candidates}
        return PolicyDecision(min(prices, key=prices.__getitem__))

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Count the request as waiting on the replica, and its blocks as present there."""
        self._truth.add_waiting(turn, replica, self._own[replica])
        self._computing[replica].add(turn.engine_keys)
        self._at[turn] = replica

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self._truth.remove_waiting(turn, replica)
        if self._at.pop(turn, None) is not None:
            self._computing[replica].remove(turn.engine_keys)

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Remove the request from those that wait."""
        self.first_token(turn, replica, now_s)

    def _price_s(self, name: str) -> float:
        turn, now_s, replica = self.sight.turn, self.sight.now_s, self._truth.replicas[name]
        size, pool = replica.block_tokens, replica.model.pool
        keys = turn.engine_keys[: (turn.prompt_tokens - 1) // size]
        depth = known_depth(keys, _CacheOrQueue(pool.cached, self._computing[name]))
        own = self._own[name] = work(turn.prompt_tokens - depth * size, depth * size)
        missing = -(-(turn.prompt_tokens + turn.output_tokens) // size) - depth
        before = int(self._truth.waiting_tokens(name) // size)
        soon_s = now_s + now_s * pool.blocks_n / pool.evicted_blocks if pool.evicted_blocks else inf
        evicted = islice(pool.to_evict(), before, before + missing)
        lost = sum(1 for key in evicted if self._future.asked_before(key, soon_s))
        lost_s = replica.times.mixed_s(lost * size, 0.0, 0, 0) - replica.times.mixed_s(0, 0.0, 0, 0)
        return self._truth.first_token_s(name, own, now_s) + lost_s


class _CacheOrQueue:
    """Blocks that are in one or the other."""

    def __init__(self, one: Container[int], other: Container[int]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
