"""Circuit breaker of one replica, driven by the outcome of requests while its health checks succeed.

A replica that fails fast always looks idle, and would attract the traffic of the whole fleet. One that hangs, or is ten
times slower than its peers, delays every request placed on it. Its breaker opens for a cooldown that doubles each time.
After the cooldown (half-open) one request at a time is a trial, until a trial succeeds (closed).

Four conditions open a breaker:

- BREAKER_FAILURES failures in a row;
- no output, although output is due (stall_detector.py);
- first tokens far later than those of its peers (outlier_detection.py);
- a report from other routers that found one of these.

A request that fails by the client's own fault, or is abandoned by its client, counts as neither success nor failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BREAKER_FAILURES = 3  # failed requests in a row that open the breaker of a replica with good health checks
BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 30.0


class Cause(StrEnum):
    """Reason for which a breaker is open."""

    FAILURES = "failures"
    STUCK = "stuck"
    SLOW = "slow"
    TOLD = "told"  # reported by other routers


class State(StrEnum):
    """Admission of requests to a replica, by its breaker and its cooldown."""

    CLOSED = "closed"  # all requests
    OPEN = "open"  # no requests
    HALF_OPEN = "half-open"  # one trial at a time
    RESTING = "resting"  # no requests, because the replica requested a pause


@dataclass(slots=True)
class Breaker:
    """Breaker of one replica; closed while `backoff_s` is 0."""

    failures: int = 0  # failed requests in a row
    backoff_s: float = 0.0
    until_s: float = 0.0
    cause: Cause = Cause.FAILURES
    why: str = ""
    trial: int | None = None  # number of the trial lease, while the breaker is open
    unreached: bool = False  # all failures were connection timeouts

    def count_failure(self, now_s: float, *, unreached: bool = False) -> bool:
        """Count a request that failed by the replica's fault. Return True if that opened the breaker."""
        self.unreached = unreached and (self.unreached or not self.failures)
        self.failures += 1
        if self.backoff_s:  # a trial failed, or a request that was in flight when the breaker opened
            self.trip(self.cause, self.why, now_s)
            return False
        if self.failures < BREAKER_FAILURES:
            return False
        return self.trip(Cause.FAILURES, f"{self.failures} failures in a row", now_s)

    def trip(self, cause: Cause, why: str, now_s: float) -> bool:
        """Open the breaker for twice the previous cooldown, without effect while a cooldown runs. Return True if it was
        closed."""
        if self.backoff_s and now_s < self.until_s:
            return False
        was_closed = not self.backoff_s
        self.backoff_s = min(max(BACKOFF_MIN_S, self.backoff_s * 2), BACKOFF_MAX_S)
        self.until_s, self.cause, self.why = now_s + self.backoff_s, cause, why
        return was_closed

    def close(self) -> bool:
        """Close the breaker after a successful trial. Return True if it was open."""
        was_open = bool(self.backoff_s)
        self.failures, self.backoff_s, self.why, self.trial = 0, 0.0, "", None
        return was_open

    def worth_a_retry(self) -> bool:
        """True if a retry may succeed here although the breaker is open: the replica is only slow, or all failures were
        connection timeouts, which the network may have caused."""
        return self.cause is Cause.SLOW or (self.cause is Cause.FAILURES and self.unreached)

    def allows(self, now_s: float) -> bool:
        """True if the breaker admits a request now."""
        return not self.backoff_s or (now_s >= self.until_s and self.trial is None)

    def state(self, now_s: float) -> State:
        """Return the breaker's state for operators."""
        if not self.backoff_s:
            return State.CLOSED
        return State.OPEN if now_s < self.until_s else State.HALF_OPEN
