"""Current requests of each tenant, computed when a page is made. Labels of tenants are those of counters.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric

from router.telemetry.counters import RequestMetrics
from router.telemetry.metrics.families import gauge
from router.telemetry.metrics.samples import MetricSources


class TenantsUnderWay:
    """Requests in flight and waiting, by tenant's label, at the time of its construction. A tenant without current
    requests counts 0."""

    def __init__(self, tallies: RequestMetrics, figures: MetricSources) -> None:
        """Requests that are neither placed nor waiting, such as those that are being read, are not counted."""
        placed, waiting = figures.tenants()
        self.in_flight = Counter(dict.fromkeys(sorted(tallies.tenant_labels), 0))
        self.waiting = Counter[str]()
        # The first tenants have a label of their own: those of placed requests came before those that wait.
        for counts, sums in ((placed, (self.in_flight,)), (waiting, (self.in_flight, self.waiting))):
            for tenant, requests in counts.items():
                label = tallies.tenant(tenant)
                for each in sums:
                    each[label] += requests
        for label in self.in_flight:
            self.waiting[label] += 0


def collect_tenants(tallies: RequestMetrics, figures: MetricSources) -> Iterable[Metric]:
    """Yield two gauges, which have values if a keys file names tenants."""
    named, under_way = bool(tallies.tenants), TenantsUnderWay(tallies, figures)
    in_flight = [((label,), n) for label, n in under_way.in_flight.items()] if named else []
    text = "Requests placed or in the router's queue, by tenant of the keys file."
    yield gauge("tenant_in_flight_requests", text, ("tenant",), in_flight)
    waiting = [((label,), n) for label, n in under_way.waiting.items()] if named else []
    text = "Requests in the router's queue, including deferred ones, by tenant of the keys file."
    yield gauge("tenant_queued_requests", text, ("tenant",), waiting)
