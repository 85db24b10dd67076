"""An upper bound: the best greedy placement that knows the engines' state and what will be asked.

    argmin first token(q, r) + lost(q, r)

First token is the true wait and the true prefill there (truth.py), of what is really not cached and is not being
computed there for someone else. Lost is the prefill of what this request would evict there and a later one asks for:
for requests that come when they are due, only if that is before such blocks would be evicted anyway, by how fast the
replica's cache has turned over so far. Each second counts as one; nothing is tuned. (That a block may be held elsewhere
too is not taken off: raced, that was worse on sessions, whose next turn has to come back to someone.)

It is greedy: it looks at one request at a time, and a schedule of all of them would be better still. So it is a mark
to measure the worth of knowledge against, not a proof that nothing can pass it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice
from math import inf

from loadtest.simulate.rules.active import ActiveBlocks
from loadtest.simulate.rules.bounds.truth import Truth, Work, work
from loadtest.simulate.rules.shown import Shown
from loadtest.simulate.world.placer import Sight
from loadtest.simulate.world.replicas import VirtualReplica
from loadtest.simulate.world.shared_cache import known_depth
from loadtest.simulate.world.turns import Turn, Workload
from router.core.facts.placements import Candidate, Choice, Market
from router.core.placement.policies import Policy


class Future:
    """When blocks will be asked for again. Closed loops have no times: whatever is still to be asked counts as soon."""

    def __init__(self, workload: Workload) -> None:
        self._uses: dict[int, list[float]] = {}
        self._begun: set[Turn] = set()
        turns = [turn for session in workload.sessions for turn in session]
        for turn in sorted(turns, key=lambda turn: -turn.at_s):
            at_s = turn.at_s if workload.open else 0.0
            for key in turn.engine_keys:
                self._uses.setdefault(key, []).append(at_s)

    def begin(self, turn: Turn) -> None:
        """A turn is asked now; a second try is no second use."""
        if turn not in self._begun:
            self._begun.add(turn)
            for key in turn.engine_keys:
                self._uses[key].pop()

    def asked_before(self, key: int, when_s: float) -> bool:
        """Whether the next use is sooner."""
        uses = self._uses.get(key)
        return bool(uses) and uses[-1] < when_s  # type: ignore[index]


class Clairvoyant(Shown):
    """Several routers of one world know the same."""

    name = "clairvoyant"

    def __init__(self) -> None:
        self._truth = Truth({})
        self._computing: dict[str, ActiveBlocks] = {}
        self._future = Future(Workload("", (), True, 1))
        self._at: dict[Turn, str] = {}
        self._own: dict[str, Work] = {}

    def told(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """All there is to know."""
        if isinstance(first, Clairvoyant) and first is not self:
            self._truth, self._future, self._computing = first._truth, first._future, first._computing  # noqa: SLF001
            return
        self._truth, self._future = Truth(replicas), Future(workload)
        self._computing = {name: ActiveBlocks() for name in replicas}

    def see(self, sight: Sight) -> None:
        """Take what the router shows a rule."""
        super().see(sight)
        self._future.begin(sight.turn)

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """The least price; of several the fewest requests, of those the first."""
        prices = {c.id: (self._price_s(c.id), c.in_flight) for c in candidates}
        return Choice(min(prices, key=prices.__getitem__))

    def placed(self, turn: Turn, replica: str, now_s: float) -> None:
        """The request waits there, and its blocks will be there."""
        self._truth.placed(turn, replica, self._own[replica])
        self._computing[replica].add(turn.engine_keys)
        self._at[turn] = replica

    def first_token(self, turn: Turn, replica: str, now_s: float) -> None:
        """The request no longer waits."""
        self._truth.left(turn, replica)
        if self._at.pop(turn, None) is not None:
            self._computing[replica].remove(turn.engine_keys)

    def ended(self, turn: Turn, replica: str, now_s: float) -> None:
        """The request no longer waits."""
        self.first_token(turn, replica, now_s)

    def _price_s(self, name: str) -> float:
        turn, now_s, replica = self.sight.turn, self.sight.now_s, self._truth.replicas[name]
        size, pool = replica.block_tokens, replica.model.pool
        keys = turn.engine_keys[: (turn.prompt_tokens - 1) // size]
        depth = known_depth(keys, _Either(pool.cached, self._computing[name]))
        own = self._own[name] = work(turn.prompt_tokens - depth * size, depth * size)
        missing = -(-(turn.prompt_tokens + turn.output_tokens) // size) - depth
        before = int(self._truth.waiting_tokens(name) // size)
        soon_s = now_s + now_s * pool.blocks_n / pool.evicted_blocks if pool.evicted_blocks else inf
        evicted = islice(pool.to_evict(), before, before + missing)
        lost = sum(1 for key in evicted if self._future.asked_before(key, soon_s))
        lost_s = replica.times.mixed_s(lost * size, 0.0, 0, 0) - replica.times.mixed_s(0, 0.0, 0, 0)
        return self._truth.first_token_s(name, own, now_s) + lost_s


class _Either:
    """Blocks that are in one or the other."""

    def __init__(self, one: Container[int], other: Container[int]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
