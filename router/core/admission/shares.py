"""How much of the places each tenant uses, and how many are kept free for others.

Whoever waits for a place waits for the end of an answer. So where a tenant holds its share of the places, and others
are about, some are kept free for them: KEPT_TIMES as many as they use, so that they may come to use more, and at most
what is beyond that share. Of a tenant that asks next to nothing next to nothing is kept: a single request a minute must
not cost others a quarter of the fleet. Use is the number of open leases, now or on the mean of about USE_S, whichever
is more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

SEEN_S = 60.0  # time for which a tenant counts as active after it asked
USE_S = 10.0  # time over which the mean number of open leases is taken
KEPT_TIMES = 2.0  # places that are kept for each one that others use
USE_FULL = 0.05  # part of the places that is kept on the mean, from which on nothing more waits in engines
TENANTS_MAX = 1_024  # most tenants that count as active


@dataclass(slots=True)
class _Use:
    """Open leases, now and on the mean."""

    open: int = 0
    mean: float = 0.0
    at_s: float = 0.0

    def count(self, more: int, now_s: float) -> None:
        self.pass_time(now_s)
        self.open += more

    def pass_time(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.mean = self.open + (self.mean - self.open) * exp((self.at_s - now_s) / USE_S)
            self.at_s = now_s


class Shares:
    """Tenants that asked of late, and leases of all."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # tenant -> when it last asked, in that order
        self._all = _Use()
        self._uses: dict[str, _Use] = {}  # of tenants that asked or have leases

    def asked(self, tenant: str, now_s: float) -> None:
        """A tenant asks."""
        seen = self._seen
        seen.pop(tenant, None)
        seen[tenant] = now_s
        if len(seen) > TENANTS_MAX:
            oldest = next(iter(seen))
            del seen[oldest]
            if oldest in self._uses and not self._uses[oldest].open:
                del self._uses[oldest]

    def opened(self, tenant: str, now_s: float) -> None:
        """A lease was given to it."""
        self._all.count(1, now_s)
        self._uses.setdefault(tenant, _Use(0, 0.0, now_s)).count(1, now_s)

    def closed(self, tenant: str, now_s: float) -> None:
        """It gave one back."""
        self._all.count(-1, now_s)
        use = self._uses[tenant]
        use.count(-1, now_s)
        if not use.open and tenant not in self._seen:
            del self._uses[tenant]

    def others_about(self, tenant: str, now_s: float) -> bool:
        """Whether another tenant asked of late."""
        for name in reversed(self._seen):
            if name != tenant:
                return now_s - self._seen[name] <= SEEN_S
        return False

    def kept(self, tenant: str, now_s: float) -> tuple[float, float]:
        """Places that are kept free for others by what they use, now or on the mean; and on the mean alone."""
        every, own = self._all, self._uses.get(tenant)
        every.pass_time(now_s)
        now, mean = float(every.open), every.mean
        if own is not None:
            own.pass_time(now_s)
            now, mean = now - own.open, mean - own.mean
        return KEPT_TIMES * max(now, mean), KEPT_TIMES * mean
