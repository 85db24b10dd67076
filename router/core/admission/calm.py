"""Which replicas a request without a deadline may be given while others ask with deadlines (deadlines.py).

A request that waits only for the deadlines of other tenants is never turned away for it: not on arrival, by a rate of
turns that this very waiting makes; not at the end of its time, since behind HELD_PART of that it takes any room; and
not for want of room in the queue, since nobody waits for other tenants' deadlines where QUEUED_PART of that is taken.
"""

from __future__ import annotations

from math import inf

from router.core.admission.deadlines import RESERVED_FROM, Deadlines
from router.core.admission.queue import FairQueue, Pool, Ticket
from router.core.facts.requests import Priority
from router.core.fleet.member import Member
from router.core.learned import speeds
from router.core.placement.router import Router

HELD_PART = 0.8  # part of the longest wait for which a request may wait for other tenants' deadlines alone
QUEUED_PART = 0.5  # part of the queue's room beyond which no request does


Known = dict[tuple[Pool, int], tuple[float, float]]
"""By pool and number of replicas that are reserved: the largest limit in milliseconds by which none is calm, and the
smallest by which one is."""


class Calm:
    """Reads the fleet, the queue and the deadlines. `full` are replicas without room for any request."""

    def __init__(self, router: Router, queue: FairQueue, deadlines: Deadlines) -> None:
        self._router, self._queue, self._deadlines = router, queue, deadlines

    def busy(
        self, pool: Pool, tenant: str, priority: Priority, full: set[str], now_s: float, *, others: bool = True
    ) -> set[str]:
        """Replicas that are full, or not to be given a tenant's request of that priority without a deadline, or its
        prefill. Without `others` only the tenant's own deadlines count. Raises NoReplica and Shed."""
        if not self._deadlines.any:
            return full
        members = self._router.who_may_prefill(*pool, now_s)
        limit_ms, reserved = self._deadlines.gate(tenant, priority, len(members), now_s, others=others)
        return self._beyond(pool, members, full, limit_ms, reserved, now_s)

    def passed_over(self, pool: Pool, tenant: str, priority: Priority, full: set[str], now_s: float) -> set[str]:
        """Replicas that a request without a deadline is not to be placed at, now that it is: those that are busy, as
        long as that leaves any. Raises NoReplica and Shed."""
        busy = self.busy(pool, tenant, priority, full, now_s)
        return busy if busy is full or self._router.has_room(*pool, now_s, busy) else full

    def may_hold(self, requests_max: int, bytes_max: int) -> bool:
        """Whether a queue with so much room has some for requests that wait only for other tenants' deadlines."""
        queue = self._queue
        return len(queue) < QUEUED_PART * requests_max and queue.size_bytes < QUEUED_PART * bytes_max

    def has_calm(self, pool: Pool, oldest: Ticket, full: set[str], now_s: float, known: Known, *, others: bool) -> bool:
        """Whether there is room for a request without a deadline. `known` is what was found since the last change: what
        is calm by a limit is so by a larger one, and what is not by one is not by a smaller one. So it takes few looks
        at the fleet, however many tenants have limits of their own. Raises NoReplica and Shed."""
        if not self._deadlines.any:
            return True
        members = self._router.who_may_prefill(*pool, now_s)
        limit_ms, reserved = self._deadlines.gate(oldest.tenant, oldest.priority, len(members), now_s, others=others)
        if limit_ms == inf:
            return True
        no_ms, yes_ms = known.get((pool, reserved), (-1.0, inf))
        if limit_ms <= no_ms or limit_ms >= yes_ms:
            return limit_ms >= yes_ms
        busy = self._beyond(pool, members, full, limit_ms, reserved, now_s)
        calm = self._router.has_room(*pool, now_s, busy)
        known[pool, reserved] = (no_ms, limit_ms) if calm else (limit_ms, yes_ms)
        return calm

    def _beyond(
        self, pool: Pool, members: list[Member], full: set[str], limit_ms: float, reserved: int, now_s: float
    ) -> set[str]:
        if limit_ms == inf:
            return full
        calm = {m.id for m in members if m.id not in full and m.pending_ms(now_s) <= limit_ms}
        if reserved and len(calm) <= reserved and self._backlog(pool, members, now_s) >= RESERVED_FROM:
            calm.clear()
        return full.union(m.id for m in members if m.id not in calm)

    def _backlog(self, pool: Pool, members: list[Member], now_s: float) -> float:
        """Mean prefill for each of a pool's replicas, at them and here, in units (Speeds.units)."""
        _, unit_ms = members[0].speeds.units()
        there = sum(m.pending_ms(now_s) for m in members) / unit_ms
        return (there + self._queue.tokens(pool) / speeds.BACKLOG_TOKENS) / len(members)
