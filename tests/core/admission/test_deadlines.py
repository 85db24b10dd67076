"""Whose turn it is where some of those who wait have deadlines, and who need not wait any longer."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.core.admission.deadline_budget import GATES_MAX, SEEN_S, WAITING_MIN_MS, DeadlineReserve
from router.core.admission.queue import PASSES_MAX, FairQueue, Pool, Ticket
from router.core.fleet.lease import Lease
from router.core.types.placements import Shed
from router.core.types.requests import Priority
from tests.core.admission.fleet import Fleet, want
from tests.core.admission.test_queue import POOLS, nobody, order, room, ticket
from tests.support.examples import examples

HIGH, NORMAL, LOW = Priority


def due(at_s: float | None, tenant: str = "t", priority: Priority = NORMAL, pool: Pool = POOLS[0]) -> Ticket:
    """A request that must be placed by then; None: at any time."""
    made = ticket(tenant, priority, pool=pool)
    made.start_by_s = at_s
    return made


class QueueWithDeadlines(RuleBasedStateMachine):
    """The queue beside a list that is searched from end to end, with deadlines, time and pools that are not calm."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now_s = FairQueue(), 0.0
        self.waiting: list[Ticket] = []
        self.starts: dict[str, float] = {}
        self.virtual = 0.0
        self.passed = Counter[tuple[Pool, Priority, str]]()

    def line(self, of: Ticket) -> list[Ticket]:
        """Those of its tenant, pool and priority, by order of arrival."""
        return [t for t in self.waiting if (t.pool, t.priority, t.tenant) == (of.pool, of.priority, of.tenant)]

    def gone(self, each: Ticket) -> None:
        """The model forgets it."""
        self.waiting.remove(each)
        if not self.line(each):
            del self.passed[each.pool, each.priority, each.tenant]
        if not self.waiting:
            self.starts, self.virtual = {}, 0.0

    def first(self, line: list[Ticket], *, calm: bool) -> Ticket | None:
        """Whose turn it is in a line."""
        able = [t for t in line if t.start_by_s is not None and t.start_by_s >= self.now_s]
        if not able:
            return line[0] if calm else None
        if self.passed[line[0].pool, line[0].priority, line[0].tenant] >= PASSES_MAX:
            return line[0]
        return min(able, key=lambda t: (t.start_by_s, t.number))

    @rule(
        tenant=st.sampled_from("ab"),
        priority=st.sampled_from([NORMAL, NORMAL, LOW]),
        left_s=st.none() | st.integers(-2, 30),
        pool=st.sampled_from(POOLS[:2]),
    )
    def comes(self, tenant: str, priority: Priority, left_s: int | None, pool: Pool) -> None:
        """One comes, with a latest start or without."""
        new = due(None if left_s is None else self.now_s + left_s, tenant, priority, pool)
        assert self.queue.add(new, 100, 100) == []
        if tenant not in {t.tenant for t in self.waiting}:
            self.starts[tenant] = max(self.virtual, self.starts.get(tenant, 0.0))
        self.waiting.append(new)

    @rule(gone_s=st.integers(1, 9))
    def time_passes(self, gone_s: int) -> None:
        """Some are too late by now."""
        self.now_s += gone_s

    @invariant()
    def tokens_of_pools_are_those_of_their_tickets(self) -> None:
        """However they came and went."""
        for pool in POOLS[:2]:
            assert self.queue.tokens(pool) == sum(t.cost_tokens for t in self.waiting if t.pool == pool)

    @rule(which=st.integers(0, 20))
    def leaves(self, which: int) -> None:
        """One no longer wants to wait."""
        if self.waiting:
            each = self.waiting[which % len(self.waiting)]
            assert self.queue.remove(each)
            self.gone(each)

    @rule()
    def late_ones_leave(self) -> None:
        """Of low priority, who cannot be in time leaves, in order of arrival; nobody else does."""
        late = [t for t in self.waiting if t.priority is LOW and t.start_by_s is not None and t.start_by_s < self.now_s]
        assert list(self.queue.late(LOW, self.now_s)) == late
        for each in late:
            self.gone(each)

    @rule(calm=st.sets(st.sampled_from(POOLS[:2])), times=st.integers(1, 3))
    def turns(self, calm: set[Pool], times: int) -> None:
        """Priority, then tenants in turn, then deadlines: as the list has it; and no oldest is passed too often."""
        for _ in range(times):
            firsts = [
                (t.priority, self.starts[t.tenant], t.number, first)
                for t in self.waiting
                if self.line(t)[0] is t and (first := self.first(self.line(t), calm=t.pool in calm)) is not None
            ]
            expected = min(firsts, default=(0, 0, 0, None), key=lambda each: each[:3])[3]
            got = self.queue.turn(room, nobody, self.now_s, lambda pool, _: pool in calm)
            assert got is expected
            if got is None:
                return
            key = got.pool, got.priority, got.tenant
            self.passed[key] = 0 if self.line(got)[0] is got else self.passed[key] + 1
            assert self.passed[key] <= PASSES_MAX
            self.virtual = max(self.virtual, self.starts[got.tenant])
            self.starts[got.tenant] += 1
            self.gone(got)


QueueWithDeadlines.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestQueueWithDeadlines = QueueWithDeadlines.TestCase


def test_who_is_due_first_goes_first_within_a_tenant_and_a_priority() -> None:
    """A deadline passes nobody of a higher priority, and takes no other tenant's turn."""
    queue = FairQueue()
    tickets = [due(None, "a"), due(9.0, "a"), due(5.0, "a"), due(7.0, "b"), due(1.0, "a", LOW), due(None, "c", HIGH)]
    for each in tickets:
        queue.add(each, 10, 10)
    assert [tickets.index(each) for each in order(queue)] == [5, 2, 3, 1, 0, 4]


def test_who_has_no_deadline_is_not_starved() -> None:
    """However many with deadlines keep coming, the oldest has a turn after PASSES_MAX of theirs."""
    queue, patient, turns = FairQueue(), due(None), 0
    queue.add(patient, 1_000, 1_000)
    while patient.number >= 0:
        queue.add(due(1e9), 1_000, 1_000)
        queue.turn(room, nobody)
        turns += 1
    assert turns == PASSES_MAX + 1


def test_who_is_late_already_makes_nobody_else_late() -> None:
    """Whose latest start is over waits by order of arrival, behind those that can be in time."""
    queue, late, able = FairQueue(), due(1.0), due(5.0)
    for each in (late, able):
        queue.add(each, 10, 10)
    assert queue.turn(room, nobody, 2.0) is able
    assert queue.turn(room, nobody, 2.0) is late


def test_what_may_wait_follows_the_shortest_deadline_of_late() -> None:
    """A part of the shortest deadline of the same priority or a higher one, never less than a step; forgotten within
    two minutes; and after PASSES_MAX urgent placements in a row that others waited through, no limit once."""
    deadlines = DeadlineReserve()

    def waiting_ms(priority: Priority) -> float:
        return deadlines.gate("t", priority, 4, 101.0)[0]

    assert waiting_ms(LOW) == inf
    deadlines.note_deadline("t", NORMAL, 1.0, 100.0)
    deadlines.note_deadline("t", NORMAL, 3.0, 100.0)
    assert waiting_ms(HIGH) == inf
    assert waiting_ms(NORMAL) == waiting_ms(LOW) == 100.0
    for _ in range(PASSES_MAX):
        assert waiting_ms(LOW) == 100.0
        deadlines.note_placement(urgent=True, others_wait=True)
    assert waiting_ms(LOW) == inf
    deadlines.note_placement(urgent=False, others_wait=True)
    assert waiting_ms(LOW) == 100.0
    deadlines.note_deadline("t", HIGH, 0.001, 101.0)
    assert waiting_ms(LOW) == WAITING_MIN_MS
    deadlines.tick(101.0 + SEEN_S)
    deadlines.tick(102.0 + 2 * SEEN_S)
    assert (deadlines.any, waiting_ms(LOW)) == (False, inf)


def test_others_heed_deadlines_as_far_as_their_tenant_works() -> None:
    """A use of USE_FULL of the fleet is heeded in full, a tenth of that by a hundred times the limit, and none not at
    all, however short the deadline is. A replica is kept for each half of one that is used, at most one of four."""
    deadlines = DeadlineReserve()
    deadlines.note_deadline("d", NORMAL, 1.0, 0.0)
    assert deadlines.gate("d", NORMAL, 8, 0.0) == (100.0, 2)
    assert deadlines.gate("v", NORMAL, 8, 0.0) == (inf, 0)
    seen = []
    for work_ms in (128.0, 1_152.0, 11_520.0, 115_200.0):  # together 0.0008, 0.008, 0.08 and 0.8 of eight replicas
        deadlines.note_first_token("d", NORMAL, work_ms, 0.0, in_time=False)
        deadlines.note_deadline("d", NORMAL, 1.0 - work_ms / 1e9, 0.0)  # a shorter one is heeded at once
        seen.append(deadlines.gate("v", NORMAL, 8, 0.0))
    assert [(round(limit_ms), kept) for limit_ms, kept in seen] == [(1_000_000, 0), (10_000, 0), (100, 1), (100, 2)]
    assert deadlines.gate("v", HIGH, 8, 0.0)[0] == inf
    later = [deadlines.gate("v", NORMAL, 8, at_s)[0] for at_s in (20.0, 40.0, 59.0)]
    assert later == sorted(later)
    assert later[-1] > 300.0
    assert deadlines.gate("d", NORMAL, 8, 59.0)[0] < 101.0


def test_a_short_deadline_is_backed_by_its_own_tenant_alone() -> None:
    """Next to another tenant's honest ones a deadline of a moment makes no limit shorter; a longer one has the work of
    those with shorter ones behind it, too."""
    deadlines = DeadlineReserve()
    deadlines.note_deadline("honest", NORMAL, 2.0, 0.0)
    deadlines.note_first_token("honest", NORMAL, 4_400.0, 0.0, in_time=True)
    alone_ms = deadlines.gate("v", NORMAL, 4, 0.0)[0]
    assert 400 < alone_ms < 450
    deadlines.note_deadline("evil", NORMAL, 0.01, 0.0)
    deadlines.note_first_token("evil", NORMAL, 10.0, 0.0, in_time=True)
    assert 0.99 * alone_ms < deadlines.gate("v", NORMAL, 4, 0.0)[0] <= alone_ms
    deadlines.note_deadline("more", NORMAL, 1.0, 0.0)
    deadlines.note_first_token("more", NORMAL, 2_000.0, 0.0, in_time=True)
    assert round(deadlines.gate("v", NORMAL, 4, 0.0)[0]) == 200


def test_many_tenants_have_a_bound() -> None:
    """Of more tenants than GATES_MAX those that began first count no longer."""
    deadlines = DeadlineReserve()
    for number in range(GATES_MAX + 1):
        deadlines.note_deadline(f"t{number}", NORMAL, 1.0, 0.0)
    assert deadlines.gate("t0", NORMAL, 4, 0.0, others=False)[0] == inf
    assert deadlines.gate("t1", NORMAL, 4, 0.0, others=False)[0] == 100.0


def test_of_low_priority_what_cannot_be_in_time_is_told_so() -> None:
    """At once where no replica's first token comes in time, and as soon as it waited too long for that; of any other
    priority it is placed, or waits on."""
    fleet = Fleet(in_flight_max=1, queue_timeout_s=100.0)
    now_s = fleet.world.now_s
    assert _code(fleet.ask("", LOW, due_s=now_s - 1.0)[0]) == "slo_unreachable"
    assert isinstance(fleet.ask(due_s=now_s - 1.0)[0], Lease)
    low, normal = fleet.ask("", LOW, due_s=now_s + 5.0), fleet.ask(due_s=now_s + 5.0)
    assert (low, normal) == ([], [])
    fleet.world.now_s += 4.0
    fleet.admission.tick()
    assert low == []
    fleet.world.now_s += 2.0
    fleet.admission.tick()
    assert _code(low[0]) == "slo_unreachable"
    assert low[0].retry_after_s >= 0
    assert normal == []


def test_others_wait_for_a_calm_replica_while_deadlines_are_asked_for() -> None:
    """A long prompt without a deadline waits where prefill waits at every replica; one with a deadline does not, and
    without deadlines nobody does."""
    fleet = Fleet(queue_timeout_s=100.0)
    long = want()
    long.body_tokens = 100_000
    leases = [fleet.placer.admission.admit(long, frozenset(), lambda _: None), *fleet.ask()]
    for _ in range(2):
        leases += fleet.ask(due_s=fleet.world.now_s + 0.5)
        patient = fleet.ask()
        assert patient == []
    for lease in leases:
        assert isinstance(lease, Lease)
        fleet.world.router.first_token(lease, fleet.world.now_s)
    fleet.admission.tick()
    assert len(patient) == 1


def test_replicas_are_kept_for_deadlines_only_where_the_fleet_is_busy() -> None:
    """At most one replica of four, and none where so much is in time anyway; and with less than a unit of work for each
    replica whoever has no deadline is placed on the last idle one."""
    deadlines = DeadlineReserve()
    deadlines.note_deadline("t", NORMAL, 1.0, 0.0)
    assert [deadlines.gate("t", NORMAL, replicas, 0.0)[1] for replicas in (1, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    for in_time, kept in ((True, 0), (False, 25)):
        for _ in range(1_000):
            deadlines.note_first_token("t", NORMAL, 1.0, 0.0, in_time=in_time)
        assert deadlines.gate("t", NORMAL, 100, 0.0)[1] == kept
    for tokens, waits in ((10_000, 0), (40_000, 1)):
        fleet = Fleet("abcd", queue_timeout_s=100.0)
        leases, long = list[object](), want()
        long.body_tokens = tokens
        leases += fleet.ask(due_s=fleet.world.now_s + 0.5)
        for lease in leases:
            assert isinstance(lease, Lease)
            fleet.placer.first_token(lease, fleet.world.now_s)
        for _ in range(3):
            assert isinstance(fleet.placer.admission.admit(long, frozenset(), leases.append), Lease)
        assert fleet.admission.count_queued()[0][NORMAL] == 0
        fleet.ask()
        assert fleet.admission.count_queued()[0][NORMAL] == waits


def test_a_first_token_gives_turns_to_those_that_wait_for_a_calm_replica() -> None:
    """They need not wait for the end of an answer or for the next look."""
    fleet = Fleet(queue_timeout_s=100.0)
    long = want()
    long.body_tokens = 100_000
    lease = fleet.placer.admission.admit(long, frozenset(), lambda _: None)
    assert isinstance(lease, Lease)
    fleet.ask(due_s=fleet.world.now_s + 0.5)
    patient = fleet.ask()
    assert patient == []
    for each in list(fleet.world.router.members[0].leases.values()):
        fleet.placer.first_token(each, fleet.world.now_s)
    assert len(patient) == 1


def test_a_request_that_waits_for_others_deadlines_is_placed_in_the_end() -> None:
    """It waits for a calm replica where the other tenant works much there, has its place before its time is over, and
    is not refused when it comes, however slow turns are; its own tenant's deadlines hold it to the end."""
    fleet = Fleet(queue_timeout_s=10.0)
    long = want("d")
    long.body_tokens = 100_000
    assert isinstance(fleet.placer.admission.admit(long, frozenset(), lambda _: None), Lease)
    fleet.ask("d", due_s=fleet.world.now_s + 0.5)
    for _ in range(50):
        fleet.admission._admission.deadlines.note_first_token("d", NORMAL, 100.0, fleet.world.now_s, in_time=False)
    own, others = fleet.ask("d"), [fleet.ask("v") for _ in range(20)]
    assert (own, others) == ([], [[]] * 20)
    for _ in range(40):
        fleet.world.now_s += 0.2
        fleet.admission._admission.deadlines.note_first_token("d", NORMAL, 100.0, fleet.world.now_s, in_time=False)
        fleet.admission.tick()
        others.append(fleet.ask("v"))
    assert all(isinstance(answers[0], Lease) for answers in others[:20])
    assert own == []
    fleet.world.now_s += 2.0
    fleet.admission.tick()
    assert _code(own[0]) == "overloaded"
    for _ in range(40):
        fleet.world.now_s += 0.2
        fleet.admission.tick()
    assert all(isinstance(answers[0], Lease) for answers in others)


def _code(answer: object) -> str:
    assert isinstance(answer, Shed)
    return answer.code
