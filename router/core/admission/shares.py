"""Each tenant's use of the places, and the places that are kept free for others.

A request that waits for a place waits for the end of an answer. So if a tenant holds its share of the places and other
tenants are active, some places are kept free for them. Their number is KEPT_TIMES the places that the others use, so
that their use can grow, limited to the places beyond the tenant's share. Almost nothing is kept for tenants that send
almost nothing: one request a minute must not cost others a quarter of the fleet. Use is the number of open leases: the
current one or the mean over about USE_S, whichever is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

SEEN_S = 60.0  # seconds for which a tenant counts as active after a request
USE_S = 10.0  # seconds of the mean of open leases
KEPT_TIMES = 2.0  # places that are kept for each place that others use
# Share of the places that is kept on average, above which the tenant's requests stop waiting in engines.
USE_FULL = 0.05
TENANTS_MAX = 1_024  # maximum of tenants that count as active


@dataclass(slots=True)
class _Use:
    """Open leases, current and mean."""

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
    """Recently active tenants, and the open leases of all tenants."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # tenant -> time of its last request, in that order
        self._all = _Use()
        self._uses: dict[str, _Use] = {}  # of tenants that are active or have leases

    def note_request(self, tenant: str, now_s: float) -> None:
        """Record a request of a tenant."""
        seen = self._seen
        seen.pop(tenant, None)
        seen[tenant] = now_s
        if len(seen) > TENANTS_MAX:
            oldest = next(iter(seen))
            del seen[oldest]
            if oldest in self._uses and not self._uses[oldest].open:
                del self._uses[oldest]

    def on_lease_opened(self, tenant: str, now_s: float) -> None:
        """Record that a lease of the tenant was opened."""
        self._all.count(1, now_s)
        self._uses.setdefault(tenant, _Use(0, 0.0, now_s)).count(1, now_s)

    def on_lease_closed(self, tenant: str, now_s: float) -> None:
        """Record that a lease of the tenant was closed."""
        self._all.count(-1, now_s)
        use = self._uses[tenant]
        use.count(-1, now_s)
        if not use.open and tenant not in self._seen:
            del self._uses[tenant]

    def has_other_tenants(self, tenant: str, now_s: float) -> bool:
        """True if another tenant sent a request recently."""
        for name in reversed(self._seen):
            if name != tenant:
                return now_s - self._seen[name] <= SEEN_S
        return False

    def compute_reserved(self, tenant: str, now_s: float) -> tuple[float, float]:
        """Return the places that are kept free for others by their use: by the larger of current and mean, and by the
        mean alone."""
        every, own = self._all, self._uses.get(tenant)
        every.pass_time(now_s)
        now, mean = float(every.open), every.mean
        if own is not None:
            own.pass_time(now_s)
            now, mean = now - own.open, mean - own.mean
        return KEPT_TIMES * max(now, mean), KEPT_TIMES * mean
