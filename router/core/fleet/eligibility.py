"""Selection of the members, among those that serve a model, that may be sent a request now.

Usually all of them may, and a single lookup shows it. A member is guarded, and examined individually, in four cases:

- Its cooldown was requested (429 or 503 with Retry-After). It receives no request before the given time, not even a
  trial.
- Its cooldown follows a full queue, and the response gave no time for a retry. It receives no request either. If no
  other replica is left it receives one request at a time, so that the first free slot is found at once.
- Its breaker is open. It receives no request, or one trial at a time.
- It is in slow start. It returned with an empty cache and an empty queue, and would attract all requests at once. At
  age a it may hold 1 + a / slow_start_s x (mean open leases of its peers + SLOW_START_LEASES).

A guarded member is used only if no other one is available. If all remaining members have open breakers, all are
candidates again (panic), because a probable failure is better than a certain refusal. So an outage of the whole fleet
ends with the first answer. Panic applies to the first attempt of a request. A second attempt on a replica that fails
every request would only double the load of a fleet that is down. Cooldowns alone are always kept, and the client
receives the time at which they end.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from router.core.fleet import outlier_detection as slowness
from router.core.fleet.breaker import BREAKER_FAILURES, Cause, State
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.types.placements import EndReason, Shed

SLOW_START_LEASES = 4
ALIVE_S = 1.0  # a replica that answered within this time does not fail every request


class Eligibility:
    """Breakers, cooldowns and slow starts of a fleet's members; maintains `Fleet.restricted`."""

    def __init__(
        self, fleet: Fleet, *, slow_start_s: float, breaker_changed: Callable[[str, State, str], None]
    ) -> None:
        """`breaker_changed(replica, state, why)` is called when a breaker opens or closes."""
        self._fleet = fleet
        self._slow_start_s = slow_start_s
        self._tell = breaker_changed
        # Times at which a guarded member may stop being guarded, the next one first, at most one a member. A member
        # with an open breaker has no such time.
        self._ends: list[tuple[float, str]] = []
        self._ending: set[str] = set()  # ids of members in `_ends`
        self.panics = 0  # placements on members that may be unfit, because no other was available

    @property
    def slow_start_s(self) -> float:
        """Seconds until a replica that returned receives as many requests as others."""
        return self._slow_start_s

    @slow_start_s.setter
    def slow_start_s(self, slow_start_s: float) -> None:
        self._slow_start_s = slow_start_s
        self._ends, self._ending = [], set()
        for member in self._fleet.restricted.values():
            self._look_at(member)

    # -- admission -----------------------------------------------------------------------------------------------

    def filter_allowed(self, members: list[ReplicaState], now_s: float, *, retry: bool = False) -> list[ReplicaState]:
        """Return the members of these that may be sent a request; at least one, unless there are no members. For a
        `retry` the result is empty if all of them fail every request. Raises Shed if all are in cooldown."""
        self._forget(now_s)
        guarded = self._fleet.restricted
        if not members or not guarded:
            return members
        awake, trusted, free, full = (
            list[ReplicaState](),
            list[ReplicaState](),
            list[ReplicaState](),
            list[ReplicaState](),
        )
        open_leases: tuple[int, int] | None = None
        for m in members:
            if m.id not in guarded:
                free.append(m)
                continue
            limits = m.restrictions
            if limits.rest_until_s > now_s:
                if limits.full and limits.full_trial not in m.leases and m.breaker.allows(now_s):
                    full.append(m)
                continue
            awake.append(m)
            if m.breaker.backoff_s and not m.breaker.allows(now_s):
                continue
            trusted.append(m)
            if (age_s := now_s - limits.slow_start_at_s) < self._slow_start_s:
                open_leases = open_leases or self._open_leases()
                if len(m.leases) >= self._most(m, age_s, open_leases):
                    continue
            free.append(m)
        if free:
            return free
        if not trusted and full:
            return full
        if not awake:
            after_s = min(m.restrictions.rest_until_s for m in members) - now_s
            raise Shed("overloaded", "All matching replicas are in cooldown; try again later.", after_s)
        if not trusted:
            if retry:
                awake = [m for m in awake if m.breaker.worth_a_retry() or now_s - m.evidence.alive_s < ALIVE_S]
            self.panics += bool(awake)
        return trusted or awake

    def filter_with_room(self, members: list[ReplicaState], now_s: float) -> list[ReplicaState]:
        """Return the members of these that may take one more request under the limit of their slow start."""
        found = list[ReplicaState]()
        open_leases: tuple[int, int] | None = None
        for m in members:
            if (age_s := now_s - m.restrictions.slow_start_at_s) < self._slow_start_s:
                open_leases = open_leases or self._open_leases()
                if len(m.leases) >= self._most(m, age_s, open_leases):
                    continue
            found.append(m)
        return found

    def _most(self, member: ReplicaState, age_s: float, open_leases: tuple[int, int]) -> float:
        """Return the maximum of open leases of a member `age_s` after it returned."""
        return 1 + age_s / self._slow_start_s * (_mean_of_others(open_leases, member) + SLOW_START_LEASES)

    def _open_leases(self) -> tuple[int, int]:
        """Return (open leases of all usable members, number of these members); computed once for all members in slow
        start."""
        usable = self._fleet.usable()
        return sum([len(m.leases) for m in usable]), len(usable)

    def _forget(self, now_s: float) -> None:
        """Begin the slow start of members that returned, and remove members from `guarded` that no longer have a
        reason."""
        returned, guarded = self._fleet.returned, self._fleet.restricted
        if returned:
            for member in list(returned.values()):
                self._close(member, now_s, "its health checks succeed again")  # another process may answer there now
                self._begin(member, now_s)
        while self._ends and self._ends[0][0] <= now_s:
            id_ = heappop(self._ends)[1]
            self._ending.discard(id_)
            if id_ in guarded and not self._look_at(guarded[id_], now_s):
                del guarded[id_]

    def _look_at(self, member: ReplicaState, now_s: float = float("-inf")) -> bool:
        """Schedule the time at which a guarded member may stop being guarded. Return True if it must be guarded now."""
        if member.breaker.backoff_s:
            return True  # an open breaker is a reason until `_close`
        limits = member.restrictions
        until_s = max(limits.slow_start_at_s + self._slow_start_s, limits.rest_until_s)
        if until_s > now_s and member.id not in self._ending:
            self._ending.add(member.id)
            heappush(self._ends, (until_s, member.id))
        return until_s > now_s

    def _begin(self, member: ReplicaState, now_s: float) -> None:
        member.restrictions.slow_start_at_s = now_s
        self._fleet.returned.pop(member.id, None)
        self._guard(member)

    def _guard(self, member: ReplicaState) -> None:
        self._fleet.restricted[member.id] = member
        self._look_at(member)

    # -- outcomes of requests ------------------------------------------------------------------------------------

    def set_cooldown(self, member: ReplicaState, until_s: float, *, full: bool = False) -> None:
        """Send a member no requests until this time, because it requested a pause or its queue was `full`."""
        member.restrictions.set_cooldown(until_s, full=full)
        self._guard(member)

    def on_lease_opened(self, member: ReplicaState, lease: Lease) -> None:
        """Record a placed lease. On a member with an open breaker the first one is the trial."""
        if not (member.ready or member.restrictions.warming_up):
            self.panics += 1
        member.restrictions.note_trial(lease.id, lease.placed_s)
        if member.breaker.backoff_s and member.breaker.trial is None:
            member.breaker.trial = lease.id

    def trip(self, member: ReplicaState, cause: Cause, why: str, now_s: float) -> None:
        """Open a member's breaker, independent of its number of failures."""
        self._guard(member)
        if member.breaker.trip(cause, why, now_s):
            self._tell(member.id, State.OPEN, why)

    def found_dead(self) -> list[str]:
        """Return ids of members that this router's own requests or probes found dead, and that it may report to other
        routers."""
        found = list[str]()
        for member in self._fleet.members.values():
            breaker = member.breaker
            if breaker.backoff_s:
                told = breaker.cause in (Cause.TOLD, Cause.SLOW) and breaker.failures < BREAKER_FAILURES
                if not told:
                    found.append(member.id)
            elif member.health.served and not member.health.fit and member.replica.ready:
                found.append(member.id)
        return found

    def apply_peer_evidence(self, id_: str, why: str, now_s: float) -> bool:
        """Open the breaker of a member that other routers found dead. Return True if the breaker was closed until
        now."""
        member = self._fleet.members.get(id_)
        if member is None or not member.health.fit or member.breaker.backoff_s:
            return False
        self.trip(member, Cause.TOLD, why, now_s)
        return True

    def token(self, member: ReplicaState, lease: Lease, now_s: float) -> None:
        """Handle the first token of a member with an open breaker. It is no longer stalled, unless this token is late
        too."""
        if member.breaker.cause is Cause.STUCK and member.evidence.late_s < lease.placed_s:
            self._close(member, now_s)

    def on_lease_ended(self, member: ReplicaState, lease: Lease, ending: EndReason, now_s: float) -> None:
        """Handle the end of a lease on a member that failed before or fails now.

        A request that was refused for its own content, or abandoned by its client, counts as neither success nor
        failure. A trial ends in any case.
        """
        breaker = member.breaker
        if breaker.trial == lease.id:
            breaker.trial = None
        if ending in (EndReason.FAILED, EndReason.UNREACHED):
            if breaker.count_failure(now_s, unreached=ending is EndReason.UNREACHED):
                self._tell(member.id, State.OPEN, breaker.why)
            if breaker.backoff_s:
                self._guard(member)
        elif ending is EndReason.OK and (not breaker.backoff_s or breaker.cause is not Cause.SLOW):
            self._close(member, now_s)

    def on_latency_verdict(self, member: ReplicaState, lease: Lease, *, slow: bool, now_s: float) -> None:
        """Handle a first token after its comparison with those of peers. A lease from before the cooldown is not a
        trial."""
        if member.breaker.backoff_s and lease.placed_s < member.breaker.until_s:
            return
        if slow:
            self.trip(member, Cause.SLOW, "first tokens are five times slower than its peers'", now_s)
            self._fleet.forget_speed(member)
        elif member.breaker.backoff_s and member.breaker.cause is Cause.SLOW:
            if slowness.is_probe_slow(self._fleet, member):
                member.breaker.trip(Cause.SLOW, member.breaker.why, now_s)
                self._fleet.forget_speed(member)
            else:
                self._close(member, now_s)

    def _close(self, member: ReplicaState, now_s: float, why: str = "a trial succeeded") -> None:
        if member.breaker.close():
            self._begin(member, now_s)
            self._tell(member.id, State.CLOSED, why)


def _mean_of_others(open_leases: tuple[int, int], member: ReplicaState) -> float:
    """Return the mean of open leases over the usable members except this one, which is among them unless it warms
    up."""
    leases, members = open_leases
    if not member.restrictions.warming_up:
        leases, members = leases - len(member.leases), members - 1
    return leases / members if members > 0 else 0.0
