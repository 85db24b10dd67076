"""Limit of the prefill that may wait in an engine while requests with deadlines arrive, and of its cost to other
tenants.

Engines serve their own queues first come first served. If such a queue takes as long as a deadline, the order in the
router's queue has little effect. So while requests with deadlines arrive, other requests wait here for a *calm*
replica: one with waiting prefill below a part of the shortest recent deadline. A replica without waiting prefill is
always calm.

A running prefill is not interrupted. So in a busy fleet a few calm replicas are *reserved* for requests with deadlines:
as few as keep the share KEPT of the deadlines, and at most one of RESERVED_OF. Their number is adjusted in small steps:
up after a late stream, and down after one in time (Robbins & Monro 1951). It falls to 0 if all streams are in time
without it. A fleet is busy if there are RESERVED_FROM units of work per replica, including waiting requests here. Below
that no request waits while a replica is idle.

Each tenant has its own gate. The tenant's own requests without a deadline observe it fully. Requests of others observe
it in proportion to the tenant's *use*: the prefill of its requests with deadlines, as a share of the fleet.

- If the use is below USE_FULL of the fleet, more prefill may wait, by the square of the ratio. The reason is that
  engines are a little slower with short queues, and this cost must be justified.
- At most RESERVED_TIMES as many replicas as the tenant uses are reserved from others.

So the cost of a tenant's deadlines to others is bounded by the work of that tenant. Deadlines that are rare or belong
to little work cost nothing. A use counts once its answer has ended: a request that is cancelled before the first token
has no use.

A deadline that even an idle replica would miss does not count. Deadlines of a lower priority do not delay requests.
After PASSES_MAX urgent placements in a row while others wait here, the next placement needs no calm replica.
"""

from __future__ import annotations

from math import exp, inf

from router.core.admission.queue import PASSES_MAX
from router.core.types.requests import Priority

SEEN_S = 60.0  # minimum of seconds for which a deadline counts after its request
WAITING_PART = 0.1  # limit of waiting prefill at a calm replica, as a share of the shortest deadline
WAITING_MIN_MS = 20.0  # prefill that may always wait at a calm replica: one or two steps
KEPT = 0.99  # share of the deadlines to keep
STEP = 0.05  # step of the share of reserved replicas
RESERVED_OF = 4  # at most one of this many replicas is reserved
RESERVED_FIRST = 0.25  # share that is reserved at first, and at most
# Mean backlog above which replicas are reserved, waiting here and at replicas, in units
# (core/estimators/model_speeds.py).
RESERVED_FROM = 1.0
USE_S = 20.0  # seconds over which a tenant's use is averaged
USE_FULL = 0.08  # share of the fleet above which others fully observe a tenant's gate
RESERVED_TIMES = 2.0  # replicas that are reserved from others, per replica of a tenant's use
GATES_MAX = 256  # maximum of tenants with deadlines that count at the same time
OTHERS_S = 0.1  # seconds for which the limits for others are cached


class _Gate:
    """Deadlines of one tenant."""

    __slots__ = ("_at_s", "_before_s", "_shortest_s", "_since_s", "_work_ms", "reserved")

    def __init__(self, now_s: float) -> None:
        self._shortest_s, self._before_s = [inf] * len(Priority), [inf] * len(Priority)
        self._since_s = self._at_s = now_s
        self._work_ms = [0.0] * len(Priority)  # recent prefill, exponentially faded
        self.reserved = RESERVED_FIRST  # share of the replicas

    def add_deadline(self, priority: Priority, wanted_s: float) -> bool:
        """Add a deadline; returns True if it is the shortest recent one."""
        shorter = wanted_s < self._shortest_s[priority]
        if shorter:
            self._shortest_s[priority] = wanted_s
        return shorter

    def counts(self, now_s: float) -> bool:
        """Drop old deadlines; returns True if any are left."""
        if now_s - self._since_s >= SEEN_S:
            kept_s = self._shortest_s if now_s - self._since_s < 2 * SEEN_S else [inf] * len(Priority)
            self._before_s, self._shortest_s, self._since_s = kept_s, [inf] * len(Priority), now_s
        return min(*self._before_s, *self._shortest_s) < inf

    def waiting_ms(self, priority: Priority) -> float:
        """Return the milliseconds of prefill that may wait at a replica where a request without a deadline is
        placed."""
        shortest_s = min(*self._shortest_s[: priority + 1], *self._before_s[: priority + 1])
        return max(WAITING_MIN_MS, WAITING_PART * 1e3 * shortest_s)

    def add_prefill_work(self, priority: Priority, prefill_ms: float, now_s: float) -> None:
        self._fade(now_s)
        self._work_ms[priority] += prefill_ms

    def use(self, priority: Priority, now_s: float) -> float:
        """Return the mean number of replicas that prefill its requests with deadlines, of this and higher
        priorities."""
        self._fade(now_s)
        return sum(self._work_ms[: priority + 1]) / (1e3 * USE_S)

    def _fade(self, now_s: float) -> None:
        if now_s > self._at_s:
            faded = exp((self._at_s - now_s) / USE_S)
            self._work_ms, self._at_s = [each * faded for each in self._work_ms], now_s


class DeadlineReserve:
    """The shortest recent deadlines by tenant and priority, and the number of urgent placements in a row."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}
        # By priority and number of replicas, since `_others_s`: limits for tenants without deadlines.
        self._others: dict[tuple[Priority, int], tuple[float, int]] = {}
        self._others_s = 0.0
        self._passed = 0
        self.any = False  # True if any deadline counts

    def note_deadline(self, tenant: str, priority: Priority, wanted_s: float, now_s: float) -> None:
        """Record a request with a first token wanted within `wanted_s`, which an idle replica could deliver."""
        self.tick(now_s)
        gate = self._gates.get(tenant)
        if gate is None:
            if len(self._gates) >= GATES_MAX:
                del self._gates[next(iter(self._gates))]
            gate = self._gates[tenant] = _Gate(now_s)
        if gate.add_deadline(priority, wanted_s):
            self._others.clear()
        self.any = True

    def tick(self, now_s: float) -> None:
        """Drop old deadlines."""
        if self.any:
            self._gates = {tenant: gate for tenant, gate in self._gates.items() if gate.counts(now_s)}
            self.any = bool(self._gates)

    def gate(
        self, tenant: str, priority: Priority, replicas: int, now_s: float, *, others: bool = True
    ) -> tuple[float, int]:
        """Return the limits for a tenant's request without a deadline if `replicas` replicas can prefill it.

        The result is (milliseconds of prefill that may wait at its replica, calm replicas that are reserved from it in
        a busy fleet). Without `others` only the tenant's own deadlines count.
        """
        if not self.any or self._passed >= PASSES_MAX:
            return inf, 0
        own = self._gates.get(tenant)
        if own is None:
            waiting_ms, reserved = inf, 0
        else:
            waiting_ms, reserved = own.waiting_ms(priority), _count_reserved(own, replicas)
        if not others or len(self._gates) == (own is not None):
            return waiting_ms, reserved
        if now_s - self._others_s >= OTHERS_S:
            self._others.clear()
            self._others_s = now_s
        theirs = self._others.get((priority, replicas))
        if theirs is None:
            theirs = self._others[priority, replicas] = self._compute_limits_for_others(priority, replicas, now_s)
        return min(waiting_ms, theirs[0]), max(reserved, theirs[1])

    def _compute_limits_for_others(self, priority: Priority, replicas: int, now_s: float) -> tuple[float, int]:
        """Return the limits that a tenant observes for others. A limit is backed by the use of all tenants with
        deadlines that are not longer. The tenant's own gate also enters here, but is not stricter than the gate
        itself."""
        gates = sorted([(gate.waiting_ms(priority), tenant) for tenant, gate in self._gates.items()])
        waiting_ms, kept, use = inf, 0, 0.0
        for limit_ms, tenant in gates:
            if limit_ms == inf:
                break
            gate = self._gates[tenant]
            gate_use = gate.use(priority, now_s)
            use += gate_use
            kept += min(_count_reserved(gate, replicas), int(RESERVED_TIMES * gate_use))
            if use > 0:
                waiting_ms = min(waiting_ms, limit_ms * max(1.0, (USE_FULL * replicas / use) ** 2))
        return waiting_ms, min(replicas // RESERVED_OF, kept)

    def note_first_token(
        self, tenant: str, priority: Priority, prefill_ms: float, now_s: float, *, in_time: bool
    ) -> None:
        """Record the first token of a stream, in time or late, with `prefill_ms` of prefill."""
        gate = self._gates.get(tenant)
        if gate is not None:
            moved = gate.reserved + (KEPT - 1 if in_time else KEPT) * STEP
            gate.reserved = min(RESERVED_FIRST, max(0.0, moved))
            gate.add_prefill_work(priority, prefill_ms, now_s)

    def note_placement(self, *, urgent: bool, others_wait: bool) -> None:
        """Record the placement of a request: `urgent` if by its deadline, `others_wait` if others wait here."""
        self._passed = self._passed + 1 if urgent and others_wait else 0


def _count_reserved(gate: _Gate, replicas: int) -> int:
    return min(replicas // RESERVED_OF, int(gate.reserved * replicas + 0.5))
