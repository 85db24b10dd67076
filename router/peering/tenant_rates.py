"""One rate for each tenant over all routers, without a request to any of them.

Every router has the whole bucket. It publishes the amount that each tenant has spent at it since it started. From its
own bucket it takes the amount that others have spent since their last message. So a message that is lost, duplicated or
late changes nothing in the end. Several routers may admit requests in the same moment. The excess is a debt, which is
paid before the tenant gets more.

A router that is alone continues with its part of each rate, and of the rest in the bucket. Parts follow the amount that
each router has spent in the last minute, with a small minimum for routers that have spent nothing. All routers compute
from the same data, so the parts add up to one. If a router falls silent, the others leave its part untouched for
RESERVED_S, unless it announced that it leaves. Spending during a separation is not a debt afterwards, because it was
within a part. A router that returns, or is new, takes the level of the bucket from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.core.admission.rate_limits import MINUTE_S, RateLevels, TenantRateLimits
from router.peering.frames import TENANTS_MAX, TenantUsage

FADE_S = 60.0  # time in which spending loses two thirds of its weight: a rate is by the minute
FLOOR = 0.02  # spending in minute's worths that every router is assumed to have, so that no part is 0
RESERVED_S = 60.0  # time for which the part of a router that fell silent is left untouched
NEW_S = 1.0  # time in which a router that has joined takes over bucket levels from others
IN_TURN = 32  # unchanged tenants in each message, in rotation, so that lost data is repeated


@dataclass(slots=True)
class _Demand:
    """Recent spending of one tenant's rates at one router, in minute's worths."""

    worth: float
    at_s: float

    def get_decayed(self, now_s: float) -> float:
        return self.worth * math.exp((self.at_s - now_s) / FADE_S) if now_s > self.at_s else self.worth

    def add(self, worth: float, now_s: float) -> None:
        self.worth, self.at_s = self.get_decayed(now_s) + max(0.0, worth), max(now_s, self.at_s)


@dataclass(slots=True)
class _Used:
    """Amount that was taken of one tenant's rates for one router, in minute's worths. The level of the tenant's bucket
    there is one minus that."""

    at_s: float
    requests: float = 0.0
    tokens: float = 0.0

    def fade(self, now_s: float) -> None:
        """Refill the bucket by the time that has passed."""
        minutes = max(0.0, now_s - self.at_s) / MINUTE_S
        self.requests, self.tokens = max(0.0, self.requests - minutes), max(0.0, self.tokens - minutes)
        self.at_s = max(now_s, self.at_s)


@dataclass(slots=True)
class _Other:
    """State of another router, from its messages."""

    # tenant -> requests and tokens of its last message
    told: dict[str, tuple[float, float]] = field(default_factory=dict)
    demand: dict[str, _Demand] = field(default_factory=dict)
    silent_since_s: float | None = None  # None while it is active
    levels_heard: set[str] = field(default_factory=set)  # tenants with levels that were taken over from it
    used: dict[str, _Used] = field(default_factory=dict)  # recent charges to it, for each tenant's rates


class DistributedRateLimiter:
    """Rates of all tenants that routers share. Numbers that identify routers are those of frames."""

    def __init__(self, quotas: TenantRateLimits, *, routers_assumed: int, clock: Callable[[], float]) -> None:
        """`routers_assumed` is the assumed number of routers until the link is whole for the first time."""
        self._rates, self._clock, self._assumed = quotas, clock, routers_assumed
        self._others: dict[int, _Other] = {}
        self._own: dict[str, _Demand] = {}
        self._own_told: dict[str, tuple[float, float]] = {}
        self._waiting: list[str] = []  # changed tenants that did not fit into the message
        self._queue: list[str] = []  # unchanged tenants that are published next
        self._alone, self._ever_together = True, False
        self._back, self._new_until_s = False, float("-inf")
        self._means: dict[str, tuple[float, float, int]] = {}  # tenant -> sums of levels, and number of routers in them

    # -- publishing ----------------------------------------------------------------------------------------------

    def say(self, *, everything: bool = False) -> list[TenantUsage]:
        """Return changes since the last message, and a few other tenants in rotation; with `everything`, all that
        fits."""
        spent = self._rates.get_usage()
        names = dict.fromkeys(self._waiting)
        names.update(dict.fromkeys(self._rates.spenders()))
        self._waiting = list(names)[TENANTS_MAX:]
        for tenant in self._waiting:
            del names[tenant]
        if not self._queue:
            self._queue = list(spent)
        room = min(TENANTS_MAX if everything else IN_TURN, TENANTS_MAX - len(names))
        names.update(dict.fromkeys(self._queue[:room]))
        self._queue = self._queue[room:]
        return [self._build_usage(tenant, spent[tenant]) for tenant in names if tenant in spent]

    def _build_usage(self, tenant: str, spent: list[float]) -> TenantUsage:
        requests, tokens = spent
        before = self._own_told.get(tenant, (0.0, 0.0))
        if (requests, tokens) != before:
            self._demand(self._own, tenant, requests - before[0], tokens - before[1], self._clock())
            self._own_told[tenant] = (requests, tokens)
        part = self._rates.part(tenant)
        requests_left, tokens_left = (
            None if level is None else level / part for level in self._rates.get_remaining(tenant, self._clock())
        )
        return TenantUsage(tenant, requests, tokens, requests_left, tokens_left)

    # -- receiving -----------------------------------------------------------------------------------------------

    def hear(self, origin: int, said: list[TenantUsage]) -> None:
        """Process a message of another router."""
        now_s = self._clock()
        other = self._others.get(origin)
        if other is None:
            other = self._others[origin] = _Other()
        if other.silent_since_s is not None:  # its spending in the meantime was all within its part
            other.told, other.silent_since_s = {}, None
            self._share_out(now_s)
        for each in {each.tenant: each for each in reversed(said)}.values():  # a router has one entry for a tenant
            self._apply_usage(other, each, now_s)

    def _apply_usage(self, other: _Other, each: TenantUsage, now_s: float) -> None:
        tenant = each.tenant
        limits = self._rates.rates_of(tenant)
        if limits == (None, None):
            return
        before = other.told.get(tenant)
        if before is None:  # earlier spending is not charged
            other.told[tenant] = (each.requests, each.tokens)
        elif before[0] != each.requests or before[1] != each.tokens:  # most are only repetitions
            requests, tokens = self._possible(other, each, before, limits, now_s)
            if requests or tokens:
                self._demand(other.demand, tenant, requests, tokens, now_s)
                if not self._alone:
                    self._rates.debit(tenant, requests, tokens, now_s)
        if now_s < self._new_until_s and tenant not in other.levels_heard:
            other.levels_heard.add(tenant)
            self._take_over(each, limits, now_s)

    def _possible(
        self, other: _Other, each: TenantUsage, before: tuple[float, float], limits: RateLevels, now_s: float
    ) -> tuple[float, float]:
        """Return the requests and tokens that one router can have spent since its last message. The limit is a full
        bucket, which is a minute's worth, and the refill since. So neither one message nor several block a tenant for
        more than a minute at once. Tokens may exceed a bucket, because long answers go into debt. The excess is taken
        with later messages, as the other router's bucket is refilled."""
        used = other.used.get(each.tenant)
        if used is None:
            used = other.used[each.tenant] = _Used(now_s)
        used.fade(now_s)
        requests, tokens = each.requests - before[0], each.tokens - before[1]
        told_requests, told_tokens = each.requests, each.tokens
        if limits[0] is None:
            requests = 0.0
        elif requests > 0:
            requests = min(requests, max(0.0, 1.0 - used.requests) * limits[0])
            used.requests += requests / limits[0]
            told_requests = before[0] + requests
        else:  # a count only grows: the earlier one was forged
            requests = 0.0
        if limits[1] is None:
            tokens = 0.0
        elif tokens > 0:
            tokens = min(tokens, max(0.0, 1.0 - used.tokens) * limits[1])
            used.tokens += tokens / limits[1]
            told_tokens = before[1] + tokens
        else:
            tokens = max(-limits[1], tokens)
            used.tokens = max(0.0, used.tokens + tokens / limits[1])
        other.told[each.tenant] = told_requests, told_tokens
        return requests, tokens

    def _take_over(self, each: TenantUsage, limits: RateLevels, now_s: float) -> None:
        """Take over a tenant's bucket level from the routers that are present. It is the mean of their reports, and of
        this router's own level if it was among them before."""
        sums = self._means.get(each.tenant) or self._get_own_levels(each.tenant)
        left = [
            0.0 if level is None or limit is None else max(-limit, min(level, limit))
            for level, limit in zip((each.requests_left, each.tokens_left), limits, strict=True)
        ]
        self._means[each.tenant] = sums = (sums[0] + left[0], sums[1] + left[1], sums[2] + 1)
        part = self._rates.part(each.tenant)
        left_here = sums[0] / sums[2] * part, sums[1] / sums[2] * part
        self._rates.set_levels({each.tenant: left_here}, now_s)

    def _get_own_levels(self, tenant: str) -> tuple[float, float, int]:
        if not self._back:
            return (0.0, 0.0, 0)
        left = self._rates.get_remaining(tenant, self._clock())
        part = self._rates.part(tenant)
        return ((left[0] or 0.0) / part, (left[1] or 0.0) / part, 1)

    def _demand(self, of: dict[str, _Demand], tenant: str, requests: float, tokens: float, now_s: float) -> None:
        limits = self._rates.rates_of(tenant)
        worth = max(requests / limits[0] if limits[0] else 0.0, tokens / limits[1] if limits[1] else 0.0)
        of.setdefault(tenant, _Demand(0.0, now_s)).add(worth, now_s)

    # -- membership ----------------------------------------------------------------------------------------------

    def apply_tenants(self) -> None:
        """Apply changed tenants and rates. Data of tenants that are gone is forgotten."""
        for known in (
            self._own_told,
            self._own,
            *(each for o in self._others.values() for each in (o.told, o.demand, o.used)),
        ):
            for tenant in [tenant for tenant in known if self._rates.rates_of(tenant) == (None, None)]:
                del known[tenant]
        self._share_out(self._clock())

    def silent(self, origin: int, *, left: bool) -> None:
        """Process a router that is silent; `left`: it announced that it leaves."""
        other = self._others.get(origin)
        if other is None:
            return
        if left:
            del self._others[origin]
        elif other.silent_since_s is None:
            other.silent_since_s = self._clock()
        self._share_out(self._clock())

    def tick(self) -> None:
        """Distribute the parts of routers that have been silent for long. Must be called about every second."""
        now_s = self._clock()
        if self._alone:
            return
        gone = [
            origin
            for origin, other in self._others.items()
            if other.silent_since_s is not None and now_s - other.silent_since_s >= RESERVED_S
        ]
        for origin in gone:
            del self._others[origin]
        if gone:
            self._share_out(now_s)

    def on_disconnected(self) -> None:
        """Handle a link that is no longer whole: this router continues with its part of each rate."""
        self._alone = True
        self._share_out(self._clock())

    def on_connected(self) -> None:
        """Handle a link that is whole again, or for the first time."""
        now_s = self._clock()
        if not self._alone:
            return
        self._alone, self._back, self._ever_together = False, self._ever_together, True
        self._new_until_s, self._means = now_s + NEW_S, {}
        for other in self._others.values():
            other.told, other.levels_heard, other.silent_since_s = {}, set(), other.silent_since_s or now_s
        self._share_out(now_s)

    def _share_out(self, now_s: float) -> None:
        """Set the parts of all rates that this router serves."""
        names = dict.fromkeys(self._own)
        for other in self._others.values():
            names.update(dict.fromkeys(other.demand))
        parts = {tenant: self._part(tenant, now_s) for tenant in names}
        self._rates.set_parts(self._part("", now_s), parts, now_s)

    def _part(self, tenant: str, now_s: float) -> float:
        """Return this router's part of a tenant's rates; with "", of a rate without any spending."""
        own, others, silent = FLOOR + _get_demand(self._own, tenant, now_s), 0.0, 0.0
        for other in self._others.values():
            worth = FLOOR + _get_demand(other.demand, tenant, now_s)
            others += worth
            silent += worth if other.silent_since_s is not None else 0.0
        if not self._alone:
            return 1.0 - silent / (own + others)
        if self._others:
            return own / (own + others)
        return 1.0 if self._ever_together else 1.0 / self._assumed


def _get_demand(demand: Mapping[str, _Demand], tenant: str, now_s: float) -> float:
    found = demand.get(tenant)
    return found.get_decayed(now_s) if found is not None else 0.0
