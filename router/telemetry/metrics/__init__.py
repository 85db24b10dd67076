"""The metrics page for Prometheus; the only importer of prometheus_client.

Counts are plain numbers (counters.py), which become families at a scrape. Levels are read at a scrape (gauges.py). A
page of many series is written in slices, between which the event loop serves requests. A scraper that requests
OpenMetrics receives it, with exemplars: trace ids next to the times that were counted for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder
from prometheus_client.registry import Collector

from router.core.placement.router import Router
from router.telemetry.counters import RequestMetrics
from router.telemetry.engine_hit_rate import EngineHitRate
from router.telemetry.metrics import per_model
from router.telemetry.metrics.families import families
from router.telemetry.metrics.former import WithFormerNames, with_former_names
from router.telemetry.metrics.gauges import Events, Gauges, Links, Replicas, Sources, States
from router.telemetry.metrics.per_tenant import TenantsUnderWay
from router.telemetry.metrics.request_groups import make_group_families
from router.telemetry.metrics.samples import MetricSources
from router.telemetry.request_record import RequestRecord
from router.telemetry.series import Counter, Histogram

__all__ = ["CONTENT_TYPE", "MetricSources", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
OPENMETRICS = "application/openmetrics-text"
EOF = b"# EOF\n"  # the end of an OpenMetrics page
Encode: TypeAlias = Callable[[Collector], bytes]
SLICE_SAMPLES = 100  # samples written without a break: about half a millisecond
SLICE_LINES = SLICE_SAMPLES + 2  # a family also has HELP and TYPE lines


class Metrics:
    """All metrics of one router. There are no globals, so that several routers can live in one process."""

    def __init__(
        self,
        router: Router,
        clock: Callable[[], float],
        figures: MetricSources | None = None,
        *,
        process: bool = False,
        splits: bool = False,
        former_names: bool = False,
    ) -> None:
        """Options:

        - `process`: the page ends with the kernel's figures of this process, which are in no registry.
        - `splits`: two replicas may serve one request.
        - `former_names`: the page also has renamed metrics under their former names (metrics/former.py).

        The attribute `requests` has the counts of requests, replicas and reloads.
        """
        figures = figures or MetricSources()
        self._router, self._figures, self._clock, self._engine_count = router, figures, clock, EngineHitRate()
        self.requests = self._tallies = RequestMetrics(router.fleet.prefill_model, router.policy.name)
        self._tallies.splits = splits
        self._former_names = former_names
        read: tuple[Collector, ...] = (
            Gauges(router.fleet, router.index, router.knowledge, router.fitness, self._tallies, figures),
            Replicas(router.fleet, router.index, clock, figures),
            Sources(figures),
            Links(figures),
            States(figures),
            Events(router.fleet, router.knowledge, figures),
        )
        self._read = tuple(WithFormerNames(each) for each in read) if former_names else read
        self._process = ProcessCollector(registry=None) if process else None
        self.registry = CollectorRegistry()
        for collector in (_Counted(self._collect_tallies), *self._read, _Counted(self._collect_groups)):
            self.registry.register(collector)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self._tallies.observe(record)

    def check(self) -> None:
        """Read the engines' own cache counters; call it about every second."""
        tallies = self._tallies
        self._engine_count.settle(
            self._router.members, tallies.verified_tokens, tallies.unverified_tokens, self._clock()
        )

    def sum_engine_counts(self) -> tuple[float, float]:
        """Return prompt tokens of answers without a cached-token count, and how many of them were cached by the
        engines' own counters."""
        sums = self._engine_count.sums.values()
        return sum(prompt for prompt, _ in sums), sum(cached for _, cached in sums)

    def models(self, rows_max: int) -> list[dict[str, Any]]:
        """Return totals of the requests of each model (metrics/per_model.py)."""
        return per_model.rows(
            self._tallies, per_model.UnderWay(self._router.fleet, self._tallies, self._figures), rows_max
        )

    def tenants(self) -> dict[str, tuple[int, int]]:
        """Return the requests in flight and waiting of each tenant, by its label."""
        under_way = TenantsUnderWay(self._tallies, self._figures)
        return {label: (n, under_way.waiting[label]) for label, n in under_way.in_flight.items()}

    def page(self) -> bytes:
        """Return the whole page in Prometheus's text format, written without a break."""
        return b"".join(self._slices())

    async def page_in_slices(self) -> bytes:
        """Return the same page, written a slice at a time, so that requests are served in between. No series is
        split."""
        return (await self.page_for(""))[1]

    async def page_for(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the page for this `Accept` header, written in slices: OpenMetrics if requested,
        otherwise Prometheus's text format."""
        encode, content_type = choose_encoder(accept)
        if not content_type.startswith(OPENMETRICS):
            return CONTENT_TYPE, await self._join_slices(self._slices())
        return content_type, await self._join_slices(self._slices(_strip_eof(encode))) + EOF

    async def _join_slices(self, texts: Iterator[bytes]) -> bytes:
        slices, lines = [], 0
        for text in texts:
            more = text.count(b"\n")
            if lines + more > SLICE_LINES:  # small families share a slice, because a turn takes long if CPU is scarce
                await asyncio.sleep(0)
                lines = 0
            slices.append(text)
            lines += more
        await asyncio.sleep(0)
        return b"".join(slices)

    def _collect_tallies(self) -> list[Counter | Histogram]:
        self._tallies.serve(self._router.models.expected.declared, sorted(self._router.fleet.model_names()))
        self._tallies.set_engine_counts(self._engine_count.sums)
        ledger = self._figures.ledger()
        if ledger is not None:
            self._tallies.import_ledger(ledger)
        own = self._tallies.list_families()
        return list(with_former_names(own)) if self._former_names else own

    def _collect_groups(self) -> list[Counter | Histogram]:
        ledger = self._figures.ledger()
        return make_group_families(ledger.groups.all if ledger is not None else {})

    def _slices(self, encode: Encode = generate_latest) -> Iterator[bytes]:
        yield from _encode_families(self._collect_tallies(), encode)
        for collector in self._read:
            for family in collector.collect():
                yield encode(_SingleFamilyCollector(family))
        yield from _encode_families(self._collect_groups(), encode)
        if self._process is not None:
            yield encode(self._process)


def _strip_eof(encode: Encode) -> Encode:
    """Wrap the encoder for a part of a page: its output has no OpenMetrics end mark."""
    return lambda collector: encode(collector).removesuffix(EOF)


def _encode_families(tallies: Iterable[Counter | Histogram], encode: Encode) -> Iterator[bytes]:
    for tally in tallies:
        for number, family in enumerate(families(tally, SLICE_SAMPLES)):
            text = encode(_SingleFamilyCollector(family))
            yield text.split(b"\n", 2)[2] if number else text  # HELP and TYPE only once per family


class _SingleFamilyCollector(Collector):
    """Registry of one family, for `generate_latest`."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Return the family."""
        return (self._family,)


class _Counted(Collector):
    """Collector of tallies."""

    def __init__(self, tallies: Callable[[], Iterable[Counter | Histogram]]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterable[Metric]:
        """Yield one whole family after another."""
        for tally in self._tallies():
            yield from families(tally, 1 << 62)
