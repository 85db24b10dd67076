"""Levels of the pool of replicas under the names of endpoint pickers, read at a scrape (telemetry/epp.py)."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Collection, Iterable, Iterator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.fleet.member import ReplicaState
from router.core.placement.router import Router
from router.telemetry.counters import RequestMetrics
from router.telemetry.epp import EPP, MODEL, OLD, POOL
from router.telemetry.metrics.samples import MetricSources

OF_POOL = ("name",)
Values = Iterable[tuple[tuple[str, ...], float]]


class Level(NamedTuple):
    """Gauge under the picker's name. `old` is its name after `inference`; "" if it had none."""

    name: str
    old: str
    text: str
    labels: tuple[str, ...] = OF_POOL
    old_labels: tuple[str, ...] = ()  # labels under the old name; () for the same


RUNNING = Level("request_running", "objective_running_requests", "Requests placed and not finished.", MODEL)
QUEUED = Level(
    "flow_control_queue_size", "extension_flow_control_queue_size", "Requests in the router's queue.",
    ("priority", "inference_pool", *MODEL),
)  # fmt: skip
READY = Level("ready_endpoints", "pool_ready_pods", "Replicas that may receive requests.")
EACH = Level(
    "per_endpoint_queue_size", "pool_per_pod_queue_size", "Requests waiting at a replica, by the engine's count.",
    ("name", "model_server_endpoint"), ("name", "model_server_pod"),
)  # fmt: skip
MEANS = (
    Level("average_kv_cache_utilization", "pool_average_kv_cache_utilization", "Mean KV pool usage, 0 to 1."),
    Level("average_queue_size", "pool_average_queue_size", "Mean number of requests waiting at a replica."),
    Level("average_running_requests", "pool_average_running_requests", "Mean number of requests running at a replica."),
)
DEVIATIONS = (
    Level("std_dev_kv_cache_utilization", "", "Standard deviation of KV pool usage, 0 to 1."),
    Level("std_dev_queue_size", "", "Standard deviation of the number of requests waiting at a replica."),
    Level("std_dev_running_requests", "", "Standard deviation of the number of requests running at a replica."),
)
LEVELS = (RUNNING, QUEUED, READY, *MEANS, *DEVIATIONS, EACH)
"""Families that are read, in the order of the page except for the last ones."""


class EppPool(Collector):
    """Levels of the pool under the requested names."""

    def __init__(
        self, aliases: Collection[str], router: Router, tallies: RequestMetrics, figures: MetricSources
    ) -> None:
        self._aliases, self._router, self._tallies, self._figures = aliases, router, tallies, figures

    def collect(self) -> Iterable[Metric]:
        """Yield a gauge for each level under each name."""
        yield from self._render_level(RUNNING, self._count_running())
        yield from self._render_level(QUEUED, self._count_queued())
        ready = [member for member in self._router.members if member.ready]
        yield from self._render_level(READY, [((POOL,), float(len(ready)))])
        for mean, deviation, values in zip(MEANS, DEVIATIONS, _loads(ready), strict=True):
            if values:
                yield from self._render_level(mean, [((POOL,), fmean(values))])
                yield from self._render_level(deviation, [((POOL,), stdev(values) if len(values) > 1 else 0.0)])
        known = [(m, m.load.waiting) for m in self._router.members if m.load.waiting is not None]
        yield from self._render_level(EACH, [((POOL, m.replica.pod or m.id), float(waiting)) for m, waiting in known])

    def _count_running(self) -> Values:
        counts = Count[str]()
        for member in self._router.members:
            counts.update([self._tallies.label(lease.model) for lease in member.leases.values() if lease.model])
        return [((model, model), float(count)) for model, count in sorted(counts.items())]

    def _count_queued(self) -> Values:
        counts = Count[tuple[str, str]]()
        for (priority, model), requests in self._figures.waiting().items():
            counts[priority.name.lower(), self._tallies.label(model) if model else ""] += requests
        return [((priority, POOL, model, model), float(n)) for (priority, model), n in sorted(counts.items())]

    def _render_level(self, level: Level, values: Values) -> Iterator[Metric]:
        text, values = f"With metrics.aliases: {level.text[0].lower()}{level.text[1:]}", list(values)
        if EPP in self._aliases:
            yield _family(f"{EPP}_{level.name}", text, level.labels, values)
        if OLD in self._aliases and level.old:
            yield _family(f"{OLD}_{level.old}", text, level.old_labels or level.labels, values)


def _family(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def _loads(members: Iterable[ReplicaState]) -> tuple[list[float], list[float], list[float]]:
    """Return the reported KV pool usage, queue lengths and running requests of engines. A replica without a report is
    left out."""
    usage, waiting, running = list[float](), list[float](), list[float]()
    for member in members:
        load = member.load
        for known, values in ((load.kv_usage, usage), (load.waiting, waiting), (load.running, running)):
            if known is not None:
                values.append(float(known))
    return usage, waiting, running
