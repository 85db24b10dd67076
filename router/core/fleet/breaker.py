"""What requests themselves say of a replica whose health checks are fine.

A replica that fails fast always looks idle, and would draw the whole fleet's traffic; one that is hung or ten times
as slow spoils whatever is sent there. It rests then (open), for longer and longer; after the rest (half-open) one
request at a time is a trial, until one succeeds (closed). Four things open a breaker: BREAKER_FAILURES failures in a
row, silence (stuck.py), slowness (slow.py), and the word of other routers that have found as much. A request that is
the client's own fault, or whose client left, says nothing either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BREAKER_FAILURES = 3  # failed requests in a row before a replica that looks healthy gets none
BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 30.0


class Cause(StrEnum):
    """Why a breaker is open."""

    FAILURES = "failures"
    STUCK = "stuck"
    SLOW = "slow"
    TOLD = "told"  # by other routers


class State(StrEnum):
    """What a replica is sent, as far as requests have a say in it."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "half-open"  # one trial at a time
    RESTING = "resting"  # nothing, since it asked for that


@dataclass(slots=True)
class Breaker:
    """Closed while `backoff_s` is 0."""

    failures: int = 0  # failed requests in a row
    backoff_s: float = 0.0
    until_s: float = 0.0
    cause: Cause = Cause.FAILURES
    why: str = ""
    trial: int | None = None  # number of the lease on trial, while the breaker is open
    unreached: bool = False  # whether all failures were that it could not be reached in time

    def failed(self, now_s: float, *, unreached: bool = False) -> bool:
        """One request ended by the replica's fault. Returns whether that opened the breaker."""
        self.unreached = unreached and (self.unreached or not self.failures)
        self.failures += 1
        if self.backoff_s:  # a trial failed, or what was under way when it opened
            self.trip(self.cause, self.why, now_s)
            return False
        if self.failures < BREAKER_FAILURES:
            return False
        return self.trip(Cause.FAILURES, f"{self.failures} failures in a row", now_s)

    def trip(self, cause: Cause, why: str, now_s: float) -> bool:
        """Open for twice as long as last time; no longer while it is open already. Returns whether it was closed."""
        if self.backoff_s and now_s < self.until_s:
            return False
        was_closed = not self.backoff_s
        self.backoff_s = min(max(BACKOFF_MIN_S, self.backoff_s * 2), BACKOFF_MAX_S)
        self.until_s, self.cause, self.why = now_s + self.backoff_s, cause, why
        return was_closed

    def close(self) -> bool:
        """A trial succeeded. Returns whether it was open."""
        was_open = bool(self.backoff_s)
        self.failures, self.backoff_s, self.why, self.trial = 0, 0.0, "", None
        return was_open

    def worth_a_retry(self) -> bool:
        """Whether a request that failed elsewhere may succeed here though the breaker is open: the replica is slow, or
        the network was at fault."""
        return self.cause is Cause.SLOW or (self.cause is Cause.FAILURES and self.unreached)

    def allows(self, now_s: float) -> bool:
        """Whether the replica may be sent a request now."""
        return not self.backoff_s or (now_s >= self.until_s and self.trial is None)

    def state(self, now_s: float) -> State:
        """The breaker's state, in an operator's words."""
        if not self.backoff_s:
            return State.CLOSED
        return State.OPEN if now_s < self.until_s else State.HALF_OPEN
