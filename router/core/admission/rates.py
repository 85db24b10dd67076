"""How much each tenant may ask for: requests and tokens a minute, as token buckets of one minute's worth.

A request takes one from the bucket of requests and what its prompt is believed to have from that of tokens. The latter
only has to hold something: what a request costs is known when its answer has ended, so it may go into debt, and who is
in debt waits until it is paid. Over an hour nobody gets more than the rate, plus one bucket and one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from router.core.facts.placements import Shed

MINUTE_S = 60.0
RateLevels = tuple[float | None, float | None]  # requests and tokens that are left; None where there is no such rate


class Rates(Protocol):
    """What a tenant may ask for; None or 0: any number."""

    @property
    def requests_per_min(self) -> float | None:
        """Requests a minute."""

    @property
    def tokens_per_min(self) -> float | None:
        """Tokens a minute, of prompts and answers."""


@dataclass(slots=True)
class Bucket:
    """Fills with time up to one minute's worth; begins full."""

    level: float
    at_s: float

    def fill(self, per_min: float, now_s: float) -> float:
        """The level now."""
        if now_s > self.at_s:
            self.level, self.at_s = self.level + (now_s - self.at_s) * per_min / MINUTE_S, now_s
        self.level = min(self.level, per_min)
        return self.level


class Quotas:
    """The buckets of all tenants that have a rate; of others nothing is kept."""

    def __init__(self) -> None:
        self._tenants: Mapping[str, Rates] = {}
        self._buckets: dict[tuple[str, bool], Bucket] = {}  # (tenant, True for tokens, False for requests) -> bucket
        self._changed: set[str] = set()  # tenants whose levels were not told since they were last spent from

    def configure(self, tenants: Mapping[str, Rates]) -> None:
        """Take other tenants and rates; buckets of those that stay keep their level."""
        self._tenants = tenants
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key[0] in tenants}

    def limited(self, tenant: str) -> bool:
        """Whether the tenant has a rate of any kind."""
        rates = self._tenants.get(tenant)
        return rates is not None and bool(rates.requests_per_min or rates.tokens_per_min)

    def take(self, tenant: str, tokens: int, now_s: float, *, counted: bool = False) -> None:
        """One request came, with a prompt of so many tokens. `counted`: it was taken from the bucket of requests
        before, when its prompt was not known. Raises Shed, and then nothing was taken."""
        rates = self._tenants.get(tenant)
        if rates is None:
            return
        requests_per_min = None if counted else rates.requests_per_min
        tokens_per_min = rates.tokens_per_min
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
            raise Shed("rate_limited", f"The rate of {what} a minute is used up.", wait_s)
        self._changed.add(tenant)
        if requests_per_min:
            asked.level -= 1.0
        if tokens_per_min:
            spent.level -= tokens

    def spend(self, tenant: str, tokens: int, now_s: float) -> None:
        """Take `tokens` from the tenant's bucket, since more were used than taken; a negative number gives back."""
        rates = self._tenants.get(tenant)
        if rates is not None and rates.tokens_per_min:
            self._changed.add(tenant)
            self._bucket(tenant, True, rates.tokens_per_min, now_s).level -= tokens

    def debit(self, tenant: str, requests: float, tokens: float, now_s: float) -> None:
        """Take from both of a tenant's buckets what was used without asking, whether it was there or not."""
        rates = self._tenants.get(tenant)
        if rates is None:
            return
        self._changed.add(tenant)
        if rates.requests_per_min:
            self._bucket(tenant, False, rates.requests_per_min, now_s).level -= requests
        if rates.tokens_per_min:
            self._bucket(tenant, True, rates.tokens_per_min, now_s).level -= tokens

    def levels(self, now_s: float, *, changed: bool = False) -> dict[str, RateLevels]:
        """What is left to each tenant that ever spent any; with `changed`, to each that has since this was last
        asked so."""
        names = self._changed if changed else {name for name, _ in self._buckets}
        if changed:
            self._changed = set()
        return {name: self._levels_of(name, self._tenants[name], now_s) for name in names if name in self._tenants}

    def set_levels(self, levels: Mapping[str, RateLevels], now_s: float) -> None:
        """Take over what is left to these tenants."""
        for tenant, (requests, tokens) in levels.items():
            rates = self._tenants.get(tenant)
            if rates is None:
                continue
            if rates.requests_per_min and requests is not None:
                self._bucket(tenant, False, rates.requests_per_min, now_s).level = requests
            if rates.tokens_per_min and tokens is not None:
                self._bucket(tenant, True, rates.tokens_per_min, now_s).level = tokens

    def _levels_of(self, tenant: str, rates: Rates, now_s: float) -> RateLevels:
        requests, tokens = rates.requests_per_min, rates.tokens_per_min
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
