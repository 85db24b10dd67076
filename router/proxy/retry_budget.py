"""Budget of retries, shared by all requests of a process."""

from __future__ import annotations

from dataclasses import dataclass

STOCK = 10.0  # minimum capacity of a budget, in retries


@dataclass(slots=True)
class RetryBudget:
    """Budget that limits retries to `ratio` of requests plus `floor_per_s`, so that a dead fleet is not hammered.

    A token bucket in retries (as in finagle's and linkerd's budgets). Each request deposits `ratio`, time deposits
    `floor_per_s`, and a retry withdraws one. The capacity is ten seconds' worth of the floor, and at least STOCK.
    """

    ratio: float = 0.2
    floor_per_s: float = 10.0
    tokens: float = STOCK
    _at_s: float | None = None  # time of the last deposit of `floor_per_s`; None before the first

    @classmethod
    def full(cls, ratio: float, floor_per_s: float) -> RetryBudget:
        """Return a full budget, since replicas may fail in the first second too. A fleet that fails entirely is not
        retried in any case (core/fleet/eligibility.py)."""
        return cls(ratio, floor_per_s, max(STOCK, floor_per_s * 10))

    def deposit(self) -> None:
        """Add the share of one request."""
        self.tokens = min(self.tokens + self.ratio, max(STOCK, self.floor_per_s * 10))

    def covers(self, now_s: float) -> bool:
        """True if one retry is allowed now."""
        passed_s = now_s - self._at_s if self._at_s is not None else 0.0
        self.tokens = min(self.tokens + passed_s * self.floor_per_s, max(STOCK, self.floor_per_s * 10))
        self._at_s = now_s
        return self.tokens >= 1

    def withdraw(self, now_s: float) -> bool:
        """Withdraw one retry and return True, if one is allowed now."""
        if not self.covers(now_s):
            return False
        self.tokens -= 1
        return True
