"""Admission: places a request, queues it or sheds it, by three checks in core/admission in this order: rates
(rate_limits.py), concurrency (concurrency_windows.py), deferral (hold_back.py).

A waiting request is a ticket and a callback, without a task or a timer. The queue is served when a lease is returned,
and a few times a second, because capacity can appear in other ways. A retry is neither queued nor charged again.

There is one wait with one limit: `queue_timeout_s` from the arrival of the request. For the first `defer_max_s` of that
time the request may be deferred; after that it queues with all others. A request that leaves while it waits and comes
again within a minute gets credit for its earlier wait (core/admission/wait_credit.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import cast

from router.control.response_owners import ResponseOwners
from router.core.admission.concurrency_windows import AdmissionLimits, ConcurrencyLimiter
from router.core.admission.hold_back import DeferredQueue
from router.core.admission.queue import Pool, Ticket
from router.core.admission.rate_limits import Rates, TenantRateLimits
from router.core.admission.wait_credit import WaitCredit
from router.core.fleet.lease import Lease
from router.core.placement.filters import NOBODY
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.placement.ttft_feasibility import unreachable
from router.core.types.placements import Deferred, EndReason, Outcome, Shed
from router.core.types.replicas import matches_address
from router.core.types.requests import Priority

AdmissionCallback = Callable[[Lease | Exception], None]


class _Waiting:
    __slots__ = ("answered", "charged_tokens", "request")

    def __init__(self, request: PlacementRequest, answered: AdmissionCallback, charged_tokens: int) -> None:
        self.request, self.answered, self.charged_tokens = request, answered, charged_tokens


class AdmissionController:
    """Admits the requests of all frontends."""

    def __init__(
        self,
        router: Router,
        owners: ResponseOwners,
        limits: AdmissionLimits,
        *,
        stale_s: float,
        clock: Callable[[], float],
        shed: Callable[[str, Priority, str], None],
    ) -> None:
        """`shed(code, priority, model)` is called for each request that is refused; a request may name no model: ""."""
        self._router = router
        self._owners = owners
        self._clock = clock
        self._shed = shed
        self._admission = ConcurrencyLimiter(router, limits, stale_s=stale_s)
        self._holding: DeferredQueue[Ticket] = DeferredQueue()
        self._limits = limits
        self._returning = WaitCredit()
        self._released = False
        self.quotas = TenantRateLimits()
        self._charged: dict[int, tuple[str, int]] = {}  # lease id -> tenant with a rate, tokens charged for it
        self._giving = False

    def configure(self, limits: AdmissionLimits) -> None:
        """Replace the limits. Waiting requests stay queued if the new limits have capacity for them."""
        self._limits = limits
        self._admission.configure(limits)

    def release(self) -> None:
        """Stop deferring requests, because the router is about to end."""
        self._released = True

    def set_tenants(self, tenants: Mapping[str, Rates]) -> None:
        """Replace the rates of all tenants, by tenant name."""
        self.quotas.configure(tenants)

    def window(self, replica: str) -> int:
        """Return the maximum of open leases of a replica."""
        return self._admission.window(replica)

    def held_back(self) -> int:
        """Return the number of waiting requests that are deferred."""
        return len(self._holding)

    def count_queued(self) -> tuple[dict[Priority, int], int]:
        """Count waiting requests by priority, deferred ones included, and the bytes of their bodies."""
        queue = self._admission.queue
        counts = {priority: queue.count(priority) for priority in Priority}
        for ticket in self._holding:
            counts[ticket.priority] += 1
        return counts, queue.size_bytes + self._held_back_bytes()

    def count_waiting(self) -> Counter[tuple[Priority, str]]:
        """Count waiting requests by priority and model. The model is "" if a request names no model."""
        counts = Counter[tuple[Priority, str]]()
        for pool, priority, requests in self._admission.queue.count_waiting():
            counts[priority, pool[0] or ""] += requests
        for ticket in self._holding:
            counts[ticket.priority, ticket.pool[0] or ""] += 1
        return counts

    def count_by_tenant(self) -> tuple[Counter[str], Counter[str]]:
        """Count open leases and waiting requests by tenant."""
        waiting = self._admission.queue.count_by_tenant()
        waiting.update(ticket.tenant for ticket in self._holding)
        return Counter(self._admission.tenants.values()), waiting

    # -- requests ------------------------------------------------------------------------------------------------

    def charge(self, tenant: str, priority: Priority) -> bool:
        """Take one request from the tenant's rate, before its body is read and its target is known. Returns True: it
        was taken, and `ask` must not take it again. Raises Shed."""
        try:
            self.quotas.take(tenant, 0, self._clock())
        except Shed as shed:
            self._shed(shed.code, priority, "")
            raise
        return True

    def admit(self, request: PlacementRequest, exclude: frozenset[str], answered: AdmissionCallback) -> Lease | Ticket:
        """Place a request now, or return a ticket.

        With a ticket, `answered` is called once, unless the ticket is taken back. It gets the lease, or the exception
        that would have been raised. A request with exclusions is a retry. Raises NoReplicaReady, Shed, and
        UnknownResponse.
        """
        now_s, tenant, admission = self._clock(), request.tenant, self._admission
        charged, waited_s = self._charge(request, now_s, retry=bool(exclude)), 0.0
        urgent = request.due_s is not None and request.due_s > now_s
        try:
            if exclude:
                return self._place(request, exclude, charged)
            fits = admission.free(tenant, now_s)
            if not fits:
                self._give_turns(now_s)  # requests that came earlier have precedence
                fits = admission.fits(self._pool(request), tenant, now_s, None if urgent else request.priority)
            waited_s = self._returning.redeem(_identity(request), now_s)
            if fits:
                try:
                    lease = self._place(request, exclude, charged, may_hold_back=self._may_hold_back(request, waited_s))
                except Deferred:
                    ticket = self._ticket(request, answered, charged, now_s, waited_s)
                    self._holding.add(ticket, ticket.since_s, tenant)
                    return ticket
                admission.note_request(request, admission.prefill_ms(lease), now_s)
                return lease
            ticket = self._ticket(request, answered, charged, now_s, waited_s)
            if request.due_s is not None and ticket.start_by_s is not None:
                admission.note_request(request, (request.due_s - ticket.start_by_s) * 1e3, now_s)
            out = admission.wait(ticket, now_s, len(self._holding), self._held_back_bytes())
        except Exception as error:
            if not exclude:
                self.quotas.spend(tenant, -charged, now_s)
            if isinstance(error, Shed):
                self._returning.remember(_identity(request), waited_s, now_s)
                self._report_shed(error.code, request)
            raise
        for other in out:
            self._turn_away(other, now_s)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a waiting request. This changes nothing if the ticket was already answered."""
        if self._admission.queue.remove(ticket) or self._holding.remove(ticket):
            waiting, now_s = self._waiting_of(ticket), self._clock()
            self.quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
            self._returning.remember(_identity(waiting.request), now_s - ticket.since_s, now_s)

    def register_external_lease(self, lease: Lease) -> None:
        """Count a lease that was opened without a call of `ask`."""
        self._admission.on_lease_opened(lease, "")

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first body event of a stream. Queued requests without a deadline may wait for its replica to be
        calm: its waiting prefill is short enough for recent deadlines (core/admission/deadline_budget.py)."""
        self._router.first_token(lease, now_s)
        if self._admission.deadlines.any and self._admission.queue:
            self._give_turns(now_s)

    def finish_prefill(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Record the end of the prefill stage of a decode lease, with any outcome. Its replica then has a free place,
        and less waiting prefill."""
        self._router.finish_prefill(lease, outcome, now_s)
        self._admission.release_prefill(lease)
        if self._admission.queue:
            self._give_turns(now_s)

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Return a lease, with any outcome, and give its place to another request. A second call changes nothing."""
        self._router.finish(lease, outcome, now_s)
        if self._admission.on_lease_closed(lease, now_s):
            if lease.id in self._charged:
                self._settle(lease, outcome, now_s)
            if self._admission.queue:
                self._give_turns(now_s)

    def tick(self) -> None:
        """Process probe results, new replicas, and requests at the end of their wait. Called every TICK_S."""
        now_s = self._clock()
        for ticket in self._admission.tick(now_s):
            self._turn_away(ticket, now_s)
        for ticket in self._admission.queue.late(Priority.LOW, now_s):
            due_s = self._waiting_of(ticket).request.due_s or now_s
            self._turn_away(
                ticket, now_s, unreachable((due_s - (ticket.start_by_s or due_s)) * 1e3, (due_s - now_s) * 1e3)
            )
        self._give_turns(now_s)
        self._try_held_back(now_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _place(
        self, request: PlacementRequest, exclude: frozenset[str], charged_tokens: int, *, may_hold_back: bool = False
    ) -> Lease:
        pool, now_s = self._pool(request), self._clock()
        only = pool[1]
        hold_back = may_hold_back and only is None
        admission, urgent = self._admission, request.due_s is not None and request.due_s > now_s
        full = admission.full if urgent or exclude else admission.passed_over(request, pool, now_s)
        lease = self._router.route(request, now_s, exclude=exclude, only=only, full=full, may_hold_back=hold_back)
        admission.on_lease_opened(lease, request.tenant, request.due_s, request.priority)
        if charged_tokens:
            self._charged[lease.id] = (request.tenant, charged_tokens)
        return lease

    def _only(self, request: PlacementRequest) -> str | frozenset[str] | None:
        """Return the one replica that can answer, or the addresses of those that may; None if any may. Raises
        UnknownResponse."""
        owner, among = self._owners.owner(request.response_id, request.tenant), request.allowed_addresses
        if owner is None or among is None:
            return owner or among
        return owner if matches_address(owner, among) else frozenset()

    def _pool(self, request: PlacementRequest) -> Pool:
        return request.model, self._only(request), self._router.disaggregator.may_plan(request)

    def _prompt_tokens(self, request: PlacementRequest) -> int:
        """Estimate the tokens of the prompt, before it is matched."""
        prompt = request.ask.prompt
        if request.tokens is not None and request.tokens.tokens:
            return request.tokens.tokens
        if prompt is None:
            return request.body_tokens
        return self._router.models.tokens(request.model or "").tokens_of(prompt)

    def _ticket(
        self, request: PlacementRequest, answered: AdmissionCallback, charged_tokens: int, now_s: float, waited_s: float
    ) -> Ticket:
        cost, waiting = self._prompt_tokens(request), _Waiting(request, answered, charged_tokens)
        pool, size_bytes = self._pool(request), request.body_bytes
        ticket = Ticket(request.tenant, request.priority, pool, cost, size_bytes, now_s, waiting, now_s - waited_s)
        if request.due_s is not None:
            ticket.start_by_s = self._start_by_s(request, request.due_s, now_s)
        return ticket

    def _start_by_s(self, request: PlacementRequest, due_s: float, now_s: float) -> float:
        """Return the latest time of a placement that meets the deadline, by the shortest prefill that any replica
        needs. Raises NoReplicaReady. Raises Shed if the request may be turned away and cannot be in time."""
        soonest_ms, prefill_ms = self._router.predict_ttft(request, now_s, self._only(request))
        left_ms = (due_s - now_s) * 1e3
        if soonest_ms > left_ms and request.priority is Priority.LOW:
            raise unreachable(soonest_ms, left_ms)
        return due_s - prefill_ms / 1e3

    def _may_hold_back(self, request: PlacementRequest, waited_s: float) -> bool:
        """True if the limits leave capacity to defer a request, and its client may be made to wait."""
        if request.due_s is not None and request.due_s > self._clock():
            return False
        if waited_s >= self._hold_s or request.priority is Priority.HIGH or self._holding.full:
            return False
        if len(self._holding) + len(self._admission.queue) >= self._limits.queue_requests_max:
            return False
        return (
            self._held_back_bytes() + self._admission.queue.size_bytes + request.body_bytes
            <= self._limits.queue_bytes_max
        )

    @property
    def _hold_s(self) -> float:
        return 0.0 if self._released else self._limits.defer_max_s

    def _held_back_bytes(self) -> int:
        return sum(ticket.size_bytes for ticket in self._holding) if self._holding else 0

    def _try_held_back(self, now_s: float) -> None:
        """Place deferred requests at the end of `defer_max_s`, and a few others if they no longer cause thrashing."""
        for ticket in self._holding.over(now_s, self._hold_s):
            self._try(ticket, now_s, may_hold_back=False)
        for ticket in self._holding.next_few():
            self._try(ticket, now_s, may_hold_back=True)

    def _try(self, ticket: Ticket, now_s: float, *, may_hold_back: bool) -> None:
        """Place a deferred request. Without a free place after `defer_max_s` it waits for one with all others."""
        if ticket not in self._holding:  # the ticket was taken back while another one was answered
            return
        waiting, admission = self._waiting_of(ticket), self._admission
        try:
            if not admission.fits(ticket.pool, ticket.tenant, now_s):
                if not may_hold_back:
                    self._queue_up(ticket, now_s)
                return
            answer: Lease | Exception = self._place(
                waiting.request, NOBODY, waiting.charged_tokens, may_hold_back=may_hold_back
            )
        except Deferred:
            return
        except Exception as error:  # every error goes to the caller of `ask`
            if isinstance(error, Shed) and may_hold_back:  # all replicas are in cooldown, for a short time
                return
            self.quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
            answer = error
        self._holding.remove(ticket)
        self._answer(ticket, answer, now_s)

    def _queue_up(self, ticket: Ticket, now_s: float) -> None:
        """Move a deferred request to the queue. It was already counted there, so the queue has capacity for it."""
        self._holding.remove(ticket)
        if now_s - ticket.at_s >= self._limits.queue_timeout_s:
            self._turn_away(ticket, now_s)
            return
        limits = self._limits
        out = self._admission.queue.add(ticket, limits.queue_requests_max, limits.queue_bytes_max)
        for other in [ticket] if out is None else out:  # limits may have been lowered in the meantime
            self._turn_away(other, now_s)

    def _give_turns(self, now_s: float) -> None:
        """Place queued requests until no capacity is left. A client may leave during this loop and return its lease:
        the next iteration uses that place."""
        if self._giving:
            return
        self._giving = True
        try:
            while (ticket := self._admission.turn(now_s)) is not None:
                waiting = self._waiting_of(ticket)
                try:
                    answer: Lease | Exception = self._place(waiting.request, NOBODY, waiting.charged_tokens)
                except Exception as error:  # every error goes to the caller of `ask`
                    self.quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
                    answer = error
                self._answer(ticket, answer, now_s)
        finally:
            self._giving = False

    def _turn_away(self, ticket: Ticket, now_s: float, why: Shed | None = None) -> None:
        waiting = self._waiting_of(ticket)
        self.quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
        self._returning.remember(_identity(waiting.request), now_s - ticket.since_s, now_s)
        self._answer(ticket, why or self._admission.make_shed_error(ticket.tenant, ticket.priority), now_s)

    def _answer(self, ticket: Ticket, answer: Lease | Exception, now_s: float) -> None:
        waiting = self._waiting_of(ticket)
        waiting.request.queued_s = now_s - ticket.at_s
        if isinstance(answer, Shed):
            self._report_shed(answer.code, waiting.request)
        waiting.answered(answer)

    def _charge(self, request: PlacementRequest, now_s: float, *, retry: bool) -> int:
        """Return the number of tokens to charge for a request's lease; 0 if its tenant has no rate. Raises Shed."""
        if not self.quotas.has_limits(request.tenant):
            return 0
        tokens = max(1, self._prompt_tokens(request))
        if not retry:
            try:
                self.quotas.take(request.tenant, tokens, now_s, counted=request.charged)
            except Shed as shed:
                self._report_shed(shed.code, request)
                raise
        return tokens

    def _report_shed(self, code: str, request: PlacementRequest) -> None:
        self._shed(code, request.priority, request.model or "")
        self._router.note_shed(request)

    def _settle(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Charge the tokens that the request used. A failed request keeps its charge, as it may be retried."""
        tenant, charged = self._charged.pop(lease.id)
        usage = outcome.usage
        if usage is not None:
            self.quotas.spend(tenant, usage.prompt_tokens + usage.completion_tokens - charged, now_s)
        elif outcome.ending is EndReason.REFUSED_BY_ENGINE:
            self.quotas.spend(tenant, -charged, now_s)
        else:
            self.quotas.spend(tenant, outcome.events, now_s)

    def _waiting_of(self, ticket: Ticket) -> _Waiting:
        return cast("_Waiting", ticket.request)  # `ask` made the ticket


def _identity(request: PlacementRequest) -> Hashable | None:
    """Return the key of a repeated request: its tenant and whole prompt; None if the prompt was not read."""
    return (request.tenant, request.chain.end_key) if request.chain is not None else None
