"""How much prefill may wait in an engine while others ask with deadlines, and what that may cost other tenants.

Order in the router's queue is worth little while engines have queues of their own, first come first served, as long as
a deadline. So while requests with deadlines come, those without wait here for a replica that is *calm*: whose waiting
prefill takes no more than a part of the shortest deadline of late. A replica at which no prefill waits is always calm.

A prefill that has begun is not interrupted, so where the fleet is busy a few calm replicas are *reserved* for those
with deadlines: as few as keep KEPT of them, and at most one of RESERVED_OF. That number is followed by small steps, up
behind a stream that was late and down behind one in time (Robbins & Monro 1951), and is none where all are in time
anyway. Busy is a fleet with RESERVED_FROM units of work for each replica, what waits here included: below it nobody
waits while a replica is idle.

Each tenant has a gate of its own. Its own requests without a deadline heed all of it. Requests of others heed it as far
as the tenant's *use*: the prefill of its requests with deadlines, as a part of the fleet. Where the use is below
USE_FULL of the fleet, more prefill may wait, by the square of how much less it is: engines are a little slower where
little waits in them, which is not to be had for nothing. And from others no more replicas are kept than RESERVED_TIMES
the use. So what a tenant's deadlines cost others is bounded by the work that the tenant has done there, and deadlines
that are rare or belong to next to no work cost nothing. A use counts once its answer ended: what was cancelled before
the first token is none.

A deadline that even an idle replica would miss counts for nothing. Deadlines of a lower priority make nobody wait, and
PASSES_MAX urgent placements in a row while others wait here are followed by one that needs no calm replica.
"""

from __future__ import annotations

from math import exp, inf

from router.core.admission.queue import PASSES_MAX
from router.core.facts.requests import Priority

SEEN_S = 60.0  # seconds, at least, for which a deadline counts after it was asked for
WAITING_PART = 0.1  # part of the shortest deadline for which prefill may wait at a calm replica
WAITING_MIN_MS = 20.0  # prefill that may wait at a calm replica in any case: a step or two
KEPT = 0.99  # part of the deadlines that are to be kept
STEP = 0.05  # step of the part of replicas that are reserved
RESERVED_OF = 4  # replicas for each one that may be reserved
RESERVED_FIRST = 0.25  # part that is reserved before anything is known, and at most
RESERVED_FROM = 1.0  # mean backlog from which on any are, here and at replicas, in units (core/learned/speeds.py)
USE_S = 20.0  # seconds over which a tenant's use is taken
USE_FULL = 0.08  # part of the fleet from which on others heed all of a tenant's gate
RESERVED_TIMES = 2.0  # replicas that are kept from others for each one that a tenant's use takes
GATES_MAX = 256  # tenants whose deadlines count at once
OTHERS_S = 0.1  # seconds for which what others have to heed is as it was


class _Gate:
    """Deadlines of one tenant."""

    __slots__ = ("_at_s", "_before_s", "_shortest_s", "_since_s", "_work_ms", "reserved")

    def __init__(self, now_s: float) -> None:
        self._shortest_s, self._before_s = [inf] * len(Priority), [inf] * len(Priority)
        self._since_s = self._at_s = now_s
        self._work_ms = [0.0] * len(Priority)  # prefill of late, faded
        self.reserved = RESERVED_FIRST  # part of the replicas

    def asked(self, priority: Priority, wanted_s: float) -> bool:
        """One more; returns whether it is the shortest of late."""
        shorter = wanted_s < self._shortest_s[priority]
        if shorter:
            self._shortest_s[priority] = wanted_s
        return shorter

    def counts(self, now_s: float) -> bool:
        """Forget what was asked long ago; returns whether anything is left."""
        if now_s - self._since_s >= SEEN_S:
            kept_s = self._shortest_s if now_s - self._since_s < 2 * SEEN_S else [inf] * len(Priority)
            self._before_s, self._shortest_s, self._since_s = kept_s, [inf] * len(Priority), now_s
        return min(*self._before_s, *self._shortest_s) < inf

    def waiting_ms(self, priority: Priority) -> float:
        """Milliseconds of prefill that may wait where a request without a deadline is placed."""
        shortest_s = min(*self._shortest_s[: priority + 1], *self._before_s[: priority + 1])
        return max(WAITING_MIN_MS, WAITING_PART * 1e3 * shortest_s)

    def worked(self, priority: Priority, prefill_ms: float, now_s: float) -> None:
        self._fade(now_s)
        self._work_ms[priority] += prefill_ms

    def use(self, priority: Priority, now_s: float) -> float:
        """Mean number of replicas that prefill its requests with deadlines, of that priority and higher ones."""
        self._fade(now_s)
        return sum(self._work_ms[: priority + 1]) / (1e3 * USE_S)

    def _fade(self, now_s: float) -> None:
        if now_s > self._at_s:
            faded = exp((self._at_s - now_s) / USE_S)
            self._work_ms, self._at_s = [each * faded for each in self._work_ms], now_s


class Deadlines:
    """The shortest deadlines of late by tenant and priority; and how often others were passed."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}
        # By priority and number of replicas, since `_others_s`: what tenants without deadlines have to heed.
        self._others: dict[tuple[Priority, int], tuple[float, int]] = {}
        self._others_s = 0.0
        self._passed = 0
        self.any = False  # whether any counts

    def asked(self, tenant: str, priority: Priority, wanted_s: float, now_s: float) -> None:
        """A request wants its first token within `wanted_s`, which an idle replica could keep."""
        self.tick(now_s)
        gate = self._gates.get(tenant)
        if gate is None:
            if len(self._gates) >= GATES_MAX:
                del self._gates[next(iter(self._gates))]
            gate = self._gates[tenant] = _Gate(now_s)
        if gate.asked(priority, wanted_s):
            self._others.clear()
        self.any = True

    def tick(self, now_s: float) -> None:
        """Forget what was asked long ago."""
        if self.any:
            self._gates = {tenant: gate for tenant, gate in self._gates.items() if gate.counts(now_s)}
            self.any = bool(self._gates)

    def gate(
        self, tenant: str, priority: Priority, replicas: int, now_s: float, *, others: bool = True
    ) -> tuple[float, int]:
        """What a tenant's request without a deadline has to heed where so many replicas can prefill it: milliseconds
        of prefill that may wait where it is placed, and the number of calm replicas that are kept from it where the
        fleet is busy. Without `others` only what the tenant's own deadlines make of that."""
        if not self.any or self._passed >= PASSES_MAX:
            return inf, 0
        own = self._gates.get(tenant)
        if own is None:
            waiting_ms, reserved = inf, 0
        else:
            waiting_ms, reserved = own.waiting_ms(priority), _reserved(own, replicas)
        if not others or len(self._gates) == (own is not None):
            return waiting_ms, reserved
        if now_s - self._others_s >= OTHERS_S:
            self._others.clear()
            self._others_s = now_s
        theirs = self._others.get((priority, replicas))
        if theirs is None:
            theirs = self._others[priority, replicas] = self._of_others(priority, replicas, now_s)
        return min(waiting_ms, theirs[0]), max(reserved, theirs[1])

    def _of_others(self, priority: Priority, replicas: int, now_s: float) -> tuple[float, int]:
        """What a tenant has to heed for others. A limit is backed by the use of all whose deadlines are no longer. What
        a tenant's own gate adds here is no stricter than the gate itself."""
        gates = sorted([(gate.waiting_ms(priority), tenant) for tenant, gate in self._gates.items()])
        waiting_ms, kept, use = inf, 0, 0.0
        for limit_ms, tenant in gates:
            if limit_ms == inf:
                break
            gate = self._gates[tenant]
            gate_use = gate.use(priority, now_s)
            use += gate_use
            kept += min(_reserved(gate, replicas), int(RESERVED_TIMES * gate_use))
            if use > 0:
                waiting_ms = min(waiting_ms, limit_ms * max(1.0, (USE_FULL * replicas / use) ** 2))
        return waiting_ms, min(replicas // RESERVED_OF, kept)

    def told(self, tenant: str, priority: Priority, prefill_ms: float, now_s: float, *, in_time: bool) -> None:
        """A stream's first token came, in time or late, behind so much prefill."""
        gate = self._gates.get(tenant)
        if gate is not None:
            moved = gate.reserved + (KEPT - 1 if in_time else KEPT) * STEP
            gate.reserved = min(RESERVED_FIRST, max(0.0, moved))
            gate.worked(priority, prefill_ms, now_s)

    def placed(self, *, urgent: bool, others_wait: bool) -> None:
        """A request was placed, by its deadline or not, while others wait here or not."""
        self._passed = self._passed + 1 if urgent and others_wait else 0


def _reserved(gate: _Gate, replicas: int) -> int:
    return min(replicas // RESERVED_OF, int(gate.reserved * replicas + 0.5))
