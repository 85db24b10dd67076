"""Rate limits of tenants: requests and tokens per minute, as token buckets with a capacity of one minute.

A request takes one from the request bucket and its estimated prompt tokens from the token bucket. The token bucket only
has to be positive: the cost of a request is known when its answer has ended, so the bucket may become negative. Then
the tenant waits until it is positive again. Over an hour no tenant gets more than the rate, plus one bucket and one
request.

Several routers enforce one rate together: each has the whole bucket, and subtracts the consumption that the others
publish. A router that cannot receive from the others continues with a part of each rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from router.core.types.placements import Shed

MINUTE_S = 60.0
RateLevels = tuple[float | None, float | None]  # remaining requests and tokens; None if there is no such rate


class Rates(Protocol):
    """Limits of a tenant; None or 0: no limit."""

    @property
    def requests_per_min(self) -> float | None:
        """Requests per minute."""

    @property
    def tokens_per_min(self) -> float | None:
        """Tokens of prompts and answers per minute."""


@dataclass(slots=True)
class Bucket:
    """A bucket that fills with time up to one minute's worth; it begins full."""

    level: float
    at_s: float

    def fill(self, per_min: float, now_s: float) -> float:
        """Return the current level."""
        if now_s > self.at_s:
            self.level, self.at_s = self.level + (now_s - self.at_s) * per_min / MINUTE_S, now_s
        self.level = min(self.level, per_min)
        return self.level


class TenantRateLimits:
    """The buckets of all tenants with a rate; for other tenants no state is kept."""

    def __init__(self) -> None:
        self._tenants: Mapping[str, Rates] = {}
        self._buckets: dict[tuple[str, bool], Bucket] = {}  # (tenant, True for tokens, False for requests) -> bucket
        self._parts: Mapping[str, float] = {}  # tenant -> its part of its rates here, if not `_part`
        self._part = 1.0  # part of the rates of all other tenants that is allotted to this router
        self._spent: dict[str, list[float]] = {}  # requests and tokens consumed here so far, by tenant
        self._spenders: set[str] = set()  # tenants that consumed since the last call of `spenders`

    def configure(self, tenants: Mapping[str, Rates]) -> None:
        """Apply other tenants and rates; buckets of tenants that stay keep their level."""
        self._tenants = tenants
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in tenants}
        self._spent = {tenant: spent for tenant, spent in self._spent.items() if tenant in tenants}

    def has_limits(self, tenant: str) -> bool:
        """True if the tenant has any rate."""
        rates = self._tenants.get(tenant)
        return rates is not None and bool(rates.requests_per_min or rates.tokens_per_min)

    def take(self, tenant: str, tokens: int, now_s: float, *, counted: bool = False) -> None:
        """Charge one request with a prompt of `tokens`. With `counted` the request bucket was charged before, when the
        prompt was not yet known. Raises Shed, and then nothing was charged."""
        rates = self._tenants.get(tenant)
        if rates is None:
            return
        requests_per_min, tokens_per_min = self._in_force(tenant, rates)
        if counted:
            requests_per_min = None
        wait_s, what = 0.0, "requests"
        if requests_per_min:
            asked = self._bucket(tenant, False, requests_per_min, now_s)
            need = min(1.0, requests_per_min)
            wait_s = (need - asked.level) * MINUTE_S / requests_per_min
        if tokens_per_min:
            spent = self._bucket(tenant, True, tokens_per_min, now_s)
            need = min(1.0, tokens_per_min)
            tokens_wait_s = (need - spent.level) * MINUTE_S / tokens_per_min
            if tokens_wait_s > wait_s:
                wait_s, what = tokens_wait_s, "tokens"
        if wait_s > 1e-9:  # a smaller wait is a rounding error
            raise Shed("rate_limited", f"The limit of {what} per minute is reached.", wait_s)
        self._note(tenant, 0.0 if counted else 1.0, tokens)
        if requests_per_min:
            asked.level -= 1.0
        if tokens_per_min:
            spent.level -= tokens

    def spend(self, tenant: str, tokens: int, now_s: float) -> None:
        """Charge `tokens` to the tenant because more were used than charged before; a negative number is a refund."""
        rates = self._tenants.get(tenant)
        if rates is not None and rates.tokens_per_min:
            self._note(tenant, 0.0, tokens)
            tokens_per_min = self._in_force(tenant, rates)[1]
            if tokens_per_min:
                self._bucket(tenant, True, tokens_per_min, now_s).level -= tokens

    def debit(self, tenant: str, requests: float, tokens: float, now_s: float) -> None:
        """Charge both of a tenant's buckets for consumption on another router, even if they become negative. It does
        not count as consumed here."""
        rates = self._tenants.get(tenant)
        if rates is None:
            return
        requests_per_min, tokens_per_min = self._in_force(tenant, rates)
        if requests_per_min:
            self._bucket(tenant, False, requests_per_min, now_s).level -= requests
        if tokens_per_min:
            self._bucket(tenant, True, tokens_per_min, now_s).level -= tokens

    def set_levels(self, levels: Mapping[str, RateLevels], now_s: float) -> None:
        """Take over the remaining levels of these tenants."""
        for tenant, (requests, tokens) in levels.items():
            rates = self._tenants.get(tenant)
            if rates is None:
                continue
            requests_per_min, tokens_per_min = self._in_force(tenant, rates)
            if requests_per_min and requests is not None:
                self._bucket(tenant, False, requests_per_min, now_s).level = requests
            if tokens_per_min and tokens is not None:
                self._bucket(tenant, True, tokens_per_min, now_s).level = tokens

    # -- several routers -----------------------------------------------------------------------------------------

    def get_usage(self) -> dict[str, list[float]]:
        """Return the requests and tokens consumed here so far, by tenant. The mapping must not be modified."""
        return self._spent

    def spenders(self) -> set[str]:
        """Return the tenants that consumed here since the last call."""
        names, self._spenders = self._spenders, set()
        return names

    def get_remaining(self, tenant: str, now_s: float) -> RateLevels:
        """Return the remaining levels of a tenant."""
        rates = self._tenants.get(tenant)
        return (None, None) if rates is None else self._levels_of(tenant, rates, now_s)

    def rates_of(self, tenant: str) -> RateLevels:
        """Return the tenant's limits per minute for all routers together; None if there is no such rate."""
        rates = self._tenants.get(tenant)
        return (None, None) if rates is None else (rates.requests_per_min or None, rates.tokens_per_min or None)

    def part(self, tenant: str) -> float:
        """Return the part of the tenant's rates that is allotted to this router."""
        return self._parts.get(tenant, self._part)

    def set_parts(self, part: float, parts: Mapping[str, float], now_s: float) -> None:
        """Allot this part of every tenant's rates to this router, more than 0 and at most 1. The remaining levels
        change in the same proportion. `parts` contains the tenants with a different part."""
        levels = dict[tuple[str, bool], float]()
        for tenant, of_tokens in self._buckets:
            rates = self._tenants[tenant]
            per_min = self._in_force(tenant, rates)[of_tokens]
            if per_min:
                level = self._bucket(tenant, of_tokens, per_min, now_s).level
                grown = parts.get(tenant, part) / self.part(tenant)
                levels[tenant, of_tokens] = level if level < 0 and grown > 1 else level * grown  # debts do not grow
        self._part, self._parts = part, parts
        for key, level in levels.items():
            self._buckets[key].level = level

    def _in_force(self, tenant: str, rates: Rates) -> RateLevels:
        """Return the requests and tokens per minute that are allotted to this router."""
        part = self._parts.get(tenant, self._part) if self._parts else self._part
        requests, tokens = rates.requests_per_min, rates.tokens_per_min
        return requests * part if requests else None, tokens * part if tokens else None

    def _note(self, tenant: str, requests: float, tokens: float) -> None:
        """Record a tenant's consumption on this router."""
        self._spenders.add(tenant)
        spent = self._spent.get(tenant)
        if spent is None:
            spent = self._spent[tenant] = [0.0, 0.0]
        spent[0] += requests
        spent[1] += tokens

    # -- inside --------------------------------------------------------------------------------------------------

    def _levels_of(self, tenant: str, rates: Rates, now_s: float) -> RateLevels:
        requests, tokens = self._in_force(tenant, rates)
        return (
            self._bucket(tenant, False, requests, now_s).level if requests else None,
            self._bucket(tenant, True, tokens, now_s).level if tokens else None,
        )

    def _bucket(self, tenant: str, of_tokens: bool, per_min: float, now_s: float) -> Bucket:
        bucket = self._buckets.get((tenant, of_tokens))
        if bucket is None:
            bucket = self._buckets[tenant, of_tokens] = Bucket(per_min, now_s)
        bucket.fill(per_min, now_s)
        return bucket
