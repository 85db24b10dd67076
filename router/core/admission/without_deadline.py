"""Replicas that may take a request without a deadline while other requests have deadlines (deadline_budget.py).

A request that waits only for the deadlines of other tenants is never rejected for that reason:

- On arrival, the rate of turns is not used, because this waiting itself lowers it.
- After HELD_PART of the maximum wait, the request takes any free place.
- If QUEUED_PART of the queue is in use, no request waits for other tenants' deadlines. So the queue does not overflow
  for this reason.
"""

from __future__ import annotations

from math import inf

from router.core.admission.deadline_budget import RESERVED_FROM, DeadlineReserve
from router.core.admission.queue import FairQueue, Pool, Ticket
from router.core.estimators import model_speeds
from router.core.fleet.member import ReplicaState
from router.core.placement.router import Router
from router.core.types.requests import Priority

HELD_PART = 0.8  # share of the maximum wait for which a request may wait for other tenants' deadlines alone
QUEUED_PART = 0.5  # share of the queue's capacity above which no request waits for them


Known = dict[tuple[Pool, int], tuple[float, float]]
"""By (pool, number of reserved replicas): the largest limit in milliseconds without a calm replica, and the smallest
limit with one."""


class Calm:
    """Reads the fleet, the queue and the deadlines. `full` are replicas without capacity for any request."""

    def __init__(self, router: Router, queue: FairQueue, deadlines: DeadlineReserve) -> None:
        self._router, self._queue, self._deadlines = router, queue, deadlines

    def busy(
        self, pool: Pool, tenant: str, priority: Priority, full: set[str], now_s: float, *, others: bool = True
    ) -> set[str]:
        """Return the replicas that are full, or that must not take a tenant's request of this priority without a
        deadline, or its prefill. Without `others` only the tenant's own deadlines count. Raises NoReplicaReady and
        Shed."""
        if not self._deadlines.any:
            return full
        members = self._router.disaggregator.filter_prefilling(*pool, now_s)
        limit_ms, reserved = self._deadlines.gate(tenant, priority, len(members), now_s, others=others)
        return self._beyond(pool, members, full, limit_ms, reserved, now_s)

    def passed_over(self, pool: Pool, tenant: str, priority: Priority, full: set[str], now_s: float) -> set[str]:
        """Return the replicas to skip when a request without a deadline is placed: the busy ones, unless no replica
        would be left. Raises NoReplicaReady and Shed."""
        busy = self.busy(pool, tenant, priority, full, now_s)
        return busy if busy is full or self._router.disaggregator.has_room(*pool, now_s, busy) else full

    def may_hold(self, requests_max: int, bytes_max: int) -> bool:
        """True if a queue of this capacity has space for requests that wait only for other tenants' deadlines."""
        queue = self._queue
        return len(queue) < QUEUED_PART * requests_max and queue.size_bytes < QUEUED_PART * bytes_max

    def has_calm(self, pool: Pool, oldest: Ticket, full: set[str], now_s: float, known: Known, *, others: bool) -> bool:
        """True if there is capacity for a request without a deadline. Raises NoReplicaReady and Shed.

        `known` contains the results since the last change. A pool that is calm by one limit is calm by every larger
        limit, and one that is not calm by one limit is not calm by any smaller one. So few examinations of the fleet
        are enough, even if many tenants have their own limits.
        """
        if not self._deadlines.any:
            return True
        members = self._router.disaggregator.filter_prefilling(*pool, now_s)
        limit_ms, reserved = self._deadlines.gate(oldest.tenant, oldest.priority, len(members), now_s, others=others)
        if limit_ms == inf:
            return True
        no_ms, yes_ms = known.get((pool, reserved), (-1.0, inf))
        if limit_ms <= no_ms or limit_ms >= yes_ms:
            return limit_ms >= yes_ms
        busy = self._beyond(pool, members, full, limit_ms, reserved, now_s)
        calm = self._router.disaggregator.has_room(*pool, now_s, busy)
        known[pool, reserved] = (no_ms, limit_ms) if calm else (limit_ms, yes_ms)
        return calm

    def _beyond(
        self, pool: Pool, members: list[ReplicaState], full: set[str], limit_ms: float, reserved: int, now_s: float
    ) -> set[str]:
        if limit_ms == inf:
            return full
        calm = {m.id for m in members if m.id not in full and m.queue.pending_ms(now_s) <= limit_ms}
        if reserved and len(calm) <= reserved and self._backlog(pool, members, now_s) >= RESERVED_FROM:
            calm.clear()
        return full.union(m.id for m in members if m.id not in calm)

    def _backlog(self, pool: Pool, members: list[ReplicaState], now_s: float) -> float:
        """Return the mean prefill per replica of a pool, waiting at the replicas and here, in units
        (`ModelSpeeds.units`)."""
        _, unit_ms = members[0].speeds.units()
        there = sum(m.queue.pending_ms(now_s) for m in members) / unit_ms
        return (there + self._queue.tokens(pool) / model_speeds.BACKLOG_TOKENS) / len(members)
