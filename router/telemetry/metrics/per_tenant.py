"""Current requests of each tenant, computed when a page is made. Labels of tenants are those of counters.py."""

from __future__ import annotations

from collections import Counter

from router.telemetry.counters import RequestMetrics
from router.telemetry.metrics.samples import MetricSources


class TenantsUnderWay:
    """Requests in flight and waiting, by tenant's label, at the time of its construction. A tenant without current
    requests counts 0."""

    def __init__(self, tallies: RequestMetrics, figures: MetricSources) -> None:
        """Requests that are neither placed nor waiting, such as those that are being read, are not counted."""
        placed, waiting = figures.tenants()
        self.in_flight = Counter(dict.fromkeys(tallies.tenant_labels(), 0))
        self.waiting = Counter[str]()
        # The first tenants have a label of their own: those of placed requests came before those that wait.
        for counts, sums in ((placed, (self.in_flight,)), (waiting, (self.in_flight, self.waiting))):
            for tenant, requests in counts.items():
                label = tallies.tenant(tenant)
                for each in sums:
                    each[label] += requests
        for label in self.in_flight:
            self.waiting[label] += 0
