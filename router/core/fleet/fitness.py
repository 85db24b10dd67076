"""Who of those that serve a model may be sent a request now.

Usually everybody, which costs one look. A member is guarded, and looked at more closely, while

- it rests because it asked to (429 or 503 with Retry-After): it gets nothing before that time, not even a trial;
- it rests because its queue was full, and said nothing of when to come again: it gets nothing either, but where nobody
  else is left one request at a time, so that the first free place is found at once;
- its breaker is open: it gets nothing, or one trial at a time;
- it starts slowly: it came back with an empty cache and an empty queue, and would draw everything at once. At age a
  it may hold 1 + a / slow_start_s x (mean open leases of its peers + SLOW_START_LEASES).

Whoever is guarded gives way to any that is not. Where nobody is left but members with open breakers, all of them are
candidates again (panic): to be refused for certain is worse than to be refused perhaps. So an outage of the whole
fleet is over with the first answer. That holds for a request's first attempt; a second one on a replica that fails
at everything would only double the work of a fleet that is down. Only rests are kept in any case, and the client is
told when they end.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from router.core.facts.placements import Ending, Shed
from router.core.fleet import slow as slowness
from router.core.fleet.breaker import BREAKER_FAILURES, Cause, State
from router.core.fleet.fleet import Fleet
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member

SLOW_START_LEASES = 4
ALIVE_S = 1.0  # a replica that gave an answer so lately does not fail at everything


class Fitness:
    """Breakers, rests and slow starts of a fleet's members; keeps `Fleet.guarded`."""

    def __init__(
        self, fleet: Fleet, *, slow_start_s: float, breaker_changed: Callable[[str, State, str], None]
    ) -> None:
        """`breaker_changed(replica, state, why)` hears when a breaker opens, and when it closes."""
        self._fleet = fleet
        self._slow_start_s = slow_start_s
        self._tell = breaker_changed
        # When guarded members may have no reason to be any more, the next one first, each at most once; whose breaker
        # is open has no such time.
        self._ends: list[tuple[float, str]] = []
        self._ending: set[str] = set()  # ids of members in `_ends`
        self.panics = 0  # placements on members that may not be fit, for want of others

    @property
    def slow_start_s(self) -> float:
        """Seconds until a replica that came back is sent as much as others."""
        return self._slow_start_s

    @slow_start_s.setter
    def slow_start_s(self, slow_start_s: float) -> None:
        self._slow_start_s = slow_start_s
        self._ends, self._ending = [], set()
        for member in self._fleet.guarded.values():
            self._look_at(member)

    # -- who may -------------------------------------------------------------------------------------------------

    def allowed(self, members: list[Member], now_s: float, *, retry: bool = False) -> list[Member]:
        """Members of these that may be sent a request: some, if there are any; but none for a `retry` if all of them
        fail at everything. Raises Shed when all rest."""
        self._forget(now_s)
        guarded = self._fleet.guarded
        if not members or not guarded:
            return members
        awake, trusted, free, full = list[Member](), list[Member](), list[Member](), list[Member]()
        open_leases: tuple[int, int] | None = None
        for m in members:
            if m.id not in guarded:
                free.append(m)
                continue
            if m.rest_until_s > now_s:
                if m.full and m.full_trial not in m.leases and m.breaker.allows(now_s):
                    full.append(m)
                continue
            awake.append(m)
            if m.breaker.backoff_s and not m.breaker.allows(now_s):
                continue
            trusted.append(m)
            if (age_s := now_s - m.back_s) < self._slow_start_s:
                open_leases = open_leases or self._open_leases()
                if len(m.leases) >= self._most(m, age_s, open_leases):
                    continue
            free.append(m)
        if free:
            return free
        if not trusted and full:
            return full
        if not awake:
            after_s = min(m.rest_until_s for m in members) - now_s
            raise Shed("overloaded", "Every replica that could answer asked to be left alone for now.", after_s)
        if not trusted:
            if retry:
                awake = [m for m in awake if m.breaker.worth_a_retry() or now_s - m.alive_s < ALIVE_S]
            self.panics += bool(awake)
        return trusted or awake

    def with_room(self, members: list[Member], now_s: float) -> list[Member]:
        """Members of these that may take one more request, as far as they have come back just now."""
        found = list[Member]()
        open_leases: tuple[int, int] | None = None
        for m in members:
            if (age_s := now_s - m.back_s) < self._slow_start_s:
                open_leases = open_leases or self._open_leases()
                if len(m.leases) >= self._most(m, age_s, open_leases):
                    continue
            found.append(m)
        return found

    def _most(self, member: Member, age_s: float, open_leases: tuple[int, int]) -> float:
        """Leases that a member may have so long after it came back."""
        return 1 + age_s / self._slow_start_s * (_mean_of_others(open_leases, member) + SLOW_START_LEASES)

    def _open_leases(self) -> tuple[int, int]:
        """(open leases of all usable members, their number); counted once for all members that start slowly."""
        usable = self._fleet.usable()
        return sum([len(m.leases) for m in usable]), len(usable)

    def _forget(self, now_s: float) -> None:
        """Begin the slow start of members that came back; guard no more who has no reason for it."""
        returned, guarded = self._fleet.returned, self._fleet.guarded
        if returned:
            for member in list(returned.values()):
                self._close(member, now_s, "its health checks are fine again")  # another process may answer there now
                self._begin(member, now_s)
        while self._ends and self._ends[0][0] <= now_s:
            id_ = heappop(self._ends)[1]
            self._ending.discard(id_)
            if id_ in guarded and not self._look_at(guarded[id_], now_s):
                del guarded[id_]

    def _look_at(self, member: Member, now_s: float = float("-inf")) -> bool:
        """Be reminded of a guarded member when it may have no reason to be any more; returns whether it has one now."""
        if member.breaker.backoff_s:
            return True  # an open breaker is a reason until `_close`
        until_s = max(member.back_s + self._slow_start_s, member.rest_until_s)
        if until_s > now_s and member.id not in self._ending:
            self._ending.add(member.id)
            heappush(self._ends, (until_s, member.id))
        return until_s > now_s

    def _begin(self, member: Member, now_s: float) -> None:
        member.came_back, member.back_s = False, now_s
        self._fleet.returned.pop(member.id, None)
        self._guard(member)

    def _guard(self, member: Member) -> None:
        self._fleet.guarded[member.id] = member
        self._look_at(member)

    # -- what requests say ---------------------------------------------------------------------------------------

    def rest(self, member: Member, until_s: float, *, full: bool = False) -> None:
        """Send a member nothing before then: it asked for that, or its queue was `full`."""
        if until_s >= member.rest_until_s:
            member.rest_until_s, member.full = until_s, full
        self._guard(member)

    def opened(self, member: Member, lease: Lease) -> None:
        """A lease was placed: on a member with an open breaker it is the trial, if there is none yet."""
        if not (member.ready or member.warming_up):
            self.panics += 1
        if member.full and member.rest_until_s > lease.placed_s:
            member.full_trial = lease.id
        if member.breaker.backoff_s and member.breaker.trial is None:
            member.breaker.trial = lease.id

    def trip(self, member: Member, cause: Cause, why: str, now_s: float) -> None:
        """Open a member's breaker, however few its failures."""
        self._guard(member)
        if member.breaker.trip(cause, why, now_s):
            self._tell(member.id, State.OPEN, why)

    def found_dead(self) -> list[str]:
        """Ids of members that this router's own requests or probes have found dead, which it may tell others."""
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

    def told_dead(self, id_: str, why: str, now_s: float) -> bool:
        """Other routers have found a member dead: it rests as if this one had. Returns whether that is news."""
        member = self._fleet.members.get(id_)
        if member is None or not member.health.fit or member.breaker.backoff_s:
            return False
        self.trip(member, Cause.TOLD, why, now_s)
        return True

    def token(self, member: Member, lease: Lease, now_s: float) -> None:
        """Take the first token of a member with an open breaker: it is stuck no more, unless this token is late too."""
        if member.breaker.cause is Cause.STUCK and member.late_s < lease.placed_s:
            self._close(member, now_s)

    def ended(self, member: Member, lease: Lease, ending: Ending, now_s: float) -> None:
        """Take the end of a lease, of a member that failed before or fails now. A request refused for its own sake, or
        whose client left, says nothing; but a trial is over in any case."""
        breaker = member.breaker
        if breaker.trial == lease.id:
            breaker.trial = None
        if ending in (Ending.FAILED, Ending.UNREACHED):
            if breaker.failed(now_s, unreached=ending is Ending.UNREACHED):
                self._tell(member.id, State.OPEN, breaker.why)
            if breaker.backoff_s:
                self._guard(member)
        elif ending is Ending.OK and (not breaker.backoff_s or breaker.cause is not Cause.SLOW):
            self._close(member, now_s)

    def timed(self, member: Member, lease: Lease, *, slow: bool, now_s: float) -> None:
        """Take a first token that was compared with its peers'. A lease from before the member's rest is no trial."""
        if member.breaker.backoff_s and lease.placed_s < member.breaker.until_s:
            return
        if slow:
            self.trip(member, Cause.SLOW, "first tokens take five times as long as its peers'", now_s)
            self._fleet.forget_speed(member)
        elif member.breaker.backoff_s and member.breaker.cause is Cause.SLOW:
            if slowness.trial_was_slow(self._fleet, member):
                member.breaker.trip(Cause.SLOW, member.breaker.why, now_s)
                self._fleet.forget_speed(member)
            else:
                self._close(member, now_s)

    def _close(self, member: Member, now_s: float, why: str = "a trial succeeded") -> None:
        if member.breaker.close():
            self._begin(member, now_s)
            self._tell(member.id, State.CLOSED, why)


def _mean_of_others(open_leases: tuple[int, int], member: Member) -> float:
    """Mean open leases of the usable members besides this one, which is counted among them unless it warms up."""
    leases, members = open_leases
    if not member.warming_up:
        leases, members = leases - len(member.leases), members - 1
    return leases / members if members > 0 else 0.0
