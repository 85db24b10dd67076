"""Is a replica fit to be sent requests? A tiny machine fed with observations; only its flips are news.

A refused connection is proof and takes a replica out at once; a failed health check may be a hiccup, so a few in a
row are needed. One good check brings it back: the engine's own /health is 503 until it can serve. Checks without any
answer take a replica out like others, but where no replica is left, one of those may still serve (fleet.py).
"""

from __future__ import annotations

from dataclasses import dataclass

STOCK = 10.0  # retries that a budget can hold in any case
FAILURES_MAX = 2  # failed checks in a row before a replica is taken out


@dataclass(slots=True)
class Health:
    """Starts unfit: a replica serves once it has answered."""

    fit: bool = False
    failures: int = 0
    why: str = "not asked yet"
    served: bool = False  # it was fit once
    silent: bool = False  # the last check had no answer at all, which proves nothing

    def observe(self, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """Take one observation and what was heard; `proof` (connection refused) needs no second, `silent` says that
        there was neither answer nor refusal. Returns whether `fit` flipped."""
        before = self.fit
        self.why, self.silent = why, silent and not ok and not proof
        if ok:
            self.failures, self.fit, self.served = 0, True, True
        else:
            self.failures += 1
            if proof or self.failures >= FAILURES_MAX:
                self.fit = False
        return self.fit != before


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

    @classmethod
    def full(cls, ratio: float, floor_per_s: float) -> RetryBudget:
        """One that has saved all it can: replicas may fail in the first second too, and a fleet that fails as a whole
        is not asked again anyway (standing.py)."""
        return cls(ratio, floor_per_s, max(STOCK, floor_per_s * 10))

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
