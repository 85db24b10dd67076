"""Tenants' rates in a worker: what the hub has left of them, and this worker's part of that while there is no hub.

The hub charges what it places, and tells all workers what is left as it changes. A worker looks at that before it reads
a body, so that one that is over its rate costs nothing; the hub has the last word. When the hub is lost each of N
workers goes on with an N-th of what was left, filled at an N-th of the rate. What it spends alone, it tells the hub
that it finds again; a new hub, which knows of nothing, is told what is missing of this worker's part. So nobody gets
more than the rate, but for the part of one worker that is lost together with the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.admission.rates import Quotas, RateLevels, Rates


@dataclass(frozen=True, slots=True)
class RatePart:
    """A worker's part of a tenant's rates."""

    requests_per_min: float | None
    tokens_per_min: float | None


class RateShares:
    """What this worker knows of tenants' rates, and may spend of them."""

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._clock = clock
        self._tenants: Mapping[str, Rates] = {}
        self._parts: dict[str, RatePart] = {}
        self._whole, self._own = Quotas(), Quotas()
        self._alone = True
        self._hub = 0  # the number of the hub that was heard last; 0 for none
        self._spent: dict[str, tuple[float, float]] = {}  # requests and tokens that the hub was not told of

    def configure(self, tenants: Mapping[str, Rates]) -> None:
        """Take the rates of all tenants by name, in place of the earlier rates."""
        self._tenants = tenants
        self._parts = {
            name: RatePart(_part(each.requests_per_min, self._workers), _part(each.tokens_per_min, self._workers))
            for name, each in tenants.items()
        }
        self._whole.configure(tenants)
        self._own.configure(self._parts)

    # -- the hub -------------------------------------------------------------------------------------------------

    def left(self, levels: Mapping[str, RateLevels]) -> None:
        """The hub tells what is left."""
        self._whole.set_levels(levels, self._clock())

    def lost(self) -> None:
        """There is no hub: go on with this worker's part of what was left."""
        if self._alone:
            return
        self._alone = True
        now_s, count = self._clock(), self._workers
        self._own = Quotas()
        self._own.configure(self._parts)
        levels = self._whole.levels(now_s)
        self._own.set_levels({n: (_part(r, count), _part(t, count)) for n, (r, t) in levels.items()}, now_s)

    def found(self, hub: int) -> None:
        """A hub of this number is there. One that is new is to be told what is missing of this worker's part."""
        if self._hub not in (0, hub):
            self._spent = self._missing()
        if self._hub != hub:
            self._whole = Quotas()
            self._whole.configure(self._tenants)
        self._hub, self._alone = hub, False

    def untold(self) -> dict[str, tuple[float, float]]:
        """Requests and tokens by tenant that the hub was not told of; it is told now."""
        spent, self._spent = self._spent, {}
        return spent

    def _missing(self) -> dict[str, tuple[float, float]]:
        self.lost()  # where a new hub came before the loss of the old one was noticed
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
        """Look at a tenant's rate before a body is read. Returns whether the request was taken from it for good: the
        hub, where there is one, takes it when it places. Raises Shed."""
        if self._alone:
            self._own.take(tenant, 0, self._clock())
            self._note(tenant, 1.0, 0.0)
            return True
        self._whole.take(tenant, 0, self._clock())  # until the hub tells, so that many at once are not all let through
        return False

    def placed_alone(self, tenant: str, tokens: int, *, counted: bool) -> int:
        """Charge a placement that the hub has no part in. Returns the tokens that were taken. Raises Shed."""
        quotas = self._own if self._alone else self._whole
        if not quotas.limited(tenant):
            return 0
        tokens = max(1, tokens)
        quotas.take(tenant, tokens, self._clock(), counted=counted or not self._alone)
        self._note(tenant, 0.0 if counted else 1.0, tokens)
        return tokens

    def settle(self, tenant: str, tokens: int) -> None:
        """So many more tokens were used by what was placed alone than were taken; a negative number gives back."""
        (self._own if self._alone else self._whole).spend(tenant, tokens, self._clock())
        self._note(tenant, 0.0, tokens)

    def _note(self, tenant: str, requests: float, tokens: float) -> None:
        before = self._spent.get(tenant, (0.0, 0.0))
        self._spent[tenant] = (before[0] + requests, before[1] + tokens)


def _part(whole: float | None, workers: int) -> float | None:
    return None if whole is None else whole / workers
