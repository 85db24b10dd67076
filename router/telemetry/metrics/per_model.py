"""Current requests and totals of each model, computed when a page is made. Labels of models are those of
counters.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

from router.config.api_keys import NONE
from router.core.fleet.registry import Fleet
from router.core.types.requests import Priority
from router.telemetry.counters import RequestMetrics
from router.telemetry.metrics.samples import MetricSources

ZEROS_MAX = 100  # the first models requested are listed even if they have no current requests; at most this many
Waiting = Counter[tuple[Priority, str]]


class UnderWay:
    """Requests in flight and waiting, by model's label, at the time of its construction."""

    def __init__(self, fleet: Fleet, tallies: RequestMetrics, figures: MetricSources) -> None:
        """Requests that are neither placed nor waiting, such as those that are being read, are counted in flight for no
        model."""
        self.waiting: Waiting = Counter()
        for (priority, model), requests in figures.waiting().items():
            self.waiting[priority, tallies.label(model) if model else NONE] += requests
        labels = tallies.labels()[:ZEROS_MAX]
        self.in_flight = Counter(dict.fromkeys(labels, 0))
        for member in fleet.members.values():
            self.in_flight.update([tallies.label(lease.model) for lease in member.leases.values()])
        for (_, label), requests in self.waiting.items():
            self.in_flight[label] += requests
        self.in_flight[NONE] += max(0, figures.in_flight() - self.in_flight.total())
        for label in labels or [NONE]:
            self.waiting[Priority.NORMAL, label] += 0


def rows(tallies: RequestMetrics, under_way: UnderWay, rows_max: int) -> list[dict[str, Any]]:
    """Return one row for each model, those with the most requests first. Totals are since the router began."""
    sums = {
        name: Counter[str]() for name in ("requests", "failed", "shed", "prompt", "hit", "completion", "told", "found")
    }
    counters = {each.name.removeprefix("warmroute_"): each for each in tallies.list_families()}
    for (_, model, status), (count, *_) in counters["requests"].series.items():
        sums["requests"][str(model)] += round(count)
        sums["failed"][str(model)] += round(count) if str(status)[:1] == "5" else 0
    for name, into in _SUMS:
        for labels, (count, *_) in counters[name].series.items():
            for each in into:
                sums[each][str(labels[-1])] += round(count)
    waiting = Counter[str]()
    for (_, label), requests in under_way.waiting.items():
        waiting[label] += requests
    most = sorted(sums["requests"], key=lambda model: -sums["requests"][model])[:rows_max]
    return [
        {
            "model": model,
            "requests": sums["requests"][model],
            "failed": sums["failed"][model],
            "in_flight": under_way.in_flight[model],
            "waiting": waiting[model],
            "shed": sums["shed"][model],
            "prompt_tokens": sums["prompt"][model],
            "completion_tokens": sums["completion"][model],
            "hit_tokens": sums["hit"][model],
            "verified_tokens": sums["told"][model],
            "verified_hit_tokens": sums["found"][model],
        }
        for model in most
    ]


_SUMS = (
    ("shed_requests", ("shed",)),
    ("hit_tokens", ("hit", "prompt")),
    ("miss_tokens", ("prompt",)),
    ("completion_tokens", ("completion",)),
    ("reported_prompt_tokens", ("told",)),
    ("cached_tokens", ("found",)),
)
