"""Windows of replicas: they decide when the fleet is full, and which request gets the next place.

A replica's window is its maximum of open leases. If `w` of `n` requests that are open here wait in the engine, it works
on n - w of them. A few more should wait there so that its batch never runs dry. So the window is n - w +
engine_waiting_max. It is never less than WINDOW_MIN, so that there is always something to learn from. It is computed
from each probe and valid until the next one, so requests that are sent in between count on top.

The window takes effect when more than engine_waiting_max requests wait in the engine. If no request waits there, it
grows: fast if it is fully used, slowly if not. It does not grow while a request waits here for another reason, because
then nothing was learned. Unused places do not shrink it either; otherwise a tenant that is limited to its share would
shrink it with each probe. Before the window takes effect and after it ends, there may be BURST_MAX more leases than the
last probe reported, because an engine that was never seen full may become full at any moment. If the engine's metrics
are missing, old or absurd, the window is `in_flight_max`: bad metrics never block a request.

A request has capacity if a permitted replica has fewer leases than its window. With disaggregated prefill, if no
replica takes the request whole, two replicas must have capacity and be a pair. Places are the requests that engines
work on at once, without those that may wait there. While other tenants are active, a tenant that holds
`tenant_share_max` of the places gets no further one if that leaves others too few for their use (shares.py). A request
without capacity waits (queue.py). If the wait would exceed the limit, it is rejected immediately.

While requests with deadlines arrive, requests without one have capacity only at calm replicas (deadline_budget.py,
without_deadline.py).

If no replica is full, no request waits and few leases are open, all of this is three comparisons per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf
from typing import Protocol

from router.core.admission.deadline_budget import DeadlineReserve
from router.core.admission.queue import FairQueue, Pool, Ticket
from router.core.admission.shares import USE_FULL, Shares
from router.core.admission.without_deadline import HELD_PART, Calm, Known
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.types.placements import Shed
from router.core.types.replicas import Load
from router.core.types.requests import Priority

WINDOW_MIN = 4  # smallest window, in leases
BURST_MAX = 256  # leases beyond the last probe's: vLLM's smaller default for --max-num-seqs
# Growth of a window with each probe that reported no waiting requests in the engine.
GROWTH_BOUND, GROWTH_IDLE = 1.25, 1.1
MODELS_MAX = 64  # models with places that are summed individually
WAITING_SANITY_MAX = 1_000_000  # a larger number of waiting requests is considered an error
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0
LEASE_DURATION_DECAY = 0.98  # part of the sums of lease durations that remains after another lease
RATE_WINDOW_S = 10.0  # seconds of waiting over which the rate of turns is measured
RATE_PRIOR_S = 2.0  # seconds of waiting that the rate by Little's law counts for


class AdmissionLimits(Protocol):
    """Limits of admission: the settings `admission.*`."""

    @property
    def in_flight_max(self) -> int:
        """Maximum of leases of one replica."""

    @property
    def engine_waiting_max(self) -> int:
        """Maximum of requests waiting in one engine."""

    @property
    def queue_requests_max(self) -> int:
        """Maximum of requests waiting here."""

    @property
    def queue_bytes_max(self) -> int:
        """Maximum of bytes of their bodies."""

    @property
    def queue_timeout_s(self) -> float:
        """Maximum wait of each request in seconds from its arrival, for any reason."""

    @property
    def defer_max_s(self) -> float:
        """Part of the wait in seconds for which a request that would evict too much may be deferred; 0: no deferral."""

    @property
    def tenant_share_max(self) -> float:
        """Maximum share of the places, 0 to 1."""


@dataclass(frozen=True, slots=True)
class NoLimits:
    """Limits with which no request ever waits."""

    in_flight_max: int = 1 << 30
    engine_waiting_max: int = 1 << 30
    queue_requests_max: int = 0
    queue_bytes_max: int = 0
    queue_timeout_s: float = 0.0
    defer_max_s: float = 0.0
    tenant_share_max: float = 1.0


@dataclass(slots=True)
class _Window:
    """A replica's window as of its last probe."""

    member: ReplicaState
    load: Load
    at_s: float
    size: int
    binds: bool = False  # the engine was recently seen full


@dataclass(slots=True)
class DequeueRate:
    """Turns per second over the last RATE_WINDOW_S in which any request waited."""

    turns: float = 0.0
    waited_s: float = 0.0
    _at_s: float = field(default=0.0)

    def pass_time(self, now_s: float, *, waiting: bool) -> None:
        """Advance the time; `waiting` is True if any request waited since the last call."""
        gone_s = now_s - self._at_s
        self._at_s = now_s
        if waiting and gone_s > 0:
            fade = exp(-gone_s / RATE_WINDOW_S)
            self.turns *= fade
            self.waited_s = self.waited_s * fade + gone_s

    def per_s(self, expected_per_s: float) -> float:
        """Return the rate from observed and expected turns; 0 if neither is known."""
        prior_s = RATE_PRIOR_S if expected_per_s else 0.0
        seen_s = self.waited_s + prior_s
        return (self.turns + expected_per_s * prior_s) / seen_s if seen_s else 0.0


@dataclass(slots=True)
class _Due:
    """A deadline of an open lease."""

    at_s: float
    priority: Priority
    prefill_ms: float  # prefill of its prompt, on either replica


class ConcurrencyLimiter:
    """Places, and the queue for them. `now_s` is any monotonic clock."""

    def __init__(self, router: Router, limits: AdmissionLimits, *, stale_s: float) -> None:
        """`stale_s`: maximum age in seconds of a probed load; an older one is ignored."""
        self.queue = FairQueue()
        self.deadlines = DeadlineReserve()
        self._calm = Calm(router, self.queue, self.deadlines)
        self.full: set[str] = set()  # replicas without capacity
        self._router = router
        self._stale_s = stale_s
        self._windows: dict[str, _Window] = {}
        self.tenants: dict[int, str] = {}  # open lease -> tenant
        self._due: dict[int, _Due] = {}  # lease -> its deadline, if its request has one
        self._open_of_tenant: dict[tuple[str, str], int] = {}  # (replica, tenant) -> open leases
        self._shares = Shares()
        self._rate = DequeueRate()
        self._ended = self._lasted_s = 0.0  # number and total time of ended leases, both faded with each end
        self.configure(limits)

    def configure(self, limits: AdmissionLimits) -> None:
        """Apply other limits; waiting requests continue to wait if there is capacity for them."""
        self._limits = limits
        self._windows = {id_: window for id_, window in self._windows.items() if window.binds}
        for window in self._windows.values():
            window.size = min(window.size, limits.in_flight_max)
        self._survey()

    def window(self, replica: str) -> int:
        """Return the maximum of open leases of a replica."""
        window = self._windows.get(replica)
        return window.size if window is not None else self._limits.in_flight_max

    # -- leases --------------------------------------------------------------------------------------------------

    def on_lease_opened(
        self, lease: Lease, tenant: str, due_s: float | None = None, priority: Priority = Priority.NORMAL
    ) -> None:
        """Record a new lease for a request with its first token wanted by `due_s` (None: no deadline)."""
        if self.deadlines.any:
            urgent = due_s is not None and due_s > lease.placed_s
            self.deadlines.note_placement(urgent=urgent, others_wait=bool(self.queue))
        if due_s is not None:
            self._due[lease.id] = _Due(due_s, priority, self.prefill_ms(lease))
        replica = lease.replica
        self.tenants[lease.id] = tenant
        whose = replica, tenant
        self._open_of_tenant[whose] = self._open_of_tenant.get(whose, 0) + 1
        self._shares.on_lease_opened(tenant, lease.placed_s)
        self._count(replica)
        if lease.receipt.leg is not None:
            self._count(lease.receipt.leg.replica)

    def prefill_ms(self, lease: Lease) -> float:
        """Return the expected milliseconds of prefill of a lease's request, on either replica."""
        return self._router.disaggregator.prefill_ms(lease)

    def release_prefill(self, lease: Lease) -> None:
        """Release the place of the prefill stage of a decode lease."""
        if lease.receipt.leg is not None and lease.receipt.leg.replica in self.full:
            self._count(lease.receipt.leg.replica)

    def on_lease_closed(self, lease: Lease, now_s: float) -> bool:
        """Record the end of a lease; returns True if it was open here."""
        tenant = self.tenants.pop(lease.id, None)
        if tenant is None:
            return False
        due, first_s = self._due.pop(lease.id, None), lease.first_token_s
        if due is not None and first_s is not None and lease.placed_s + due.prefill_ms / 1e3 <= due.at_s:
            self.deadlines.note_first_token(tenant, due.priority, due.prefill_ms, now_s, in_time=first_s <= due.at_s)
        self._ended = self._ended * LEASE_DURATION_DECAY + 1.0
        self._lasted_s = self._lasted_s * LEASE_DURATION_DECAY + now_s - lease.placed_s
        replica = lease.replica
        whose = replica, tenant
        self._open_of_tenant[whose] -= 1
        if not self._open_of_tenant[whose]:
            del self._open_of_tenant[whose]
        self._shares.on_lease_closed(tenant, now_s)
        if replica in self.full:
            self._count(replica)
        self.release_prefill(lease)  # a prefill stage ends at the latest with its decode stage
        return True

    def _count(self, replica: str) -> None:
        """Update the record of full replicas."""
        member = self._router.fleet.members.get(replica)
        if member is not None and self._is_full(member):
            self.full.add(replica)
        else:
            self.full.discard(replica)

    def _is_full(self, member: ReplicaState) -> bool:
        """True if a replica has no capacity. If its engine reports no counts that could confirm the open leases of
        other routers, it accepts one lease of this router. The reason is that the shared store is not trusted: any
        writer to it may publish any number."""
        doubtful = member.counters.others_max is None and not member.leases and bool(member.others.open)
        return member.open_leases >= self.window(member.id) and not doubtful

    # -- requests ------------------------------------------------------------------------------------------------

    def free(self, tenant: str, now_s: float) -> bool:
        """True if nothing at all prevents a placement for the tenant, which is nearly always the case."""
        self._shares.note_request(tenant, now_s)
        return not (self.full or self.queue or self.deadlines.any) and len(self.tenants) < self._few

    def fits(self, pool: Pool, tenant: str, now_s: float, calm_for: Priority | None = None) -> bool:
        """True if a request has capacity now; `calm_for` is its priority if only a calm replica will do. Raises
        NoReplicaReady, or Shed if all replicas have requested a cooldown."""
        busy = self.full
        if calm_for is not None:
            busy = self._calm.busy(pool, tenant, calm_for, self.full, now_s, others=self._may_hold())
        return self._router.disaggregator.has_room(*pool, now_s, busy) and not self._has_its_share(pool, tenant, now_s)

    def passed_over(self, wanted: PlacementRequest, pool: Pool, now_s: float) -> set[str]:
        """Return the replicas to skip when a request without a deadline is placed now. Raises NoReplicaReady and
        Shed."""
        return self._calm.passed_over(pool, wanted.tenant, wanted.priority, self.full, now_s)

    def note_request(self, wanted: PlacementRequest, prefill_ms: float, now_s: float) -> None:
        """Record a request that was placed or waits. If it has a deadline that its shortest prefill (`prefill_ms`) does
        not miss by itself, requests without a deadline wait for calm replicas."""
        due_s = wanted.due_s
        if due_s is not None and now_s + prefill_ms / 1e3 <= due_s:
            self.deadlines.note_deadline(wanted.tenant, wanted.priority, due_s - now_s, now_s)

    def wait(self, ticket: Ticket, now_s: float, held: int, held_bytes: int) -> list[Ticket]:
        """Queue a request; returns the requests that are rejected in its place. `held` and `held_bytes` are the number
        and size of deferred requests, because the limits cover both together. Raises Shed if the request itself is
        rejected."""
        limits, queue = self._limits, self.queue
        self._rate.pass_time(now_s, waiting=bool(queue))
        rate = self._turns_per_s()
        too_long = rate > 0 and (queue.ahead(ticket.tenant, ticket.priority) + 1) / rate > limits.queue_timeout_s
        if too_long and not self._waits_for_others(ticket, now_s):
            raise self.make_shed_error(ticket.tenant, ticket.priority)
        out = queue.add(ticket, max(0, limits.queue_requests_max - held), limits.queue_bytes_max - held_bytes)
        if out is None:
            raise self.make_shed_error(ticket.tenant, ticket.priority)
        return out

    def _waits_for_others(self, ticket: Ticket, now_s: float) -> bool:
        """True if only other tenants' deadlines delay a request without capacity."""
        pool, tenant = ticket.pool, ticket.tenant
        if not self.deadlines.any or self._has_its_share(pool, tenant, now_s):
            return False
        own = self._calm.busy(pool, tenant, ticket.priority, self.full, now_s, others=False)
        return self._router.disaggregator.has_room(*pool, now_s, own)

    def _may_hold(self) -> bool:
        return self._calm.may_hold(self._limits.queue_requests_max, self._limits.queue_bytes_max)

    def make_shed_error(self, tenant: str, priority: Priority) -> Shed:
        """Return the error for a request that is rejected."""
        rate = self._turns_per_s()
        wait_s = self.queue.ahead(tenant, priority) / rate if rate else RETRY_AFTER_MIN_S
        after_s = min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
        return Shed("overloaded", "All replicas are busy, and the queue is full.", after_s)

    def turn(self, now_s: float) -> Ticket | None:
        """Remove and return the request to be placed now, or None if none can be placed. It must be called again after
        that placement."""
        queue, usable = self.queue, self._router.fleet.usable()
        if not queue or (usable and len(self.full) >= len(usable) and all(m.id in self.full for m in usable)):
            return None

        def room(pool: Pool) -> bool:
            try:
                return self._router.disaggregator.has_room(*pool, now_s, self.full)
            except NoReplicaReady:
                return True  # placing the request raises NoReplicaReady, which is reported to the client
            except Shed:
                return False

        known: Known = {}
        held_since_s = now_s - HELD_PART * self._limits.queue_timeout_s if self._may_hold() else inf

        def calm(pool: Pool, oldest: Ticket) -> bool:
            try:
                others = oldest.at_s > held_since_s
                return self._calm.has_calm(pool, oldest, self.full, now_s, known, others=others)
            except (NoReplicaReady, Shed):
                return True

        self._rate.pass_time(now_s, waiting=True)
        ticket = queue.turn(room, lambda pool, tenant: self._has_its_share(pool, tenant, now_s), now_s, calm)
        if ticket is not None:
            self._rate.turns += 1
        return ticket

    def tick(self, now_s: float) -> list[Ticket]:
        """Process new probes, several times a second; returns the requests that have waited too long."""
        self._rate.pass_time(now_s, waiting=bool(self.queue))
        self.deadlines.tick(now_s)
        for member in self._router.fleet.members.values():
            self._resize(member, now_s)
        self._survey()
        return list(self.queue.remove_expired(now_s - self._limits.queue_timeout_s))

    # -- inside --------------------------------------------------------------------------------------------------

    def _resize(self, member: ReplicaState, now_s: float) -> None:
        window, load = self._windows.get(member.id), member.load
        if window is None or window.member is not member:  # another engine at the same address
            window = self._windows[member.id] = _Window(member, Load(), now_s, self._limits.in_flight_max)
        if window.load is not load:  # a probe without a result leaves the load as it is
            window.load, window.at_s = load, now_s
            self._learn(window, member.counters.in_flight_probed, load.waiting, member.counters.coming_probed)
        elif now_s - window.at_s > self._stale_s:
            window.size, window.binds = self._limits.in_flight_max, False

    def _learn(self, window: _Window, in_flight: int, waiting: int | None, coming: int) -> None:
        """Process one probe. `coming` of the waiting requests may be decode stages with blocks still in transfer; these
        do not wait for a place."""
        most, engine_waiting_max, before = self._limits.in_flight_max, self._limits.engine_waiting_max, window.size
        if waiting is None or not 0 <= waiting <= WAITING_SANITY_MAX:
            window.size, window.binds = most, False
            return
        if coming:
            waiting = max(0, waiting - coming)
        most = min(most, in_flight + BURST_MAX)
        size = in_flight - waiting + engine_waiting_max
        if waiting > engine_waiting_max:
            window.binds = True
        elif not waiting and in_flight >= before:
            size = max(size, int(before * GROWTH_BOUND))
        elif self.queue and in_flight < before:
            size = max(size, before)
        elif not waiting:
            size = int(before * GROWTH_IDLE) + 1
        window.binds &= size < most
        window.size = min(max(size, WINDOW_MIN), most) if window.binds else most

    def _survey(self) -> None:
        """Find the full replicas, and the number of open leases below which no tenant can exceed its share."""
        fleet, limits = self._router.fleet, self._limits
        for id_ in [id_ for id_ in self._windows if id_ not in fleet.members]:
            del self._windows[id_]
        self.full = {m.id for m in fleet.members.values() if self._is_full(m)}
        names = fleet.model_names()
        pools = (
            [fleet.list_serving(name) for name in names] if len(names) <= MODELS_MAX else [[m] for m in fleet.usable()]
        )
        places = (sum(map(self._places, self._router.disaggregator.filter_places(members))) for members in pools)
        self._few = limits.tenant_share_max * min(places, default=limits.in_flight_max)

    def _places(self, member: ReplicaState) -> int:
        """Return the leases that a replica works on at once, if known: waiting leases do not use its time yet."""
        window = self._windows.get(member.id)
        if window is None or not window.binds:
            return self.window(member.id)
        return max(window.size - self._limits.engine_waiting_max, WINDOW_MIN)

    def _has_its_share(self, pool: Pool, tenant: str, now_s: float) -> bool:
        if len(self.tenants) < self._few or not self._shares.has_other_tenants(tenant, now_s):
            return False
        kept, lasting = self._shares.compute_reserved(tenant, now_s)
        model, fleet = pool[0], self._router.fleet
        members = fleet.usable() if model is None else fleet.list_serving(model)
        members = self._router.disaggregator.filter_places(members, may_split=pool[2])
        own = sum(self._open_of_tenant.get((m.id, tenant), 0) for m in members)
        places = sum(map(self._places, members))
        # Slots for waiting in engines are not places. They are closed to the tenant in proportion to the use by others.
        may_wait = sum(self.window(m.id) for m in members) - places
        open_part = max(0.0, 1.0 - lasting / max(1.0, USE_FULL * places))
        most = max(places * self._limits.tenant_share_max, places - kept + may_wait * open_part)
        return own >= max(1.0, most)

    def _turns_per_s(self) -> float:
        """Return the turns per second: by Little's law (open leases over the time of an answer), and by turns once
        there are any."""
        lasted_s = self._lasted_s
        return self._rate.per_s(len(self.tenants) * self._ended / lasted_s if lasted_s > 0 else 0.0)
