"""Traffic of the last minutes by replica and by tenant: requests, times to first token, and computed prompt tokens.

All sums fade with one window (decaying_sums.py). So each replica has one small histogram, whatever its traffic, and no
request is kept. A name without recent requests is dropped, so names that come and go need no memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from router.core.insights.ledger.decaying_sums import TTFT_S, DecayingSum, percentile

TRAFFIC_WINDOW_S = 120.0
FORGOTTEN = 0.01  # faded requests below which a name is dropped: after about nine minutes for a busy replica
REQUESTS = len(TTFT_S) + 1  # index of the number of requests, after the buckets of times


class ReplicaTraffic(NamedTuple):
    """Recent traffic of one replica."""

    requests: float = 0.0
    """Requests that ended in the window; older ones count less."""
    requests_per_s: float = 0.0
    share: float | None = None
    """Part of the requests of all replicas; None if there were none."""
    first_tokens: float = 0.0
    """Those of the requests with a time to first token."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None


class TenantTraffic(NamedTuple):
    """Recent traffic of one tenant, by its label."""

    tenant: str
    requests_per_s: float = 0.0
    request_share: float = 0.0
    computed_share: float = 0.0
    """Part of the prompt tokens that engines had to compute."""


class RecentTraffic:
    """Traffic of all replicas and tenants. Times are Unix time."""

    def __init__(self, now_s: float) -> None:
        self._fading = DecayingSum(TRAFFIC_WINDOW_S, now_s)
        self._weight = self._fading.weight
        self._replicas: dict[str, list[float]] = {}  # first tokens by bucket, then requests
        self._tenants: dict[str, list[float]] = {}  # requests, computed prompt tokens

    def add(self, replica: str, ttft_s: float | None) -> None:
        """Count a request that ended; `ttft_s` is None without a first token."""
        series = self._replicas.get(replica)
        if series is None:
            series = self._replicas[replica] = [0.0] * (REQUESTS + 1)
        series[REQUESTS] += self._weight
        if ttft_s is not None:
            series[bisect_left(TTFT_S, ttft_s)] += self._weight

    def add_tenant(self, tenant: str, requests: float, computed_tokens: float) -> None:
        """Count requests of a tenant, which is given by its label."""
        sums = self._tenants.setdefault(tenant, [0.0, 0.0])
        sums[0] += requests * self._weight
        sums[1] += computed_tokens * self._weight

    def move(self, now_s: float) -> None:
        """Move on to `now_s`, and drop names without recent requests."""
        factor = self._fading.move(now_s)
        self._weight = self._fading.weight
        least = FORGOTTEN * self._weight
        for sums, at in ((self._replicas, REQUESTS), (self._tenants, 0)):
            if factor < 1:
                for name, series in sums.items():
                    sums[name] = [value * factor for value in series]
            for name in [name for name, series in sums.items() if series[at] < least]:
                del sums[name]

    def __len__(self) -> int:
        """Number of names with sums."""
        return len(self._replicas) + len(self._tenants)

    @property
    def requests(self) -> float:
        """Recent requests of all replicas."""
        return sum(series[REQUESTS] for series in self._replicas.values()) / self._weight

    def of_replica(self, replica: str, requests: float) -> ReplicaTraffic:
        """Return the traffic of a replica. `requests`: those of all replicas."""
        series = self._replicas.get(replica)
        if series is None:
            return ReplicaTraffic(share=0.0 if requests > 0 else None)
        times, own = series[:REQUESTS], series[REQUESTS] / self._weight
        return ReplicaTraffic(
            own,
            round(own * self._per_s, 3),
            round(own / requests, 4) if requests > 0 else None,
            sum(times) / self._weight,
            _rounded(percentile(times, TTFT_S, 0.5)),
            _rounded(percentile(times, TTFT_S, 0.9)),
        )

    def tenants(self, tenants_max: int) -> list[TenantTraffic]:
        """Return tenants, those with the most computed tokens first."""
        requests, computed = (_total(self._tenants.values(), at) for at in (0, 1))
        most = sorted(self._tenants.items(), key=lambda each: -each[1][1])[:tenants_max]
        return [
            TenantTraffic(
                tenant,
                round(own / self._weight * self._per_s, 3),
                round(own / requests, 4),
                round(tokens / computed, 4) if computed > 0 else 0.0,
            )
            for tenant, (own, tokens) in most
        ]

    @property
    def _per_s(self) -> float:
        """Factor from a number of recent requests to a rate."""
        return self._fading.per_hour / 3_600.0


def _total(sums: Iterable[list[float]], at: int) -> float:
    return sum(each[at] for each in sums)


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None
