"""Who is placed now, who waits, who is turned away: rates (core/admission/rates.py), then places
(core/admission/windows.py), then whether it had better be held back (core/admission/holding.py).

A request that waits is a ticket and a function to call when its turn has come: no task and no timer of its own.
Turns are given when a lease comes back, and a few times a second for whatever else makes room. A retry neither waits
nor counts: its request had its turn, and was taken in.

All waiting is one wait with one end, `wait_s` from a request's arrival: for `hold_s` of that it may be held back, then
it takes a place, or waits for one with all others. One that leaves or is turned away while it waits, and comes again
within a minute, goes on waiting where it was (core/admission/returning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, Protocol, TypeVar, cast

from router.core.admission.holding import Holding
from router.core.admission.queue import Pool, Ticket
from router.core.admission.rates import Quotas, Rates
from router.core.admission.returning import Returning
from router.core.admission.windows import Admission, Limits
from router.core.facts.placements import Ending, Held, Outcome, Shed
from router.core.facts.requests import Priority
from router.core.fleet.lease import Lease
from router.core.placement.router import Router

NOBODY: frozenset[str] = frozenset()


class Wants(Protocol):
    """What admission must know of a request."""

    tenant: str
    priority: Priority
    body_bytes: int
    queued_s: float


_W = TypeVar("_W", bound=Wants)
_W_contra = TypeVar("_W_contra", bound=Wants, contravariant=True)
Answered = Callable[[Lease | Exception], None]


class Places(Protocol[_W_contra]):
    """Whoever places what was admitted."""

    def route(
        self, wanted: _W_contra, exclude: frozenset[str], full: Collection[str], *, may_hold: bool = False
    ) -> Lease:
        """A lease, on a replica that is not full if there is one. Raises NoReplica, and Held where it is better placed
        later, if it `may_hold`."""

    def pool(self, wanted: _W_contra) -> Pool:
        """Who may take it."""

    def prompt_tokens(self, wanted: _W_contra) -> int:
        """Of its prompt, about."""

    def identity(self, wanted: _W_contra) -> Hashable | None:
        """By which it is known when it comes again; None where nothing tells."""

    def turned_away(self, wanted: _W_contra) -> None:
        """It will not be placed."""


class _Waiting(Generic[_W]):
    __slots__ = ("answered", "charged_tokens", "wanted")

    def __init__(self, wanted: _W, answered: Answered, charged_tokens: int) -> None:
        self.wanted, self.answered, self.charged_tokens = wanted, answered, charged_tokens


class Admitter(Generic[_W]):
    """Admits the requests of all edges."""

    def __init__(
        self,
        router: Router,
        places: Places[_W],
        limits: Limits,
        *,
        stale_s: float,
        clock: Callable[[], float],
        shed: Callable[[str, Priority], None],
    ) -> None:
        """`shed(code, priority)` hears of each request that is turned away."""
        self._router = router
        self._places = places
        self._clock = clock
        self._shed = shed
        self._admission = Admission(router, limits, stale_s=stale_s)
        self._holding: Holding[Ticket] = Holding()
        self._limits = limits
        self._returning = Returning()
        self._released = False
        self._quotas = Quotas()
        self._charged: dict[int, tuple[str, int]] = {}  # lease -> tenant with a rate, tokens taken for it
        self._giving = False
        self.window = self._admission.window

    def configure(self, limits: Limits) -> None:
        """Take other limits; who waits goes on waiting, as far as there is room for it."""
        self._limits = limits
        self._admission.configure(limits)

    def release(self) -> None:
        """Hold nobody any more: the router is about to end."""
        self._released = True

    def set_tenants(self, tenants: Mapping[str, Rates]) -> None:
        """Take the rates of all tenants by name, in the place of those before."""
        self._quotas.configure(tenants)

    def held(self) -> int:
        """How many of those that wait are held back."""
        return len(self._holding)

    def queued(self) -> tuple[dict[Priority, int], int]:
        """How many wait by priority, held back or for a place, and bytes of their bodies."""
        queue = self._admission.queue
        counts = {priority: queue.count(priority) for priority in Priority}
        for ticket in self._holding:
            counts[ticket.priority] += 1
        return counts, queue.size_bytes + self._held_bytes()

    # -- requests ------------------------------------------------------------------------------------------------

    def ask(self, wanted: _W, exclude: frozenset[str], answered: Answered) -> Lease | Ticket:
        """A lease, or a ticket: then `answered` is called once with a lease or with what would have been raised,
        unless the ticket is taken back. With exclusions it is a retry. Raises NoReplica, Shed."""
        now_s, tenant, admission = self._clock(), wanted.tenant, self._admission
        charged, waited_s = self._charge(wanted, now_s, retry=bool(exclude)), 0.0
        try:
            if exclude:
                return self._place(wanted, exclude, charged)
            fits = admission.free(tenant, now_s)
            if not fits:
                self._give_turns(now_s)  # to whoever was there before
                fits = admission.fits(self._places.pool(wanted), tenant, now_s)
            waited_s = self._returning.back(self._places.identity(wanted), now_s)
            if fits:
                try:
                    return self._place(wanted, exclude, charged, may_hold=self._may_hold(wanted, waited_s))
                except Held:
                    ticket = self._ticket(wanted, answered, charged, now_s, waited_s)
                    self._holding.add(ticket, ticket.since_s, tenant)
                    return ticket
            ticket = self._ticket(wanted, answered, charged, now_s, waited_s)
            out = admission.wait(ticket, now_s, len(self._holding), self._held_bytes())
        except Exception as error:
            if not exclude:
                self._quotas.spend(tenant, -charged, now_s)
            if isinstance(error, Shed):
                self._returning.left(self._places.identity(wanted), waited_s, now_s)
                self._tell_shed(error.code, wanted)
            raise
        for other in out:
            self._turn_away(other, now_s)
        return ticket

    def take_back(self, ticket: Ticket) -> None:
        """Nobody waits for it any more. After its answer this changes nothing."""
        if self._admission.queue.remove(ticket) or self._holding.remove(ticket):
            waiting, now_s = self._waiting_of(ticket), self._clock()
            self._quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
            self._returning.left(self._places.identity(waiting.wanted), now_s - ticket.since_s, now_s)

    def adopted(self, lease: Lease) -> None:
        """A lease was opened without asking."""
        self._admission.opened(lease, "")

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Give a lease back, whatever the end; its place is another's. A second time changes nothing."""
        self._router.finish(lease, outcome, now_s)
        if self._admission.closed(lease, now_s):
            if lease.id in self._charged:
                self._settle(lease, outcome, now_s)
            if self._admission.queue:
                self._give_turns(now_s)

    def tick(self) -> None:
        """To be called every TICK_S: probes, replicas that came, and requests that have waited too long."""
        now_s = self._clock()
        for ticket in self._admission.tick(now_s):
            self._turn_away(ticket, now_s)
        self._give_turns(now_s)
        self._try_held(now_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _place(self, wanted: _W, exclude: frozenset[str], charged_tokens: int, *, may_hold: bool = False) -> Lease:
        lease = self._places.route(wanted, exclude, self._admission.full, may_hold=may_hold)
        self._admission.opened(lease, wanted.tenant)
        if charged_tokens:
            self._charged[lease.id] = (wanted.tenant, charged_tokens)
        return lease

    def _ticket(self, wanted: _W, answered: Answered, charged_tokens: int, now_s: float, waited_s: float) -> Ticket:
        cost, waiting = self._places.prompt_tokens(wanted), _Waiting(wanted, answered, charged_tokens)
        pool, size_bytes = self._places.pool(wanted), wanted.body_bytes
        return Ticket(wanted.tenant, wanted.priority, pool, cost, size_bytes, now_s, waiting, now_s - waited_s)

    def _may_hold(self, wanted: _W, waited_s: float) -> bool:
        """Whether there is room to hold it here, and whoever sent it may be made to wait."""
        if waited_s >= self._hold_s or wanted.priority is Priority.HIGH or self._holding.full:
            return False
        if len(self._holding) + len(self._admission.queue) >= self._limits.queue_requests_max:
            return False
        return self._held_bytes() + self._admission.queue.size_bytes + wanted.body_bytes <= self._limits.queue_bytes_max

    @property
    def _hold_s(self) -> float:
        return 0.0 if self._released else self._limits.hold_s

    def _held_bytes(self) -> int:
        return sum(ticket.size_bytes for ticket in self._holding) if self._holding else 0

    def _try_held(self, now_s: float) -> None:
        """Place those whose time has come, a few of the others if that does no harm any more."""
        for ticket in self._holding.over(now_s, self._hold_s):
            self._try(ticket, now_s, may_hold=False)
        for ticket in self._holding.next_few():
            self._try(ticket, now_s, may_hold=True)

    def _try(self, ticket: Ticket, now_s: float, *, may_hold: bool) -> None:
        """Place one that is held. Where its time has come and there is no place, it waits for one with all others."""
        if ticket not in self._holding:  # another's answer took it along
            return
        waiting, admission = self._waiting_of(ticket), self._admission
        try:
            if not admission.fits(ticket.pool, ticket.tenant, now_s):
                if not may_hold:
                    self._queue_up(ticket, now_s)
                return
            answer: Lease | Exception = self._place(waiting.wanted, NOBODY, waiting.charged_tokens, may_hold=may_hold)
        except Held:
            return
        except Exception as error:  # whatever it is, it is theirs who asked
            if isinstance(error, Shed) and may_hold:  # all have asked for a rest, which is over soon
                return
            self._quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
            answer = error
        self._holding.remove(ticket)
        self._answer(ticket, answer, now_s)

    def _queue_up(self, ticket: Ticket, now_s: float) -> None:
        """It was held, and waits for a place from now on; there is room for it, as it counted already."""
        self._holding.remove(ticket)
        if now_s - ticket.at_s >= self._limits.wait_s:
            self._turn_away(ticket, now_s)
            return
        limits = self._limits
        out = self._admission.queue.add(ticket, limits.queue_requests_max, limits.queue_bytes_max)
        for other in [ticket] if out is None else out:  # limits may have become lower meanwhile
            self._turn_away(other, now_s)

    def _give_turns(self, now_s: float) -> None:
        """Until there is no room for anybody. A lease that comes back meanwhile, from somebody who has just left, makes
        room for the next turn of this loop."""
        if self._giving:
            return
        self._giving = True
        try:
            while (ticket := self._admission.turn(now_s)) is not None:
                waiting = self._waiting_of(ticket)
                try:
                    answer: Lease | Exception = self._place(waiting.wanted, NOBODY, waiting.charged_tokens)
                except Exception as error:  # whatever it is, it is theirs who asked
                    self._quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
                    answer = error
                self._answer(ticket, answer, now_s)
        finally:
            self._giving = False

    def _turn_away(self, ticket: Ticket, now_s: float) -> None:
        waiting = self._waiting_of(ticket)
        self._quotas.spend(ticket.tenant, -waiting.charged_tokens, now_s)
        self._returning.left(self._places.identity(waiting.wanted), now_s - ticket.since_s, now_s)
        self._answer(ticket, self._admission.overloaded(ticket.tenant, ticket.priority), now_s)

    def _answer(self, ticket: Ticket, answer: Lease | Exception, now_s: float) -> None:
        waiting = self._waiting_of(ticket)
        waiting.wanted.queued_s = now_s - ticket.at_s
        if isinstance(answer, Shed):
            self._tell_shed(answer.code, waiting.wanted)
        waiting.answered(answer)

    def _charge(self, wanted: _W, now_s: float, *, retry: bool) -> int:
        """Tokens that its lease is charged with; 0 where its tenant has no rate. Raises Shed."""
        if not self._quotas.limited(wanted.tenant):
            return 0
        tokens = max(1, self._places.prompt_tokens(wanted))
        if not retry:
            try:
                self._quotas.take(wanted.tenant, tokens, now_s)
            except Shed as shed:
                self._tell_shed(shed.code, wanted)
                raise
        return tokens

    def _tell_shed(self, code: str, wanted: _W) -> None:
        self._shed(code, wanted.priority)
        self._places.turned_away(wanted)

    def _settle(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """What the request has really used. One that failed may be tried again, and keeps what it was charged with."""
        tenant, charged = self._charged.pop(lease.id)
        usage = outcome.usage
        if usage is not None:
            self._quotas.spend(tenant, usage.prompt_tokens + usage.completion_tokens - charged, now_s)
        elif outcome.ending is Ending.REFUSED_BY_ENGINE:
            self._quotas.spend(tenant, -charged, now_s)
        else:
            self._quotas.spend(tenant, outcome.events, now_s)

    def _waiting_of(self, ticket: Ticket) -> _Waiting[_W]:
        return cast("_Waiting[_W]", ticket.request)  # as `ask` made it
