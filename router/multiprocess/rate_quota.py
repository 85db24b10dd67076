"""Tenants' rates in a worker: the remaining rate at the hub, and this worker's part of it while the hub is lost.

The hub charges the requests that it places, and publishes each change of the remaining rate to all workers. A worker
checks that before it reads a body, so that a request over its rate costs nothing. The decision of the hub is final.
When the hub is lost each of N workers continues with an N-th of the rest, refilled at an N-th of the rate. It reports
its spending without the hub once the hub is back. A new hub has no earlier data, so it gets the missing amount of this
worker's part. So no tenant gets more than the rate, with one exception: the part of one worker that is lost together
with the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.admission.rate_limits import RateLevels, Rates, TenantRateLimits


@dataclass(frozen=True, slots=True)
class RatePart:
    """A worker's part of a tenant's rates."""

    requests_per_min: float | None
    tokens_per_min: float | None


class WorkerQuotas:
    """Copy of tenants' rates in one worker, and the worker's part of them."""

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._clock = clock
        self._tenants: Mapping[str, Rates] = {}
        self._parts: dict[str, RatePart] = {}
        self._whole, self._own = TenantRateLimits(), TenantRateLimits()
        self._alone = True
        self._hub = 0  # number of the hub with the last message; 0 before the first
        self._spent: dict[str, tuple[float, float]] = {}  # requests and tokens that are not reported to the hub yet

    def configure(self, tenants: Mapping[str, Rates]) -> None:
        """Replace the rates of all tenants, by tenant name."""
        self._tenants = tenants
        self._parts = {
            name: RatePart(_part(each.requests_per_min, self._workers), _part(each.tokens_per_min, self._workers))
            for name, each in tenants.items()
        }
        self._whole.configure(tenants)
        self._own.configure(self._parts)

    # -- the hub -------------------------------------------------------------------------------------------------

    def on_levels(self, levels: Mapping[str, RateLevels]) -> None:
        """Apply the remaining rates that the hub published."""
        self._whole.set_levels(levels, self._clock())

    def on_control_lost(self) -> None:
        """Continue with this worker's part of the rest, because the hub is lost."""
        if self._alone:
            return
        self._alone = True
        now_s, count = self._clock(), self._workers
        self._own = TenantRateLimits()
        self._own.configure(self._parts)
        levels = self._whole.levels(now_s)
        self._own.set_levels({n: (_part(r, count), _part(t, count)) for n, (r, t) in levels.items()}, now_s)

    def on_control_found(self, hub: int) -> None:
        """Record a hub with this number. A new one must get the missing amount of this worker's part."""
        if self._hub not in (0, hub):
            self._spent = self._compute_deficits()
        if self._hub != hub:
            self._whole = TenantRateLimits()
            self._whole.configure(self._tenants)
        self._hub, self._alone = hub, False

    def take_unreported(self) -> dict[str, tuple[float, float]]:
        """Return requests and tokens by tenant that are not reported to the hub yet, and count them as reported."""
        spent, self._spent = self._spent, {}
        return spent

    def _compute_deficits(self) -> dict[str, tuple[float, float]]:
        self.on_control_lost()  # a new hub may come before the loss of the old one was noticed
        missing = {}
        for name, (requests, tokens) in self._own.levels(self._clock()).items():
            part = self._parts[name]
            missing[name] = (
                part.requests_per_min - requests if part.requests_per_min and requests is not None else 0.0,
                part.tokens_per_min - tokens if part.tokens_per_min and tokens is not None else 0.0,
            )
        return missing

    # -- requests ------------------------------------------------------------------------------------------------

    def charge(self, tenant: str) -> bool:
        """Check a tenant's rate before a body is read. Returns True if this worker has charged the request, without the
        hub. Returns False if the hub charges it when it places it. Raises Shed."""
        if self._alone:
            self._own.take(tenant, 0, self._clock())
            self._note(tenant, 1.0, 0.0)
            return True
        # until the next level from the hub, so that many at once are not all admitted
        self._whole.take(tenant, 0, self._clock())
        return False

    def placed_alone(self, tenant: str, tokens: int, *, counted: bool) -> int:
        """Charge a placement without the hub. Returns the tokens that were taken. Raises Shed."""
        quotas = self._own if self._alone else self._whole
        if not quotas.has_limits(tenant):
            return 0
        tokens = max(1, tokens)
        quotas.take(tenant, tokens, self._clock(), counted=counted or not self._alone)
        self._note(tenant, 0.0 if counted else 1.0, tokens)
        return tokens

    def settle(self, tenant: str, tokens: int) -> None:
        """Charge the difference between used and taken tokens of such a placement; a negative number is returned."""
        (self._own if self._alone else self._whole).spend(tenant, tokens, self._clock())
        self._note(tenant, 0.0, tokens)

    def _note(self, tenant: str, requests: float, tokens: float) -> None:
        before = self._spent.get(tenant, (0.0, 0.0))
        self._spent[tenant] = (before[0] + requests, before[1] + tokens)


def _part(whole: float | None, workers: int) -> float | None:
    return None if whole is None else whole / workers
