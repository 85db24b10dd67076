"""Queue of requests that wait for a place: the order of admission, and the choice of requests to reject when it is
full.

Order: priority first. Within a priority, tenants take turns by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 96)
with prompt tokens as cost. A tenant's start tag is the end of its last turn, or the queue's virtual time when it begins
to wait. The smallest tag has the next turn, and its start is then the virtual time. So tenants that keep waiting get
equal parts of the admitted tokens, however many requests each of them sends. A tenant with few requests waits for one
turn of each other tenant. Within a tenant the order is first come first served; a request that returns keeps its
seniority.

A request with a deadline has a latest start. Of a tenant's requests in one pool, the one with the earliest latest start
goes first if it can still be in time (earliest deadline first; Liu & Layland, JACM 1973). After its latest start it
waits by order of arrival, like requests without a deadline. Otherwise late requests would make all others late under
overload (Locke 1986). After PASSES_MAX turns in a row in which others were passed, the next turn goes to the oldest
request. If there is capacity for urgent requests only, those without a deadline wait; the same number of turns bounds
that.

A pool is the set of requests that any replica of a model may take. One pool may have capacity while another has none,
so a turn goes to the first request in order with capacity in its pool. Tags only grow while a tenant waits, so heaps
may contain old tags: the top entry is always verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from router.core.types.requests import Priority

TENANTS_MAX = 4_096  # tenants with a remembered last turn
PASSES_MAX = 15  # turns in a row in which urgent requests of a tenant pass its oldest one
# Model; permitted replicas (one id, or a set of addresses); True if two replicas may serve the request.
Pool = tuple[str | None, str | frozenset[str] | None, bool]


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request; `request` is any object that the caller wants back."""

    tenant: str
    priority: Priority
    pool: Pool
    cost_tokens: int
    size_bytes: int
    at_s: float
    request: Any = None
    since_s: float = -1.0  # start of its wait: before `at_s` if the request returned; -1: `at_s`
    number: int = -1  # order of arrival; -1: not waiting
    start_by_s: float | None = None  # latest time of a placement that keeps its deadline; None: no deadline

    def __post_init__(self) -> None:
        if self.since_s < 0:
            self.since_s = self.at_s


_Fifo = dict[int, Ticket]  # number -> ticket, in the order of arrival


class _TenantQueue:
    """Tickets of one tenant in a lane, by order of arrival and by latest start."""

    __slots__ = ("_starts", "passed", "tickets")

    def __init__(self) -> None:
        self.tickets: _Fifo = {}
        self.passed = 0  # turns in a row in which the oldest ticket was passed
        self._starts: list[tuple[float, int]] = []  # heap of (latest start, number); may contain numbers that left

    def add(self, ticket: Ticket) -> None:
        """Append a ticket."""
        _enqueue(self.tickets, ticket)
        if ticket.start_by_s is not None:
            heappush(self._starts, (ticket.start_by_s, ticket.number))

    @property
    def oldest(self) -> Ticket:
        """The ticket that has waited longest."""
        return self.tickets[next(iter(self.tickets))]

    def first(self, now_s: float, *, urgent_only: bool) -> Ticket | None:
        """Return the ticket with the next turn; None if only urgent tickets may have it and none waits."""
        oldest = self.oldest
        urgent = self._urgent(now_s) if self._starts else None
        if urgent is None:
            return None if urgent_only else oldest
        return oldest if self.passed >= PASSES_MAX else urgent

    def note_turn(self, ticket: Ticket) -> None:
        """Record that a ticket gets the turn. It must still be in the line."""
        self.passed = 0 if ticket.number == next(iter(self.tickets)) else self.passed + 1

    def _urgent(self, now_s: float) -> Ticket | None:
        """Return the ticket with the earliest latest start of those that can be in time. Time is monotonic, so late
        ones are dropped here."""
        starts = self._starts
        while starts:
            start_by_s, number = starts[0]
            ticket = self.tickets.get(number)
            if ticket is not None and start_by_s >= now_s:
                return ticket
            heappop(starts)
        return None


@dataclass(slots=True)
class _PriorityLane:
    """Tenants of one pool and priority."""

    tenants: dict[str, _TenantQueue] = field(default_factory=dict)
    heap: list[tuple[float, int, str]] = field(default_factory=list)  # start tag, number of the oldest ticket, tenant
    listed: set[str] = field(default_factory=set)  # tenants in the heap


def _always(pool: Pool, oldest: Ticket) -> bool:
    """Treat any pool as calm. A lambda with any arguments would do, but the C code that mypyc generates for it does not
    compile."""
    return True


class FairQueue:
    """Waiting requests. It has no limits except those that are passed with each arrival."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._waiting: _Fifo = {}
        self._pools: dict[Pool, tuple[_PriorityLane, ...]] = {}
        # For each priority: tenant -> its tickets in all pools.
        self._tenants: tuple[dict[str, _Fifo], ...] = tuple({} for _ in Priority)
        self._counts = [0] * len(Priority)
        self._tokens: dict[Pool, int] = {}  # cost of all tickets that wait in a pool
        self._starts: dict[str, float] = {}  # start tag of a tenant's next turn
        self._virtual = 0.0
        self._next = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def count(self, priority: Priority) -> int:
        """Return the number of requests that wait with this priority."""
        return self._counts[priority]

    def tokens(self, pool: Pool) -> int:
        """Return the prompt tokens of the requests that wait in a pool."""
        return self._tokens.get(pool, 0)

    def count_waiting(self) -> Iterator[tuple[Pool, Priority, int]]:
        """Yield the number of waiting requests by pool and priority."""
        for pool, lanes in self._pools.items():
            for priority, lane in zip(Priority, lanes, strict=True):
                yield pool, priority, sum(len(line.tickets) for line in lane.tenants.values())

    def count_by_tenant(self) -> Counter[str]:
        """Count waiting requests by tenant."""
        counts = Counter[str]()
        for fifos in self._tenants:
            for tenant, fifo in fifos.items():
                counts[tenant] += len(fifo)
        return counts

    def ahead(self, tenant: str, priority: Priority) -> int:
        """Return an upper estimate of the requests that get a turn before a request that arrives now."""
        tenants, count = self._tenants[priority], self._counts[priority]
        mine = len(tenants.get(tenant, ()))
        others = len(tenants) - (tenant in tenants)
        return sum(self._counts[:priority]) + mine + min(count - mine, others * (mine + 1))

    # -- in and out ----------------------------------------------------------------------------------------------

    def add(self, ticket: Ticket, requests_max: int, bytes_max: int) -> list[Ticket] | None:
        """Add a ticket. Returns the tickets that were removed to make space. Returns None, without a change, if the new
        ticket itself is the one to reject."""
        out = self._least(ticket, requests_max, bytes_max)
        if ticket in out:
            return None
        for other in out:
            self.remove(other)
        self._insert(ticket)
        return out

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; returns False if it was not waiting."""
        number, priority, tenant = ticket.number, ticket.priority, ticket.tenant
        if self._waiting.pop(number, None) is None:
            return False
        ticket.number = -1
        self.size_bytes -= ticket.size_bytes
        self._counts[priority] -= 1
        self._tokens[ticket.pool] -= ticket.cost_tokens
        lines, fifos = self._pools[ticket.pool][priority].tenants, self._tenants[priority]
        del lines[tenant].tickets[number]
        if not lines[tenant].tickets:
            del lines[tenant]
        del fifos[tenant][number]
        if not fifos[tenant]:
            del fifos[tenant]
        if not self._waiting:
            self._pools.clear()
            self._tokens.clear()
            self._starts.clear()
            self._virtual = 0.0
        elif not any(lane.tenants for lane in self._pools[ticket.pool]):
            del self._pools[ticket.pool], self._tokens[ticket.pool]
        return True

    def turn(
        self,
        room: Callable[[Pool], bool],
        held_back: Callable[[Pool, str], bool],
        now_s: float = 0.0,
        calm: Callable[[Pool, Ticket], bool] = _always,
    ) -> Ticket | None:
        """Remove and return the first ticket in order that has capacity in its pool (`room`) and is not blocked there
        by its tenant's share (`held_back`). Return None if there is no such ticket. If a pool is not `calm` for a
        tenant's oldest request, only the tenant's urgent requests have capacity there."""
        has_room: dict[Pool, bool] = {}
        for priority in Priority:
            if not self._counts[priority]:
                continue
            heads = self._heads(priority, held_back, calm, now_s)
            for _, _, pool, ticket in sorted(heads, key=lambda head: head[:2]):
                if pool not in has_room:
                    has_room[pool] = room(pool)
                if has_room[pool]:
                    self._serve_ticket(ticket)
                    return ticket
        return None

    def late(self, priority: Priority, now_s: float) -> Iterator[Ticket]:
        """Remove and yield the tickets with this priority that can no longer be in time."""
        waiting = self._waiting.values() if self._counts[priority] else ()
        for ticket in [each for each in waiting if each.start_by_s is not None and each.start_by_s < now_s]:
            if ticket.priority is priority and self.remove(ticket):
                yield ticket

    def remove_expired(self, before_s: float) -> Iterator[Ticket]:
        """Remove and yield the tickets that arrived before this time."""
        for ticket in [each for each in self._waiting.values() if each.at_s <= before_s]:
            self.remove(ticket)
            yield ticket

    # -- inside --------------------------------------------------------------------------------------------------

    def _insert(self, ticket: Ticket) -> None:
        number = ticket.number = self._next
        self._next += 1
        tenant, priority = ticket.tenant, ticket.priority
        if not any(tenant in fifos for fifos in self._tenants):  # begins to wait
            self._starts[tenant] = max(self._virtual, self._starts.pop(tenant, 0.0))
        lanes = self._pools.get(ticket.pool)
        if lanes is None:
            lanes = self._pools[ticket.pool] = tuple(_PriorityLane() for _ in Priority)
        lane = lanes[priority]
        self._waiting[number] = ticket
        lane.tenants.setdefault(tenant, _TenantQueue()).add(ticket)
        _enqueue(self._tenants[priority].setdefault(tenant, {}), ticket)
        if tenant not in lane.listed:
            lane.listed.add(tenant)
            heappush(lane.heap, (self._starts[tenant], number, tenant))
        self.size_bytes += ticket.size_bytes
        self._tokens[ticket.pool] = self._tokens.get(ticket.pool, 0) + ticket.cost_tokens
        self._counts[priority] += 1

    def _serve_ticket(self, ticket: Ticket) -> None:
        tenant, start = ticket.tenant, self._starts.pop(ticket.tenant)
        self._virtual = max(self._virtual, start)
        self._starts[tenant] = start + max(1, ticket.cost_tokens)  # appended after all others: the last to be dropped
        if len(self._starts) > TENANTS_MAX + len(self._waiting):
            idle = (name for name in self._starts if not any(name in fifos for fifos in self._tenants))
            del self._starts[next(idle)]
        self._pools[ticket.pool][ticket.priority].tenants[tenant].note_turn(ticket)
        self.remove(ticket)

    def _heads(
        self,
        priority: Priority,
        held_back: Callable[[Pool, str], bool],
        calm: Callable[[Pool, Ticket], bool],
        now_s: float,
    ) -> Iterator[tuple[float, int, Pool, Ticket]]:
        """Yield the first ticket of every pool, as (start tag, number of its tenant's oldest there, pool, ticket)."""
        for pool, lanes in self._pools.items():
            lane, aside = lanes[priority], []
            while (top := self._top(lane)) is not None:
                tenant = top[2]
                if not held_back(pool, tenant):
                    line = lane.tenants[tenant]
                    ticket = line.first(now_s, urgent_only=not calm(pool, line.oldest))
                    if ticket is not None:
                        yield top[0], top[1], pool, ticket
                        break
                aside.append(heappop(lane.heap))
            for entry in aside:
                heappush(lane.heap, entry)

    def _top(self, lane: _PriorityLane) -> tuple[float, int, str] | None:
        """Return the current first entry of the lane."""
        heap = lane.heap
        while heap:
            tenant = heap[0][2]
            line = lane.tenants.get(tenant)
            if line is None:
                heappop(heap)
                lane.listed.discard(tenant)
                continue
            entry = (self._starts[tenant], next(iter(line.tickets)), tenant)
            if entry == heap[0]:
                return entry
            heapreplace(heap, entry)
        return None

    def _least(self, arriving: Ticket, requests_max: int, bytes_max: int) -> list[Ticket]:
        """Return the tickets to remove so that a new one fits, which may be the new one itself. The first to go is the
        newest request of the tenant with the most waiting requests, in the lowest priority present."""
        requests = len(self._waiting) + 1 - requests_max
        size_bytes = self.size_bytes + arriving.size_bytes - bytes_max
        out: list[Ticket] = []
        if requests <= 0 and size_bytes <= 0:
            return out
        if not requests_max or arriving.size_bytes > bytes_max:
            return [arriving]
        for priority in reversed(Priority):
            fifos = self._tenants[priority]
            heap = [(-len(fifo), 1, name) for name, fifo in fifos.items() if name != arriving.tenant]
            if priority is arriving.priority:
                own = len(fifos.get(arriving.tenant, ())) + 1
                heap.append((-own, 0, arriving.tenant))  # 0: of tenants with equal counts the arriving one loses
            elif arriving.tenant in fifos:
                heap.append((-len(fifos[arriving.tenant]), 1, arriving.tenant))
            heapify(heap)
            newest: dict[str, Iterator[Ticket]] = {}
            while heap and (requests > 0 or size_bytes > 0):
                count, others, tenant = heap[0]
                if not others:
                    return [arriving]
                out.append(next(newest.setdefault(tenant, reversed(fifos[tenant].values()))))
                requests, size_bytes = requests - 1, size_bytes - out[-1].size_bytes
                if count + 1:
                    heapreplace(heap, (count + 1, others, tenant))
                else:
                    heappop(heap)
            if requests <= 0 and size_bytes <= 0:
                break
        return out


def _enqueue(fifo: _Fifo, ticket: Ticket) -> None:
    """Insert a ticket at the end, or by its earlier wait if the request returned."""
    last = next(reversed(fifo.values()), None)
    fifo[ticket.number] = ticket
    if last is not None and ticket.since_s < last.since_s:
        in_order = sorted(fifo.items(), key=lambda item: (item[1].since_s, item[0]))
        fifo.clear()
        fifo.update(in_order)
