from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.admission.queue import FairQueue, Pool, Ticket
from router.core.types.requests import Priority
from tests.support.examples import examples

POOLS: tuple[Pool, ...] = (("m", None, False), ("n", None, False), ("m", "http://a", False))


def ticket(
    tenant: str = "t",
    priority: Priority = Priority.NORMAL,
    *,
    cost: int = 1,
    size: int = 1,
    pool: Pool = POOLS[0],
    at_s: float = 0.0,
) -> Ticket:
    """A request that has not been put in yet."""
    return Ticket(tenant, priority, pool, cost, size, at_s)


def room(_: Pool) -> bool:
    """There is room everywhere."""
    return True


def nobody(_: Pool, __: str) -> bool:
    """Nobody is held back."""
    return False


def order(queue: FairQueue) -> list[Ticket]:
    """Everybody, by turns."""
    turns: Callable[[], Ticket | None] = lambda: queue.turn(room, nobody)  # noqa: E731 - for iter
    return list(iter(turns, None))  # type: ignore[arg-type]


class QueueAndModel(RuleBasedStateMachine):
    """The queue beside a list that is searched from end to end for every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Ticket] = []
        self.starts: dict[str, float] = {}
        self.virtual = 0.0
        self.now_s = 0.0
        self.requests_max, self.bytes_max = 8, 20

    def gone(self, each: Ticket) -> None:
        """The model forgets it."""
        self.waiting.remove(each)
        if not self.waiting:
            self.starts, self.virtual = {}, 0.0

    @rule(
        tenant=st.sampled_from("abcd"),
        priority=st.sampled_from(Priority),
        cost=st.integers(0, 9),
        size=st.sampled_from([0, 1, 1, 2, 5, 21]),
        pool=st.sampled_from(POOLS),
    )
    def comes(self, tenant: str, priority: Priority, cost: int, size: int, pool: Pool) -> None:
        """One comes: as many go as must, each the one that matters least of those left, and it is never worse off
        than the one that came."""
        self.now_s += 1
        new = ticket(tenant, priority, cost=cost, size=size, pool=pool, at_s=self.now_s)
        out = self.queue.add(new, self.requests_max, self.bytes_max)
        left = [*self.waiting, new]
        for each in [new] if out is None else out:
            if size <= self.bytes_max and out is not None:
                assert len(left) > self.requests_max or sum(t.size_bytes for t in left) > self.bytes_max
            lowest = max(t.priority for t in left)
            counts = Counter(t.tenant for t in left if t.priority is lowest)
            if out is None:
                full = len(left) > self.requests_max or sum(t.size_bytes for t in left) > self.bytes_max
                assert full
                return
            assert each.priority is lowest
            assert counts[each.tenant] == max(counts.values())
            assert each is [t for t in left if t.tenant == each.tenant and t.priority is lowest][-1]
            left.remove(each)
        assert out is not None
        assert len(left) <= self.requests_max
        assert sum(t.size_bytes for t in left) <= self.bytes_max
        for each in out:
            assert each is not new
            self.gone(each)
        if tenant not in {t.tenant for t in self.waiting}:
            self.starts[tenant] = max(self.virtual, self.starts.get(tenant, 0.0))
        self.waiting.append(new)

    @rule(which=st.integers(0, 20))
    def leaves(self, which: int) -> None:
        """One no longer wants to wait: it is gone, once."""
        if self.waiting:
            each = self.waiting[which % len(self.waiting)]
            assert self.queue.remove(each)
            assert not self.queue.remove(each)
            self.gone(each)

    @rule(
        rooms=st.sets(st.sampled_from(POOLS)), held=st.sets(st.tuples(st.sampled_from(POOLS), st.sampled_from("abcd")))
    )
    def turn(self, rooms: set[Pool], held: set[tuple[Pool, str]]) -> None:
        """The first in order gets the turn, of those that may."""
        able = [t for t in self.waiting if t.pool in rooms and (t.pool, t.tenant) not in held]
        first = min(able, key=lambda t: (t.priority, self.starts[t.tenant], t.number), default=None)
        assert self.queue.turn(lambda pool: pool in rooms, lambda *who: who in held) is first
        if first is not None:
            self.virtual = max(self.virtual, self.starts[first.tenant])
            self.starts[first.tenant] += max(1, first.cost_tokens)
            self.gone(first)

    @rule(age_s=st.integers(1, 10))
    def waits_too_long(self, age_s: int) -> None:
        """Who came before then leaves, oldest first."""
        old = [t for t in self.waiting if t.at_s <= self.now_s - age_s]
        assert list(self.queue.remove_expired(self.now_s - age_s)) == old
        for each in old:
            self.gone(each)

    @invariant()
    def counts_are_exact(self) -> None:
        """Requests, bytes and priorities add up."""
        assert len(self.queue) == len(self.waiting)
        assert self.queue.size_bytes == sum(t.size_bytes for t in self.waiting)
        for priority in Priority:
            assert self.queue.count(priority) == sum(t.priority is priority for t in self.waiting)
        by_pool = Counter((ticket.pool, ticket.priority) for ticket in self.waiting)
        assert {(pool, priority): n for pool, priority, n in self.queue.count_waiting() if n} == by_pool


QueueAndModel.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestQueueAndModel = pytest.mark.promise(
    "The admission queue is bounded in requests, bytes and time, and holds no client that left.", "clients"
)(QueueAndModel.TestCase)


def test_priority_then_tenants_in_turn_then_arrival() -> None:
    """High before normal before low; tenants take turns whatever they have queued; within one, first come first."""
    queue = FairQueue()
    names = ["a1", "a2", "a3", "b1", "low", "high"]
    for name in names:
        priority = {"low": Priority.LOW, "high": Priority.HIGH}.get(name, Priority.NORMAL)
        new = ticket(name[0], priority)
        new.request = name
        assert queue.add(new, 10, 10) == []
    assert [each.request for each in order(queue)] == ["high", "a1", "b1", "a2", "a3", "low"]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(0, 3))
@settings(deadline=None, max_examples=examples(30))
def test_tenants_that_wait_get_equal_parts_by_cost(costs: list[int], seed: int) -> None:
    """Between tenants that always wait, tokens admitted differ by no more than one of the costliest requests each,
    whatever their requests cost and however many they have."""
    queue = FairQueue()
    for number, cost in enumerate(costs):
        for _ in range(400 * (1 + (number + seed) % 3)):
            queue.add(ticket(str(number), cost=cost), 1 << 20, 1 << 30)
    served = Counter[str]()
    for _ in range(300):
        each = queue.turn(room, nobody)
        assert each is not None
        served[each.tenant] += each.cost_tokens
    parts = [served[str(number)] for number in range(len(costs))]
    assert max(parts) - min(parts) <= 2 * max(costs)


def test_whoever_comes_late_does_not_wait_for_the_backlog() -> None:
    """A tenant that begins to wait behind a thousand requests of another has the next turn but one."""
    queue = FairQueue()
    for _ in range(1_000):
        queue.add(ticket("a"), 2_000, 2_000)
    for _ in range(100):
        queue.turn(room, nobody)
    queue.add(ticket("b"), 2_000, 2_000)
    assert "b" in [each.tenant for each in (queue.turn(room, nobody), queue.turn(room, nobody)) if each]
    assert queue.ahead("b", Priority.NORMAL) == 1  # one of the other's
    assert queue.ahead("a", Priority.NORMAL) == len(queue)


def test_a_full_queue_turns_away_who_matters_least() -> None:
    """The newest of the tenant with most, of the lowest priority; one that matters less than all who wait, or that
    would not fit an empty queue, is itself turned away, and nobody else."""
    queue = FairQueue()
    many = [ticket("a") for _ in range(3)]
    for each in [*many, ticket("b")]:
        queue.add(each, 4, 100)
    assert queue.add(ticket("a"), 4, 100) is None
    assert queue.add(ticket("c", Priority.LOW), 4, 100) is None
    assert queue.add(ticket("c"), 4, 100) == [many[2]]
    assert queue.add(ticket("c", Priority.HIGH), 4, 100) == [many[1]]
    assert queue.add(ticket("d", size=101), 4, 100) is None
    assert queue.add(ticket("d"), 0, 100) is None
    assert len(queue) == 4


@pytest.mark.promise("Names of tenants cause no unbounded growth.", "tenants")
def test_turns_of_tenants_that_left_are_forgotten() -> None:
    """Names that come once each leave no trace that grows for ever."""
    queue = FairQueue()
    queue.add(ticket("stays", Priority.LOW), 10, 10)
    for number in range(10_000):
        queue.add(ticket(str(number)), 10, 10)
        queue.turn(room, nobody)
    assert len(queue._starts) < 5_000
    for pool in queue._pools.values():
        assert sum(len(lane.heap) for lane in pool) < 100


@pytest.mark.parametrize("left", range(5))
def test_who_left_is_passed_over(left: int) -> None:
    """Whoever of five leaves, the other four keep their order."""
    queue, tickets = FairQueue(), [ticket("ab"[number % 2]) for number in range(5)]
    for each in tickets:
        queue.add(each, 10, 10)
    queue.remove(tickets[left])
    numbers = [each.number for each in tickets]
    rest = [queue.turn(room, nobody) for _ in range(4)]
    assert queue.turn(room, nobody) is None
    assert {id(each) for each in rest} == {id(each) for each in tickets} - {id(tickets[left])}
    assert numbers[left] == -1
