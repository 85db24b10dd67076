"""Is a replica fit to be sent requests? A tiny machine fed with observations; only its flips are news.

A refused connection is proof and takes a replica out at once; a failed health check may be a hiccup, so a few in a
row are needed. One good check brings it back: the engine's own /health is 503 until it can serve.
"""

from __future__ import annotations

from dataclasses import dataclass

STOCK = 10.0  # retries that a budget can hold in any case
BREAKER_FAILURES = 3  # failed requests in a row before a replica that looks healthy gets none
BACKOFF_MIN_S, BACKOFF_MAX_S = 1.0, 30.0
FAILURES_MAX = 2  # failed checks in a row before a replica is taken out


@dataclass(slots=True)
class Health:
    """Starts unfit: a replica serves once it has answered."""

    fit: bool = False
    failures: int = 0
    why: str = "not asked yet"

    def observe(self, ok: bool, why: str = "", *, proof: bool = False) -> bool:
        """Take one observation and what was heard; `proof` (connection refused) needs no second. Returns whether
        `fit` flipped."""
        before = self.fit
        self.why = why
        if ok:
            self.failures, self.fit = 0, True
        else:
            self.failures += 1
            if proof or self.failures >= FAILURES_MAX:
                self.fit = False
        return self.fit != before


@dataclass(slots=True)
class Breaker:
    """What requests themselves say of a replica whose health checks are fine.

    A replica that fails fast always looks idle, and would draw the whole fleet's traffic. After BREAKER_FAILURES
    failures in a row it rests; then one request at a time is a trial, until one succeeds.
    """

    failures: int = 0
    backoff_s: float = 0.0  # 0: closed
    until_s: float = 0.0

    def observe(self, ok: bool, now_s: float) -> None:
        """One request ended, by the replica's success or by its fault."""
        if ok:
            self.failures, self.backoff_s = 0, 0.0
            return
        self.failures += 1
        if self.failures >= BREAKER_FAILURES and now_s >= self.until_s:
            self.backoff_s = min(max(BACKOFF_MIN_S, self.backoff_s * 2), BACKOFF_MAX_S)
            self.until_s = now_s + self.backoff_s

    def allows(self, in_flight: int, now_s: float) -> bool:
        """Whether the replica may be sent a request now."""
        return not self.backoff_s or (now_s >= self.until_s and not in_flight)


@dataclass(slots=True)
class RetryBudget:
    """Retries are at most `ratio` of requests plus `floor_per_s`, so a dead fleet is not hammered.

    A token bucket in retries (as in finagle's and linkerd's budgets): each request deposits `ratio`, time deposits
    `floor_per_s`, a retry withdraws one. Holds at most ten seconds' worth of the floor, and at least STOCK.
    """

    ratio: float = 0.2
    floor_per_s: float = 10.0
    tokens: float = STOCK
    _at_s: float | None = None  # the clock may have begun anywhere

    def deposit(self) -> None:
        """A request came in."""
        self.tokens = min(self.tokens + self.ratio, max(STOCK, self.floor_per_s * 10))

    def covers(self, now_s: float) -> bool:
        """Whether one retry is allowed now."""
        passed_s = now_s - self._at_s if self._at_s is not None else 0.0
        self.tokens = min(self.tokens + passed_s * self.floor_per_s, max(STOCK, self.floor_per_s * 10))
        self._at_s = now_s
        return self.tokens >= 1

    def withdraw(self, now_s: float) -> bool:
        """Take one retry out, if that is allowed now."""
        if not self.covers(now_s):
            return False
        self.tokens -= 1
        return True
