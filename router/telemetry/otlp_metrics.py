"""Metrics pushed to a collector by OTLP over HTTP. Imports OpenTelemetry if `metrics.otlp_endpoint` is set.

A push sends the page that Prometheus would scrape. The event loop reads it in slices, and a thread converts it into
OpenTelemetry's own types and sends it. A push begins when the previous one has ended, so at most one page is in memory.
A slow or absent collector delays only the next push. Counters are cumulative, so the next push makes up for a lost one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlsplit

from router import __version__
from router.config.schema import MetricsSettings
from router.telemetry.metrics.points import PointFamily, points_of
from router.telemetry.tracing import METRICS_PATH, OtelLogBridge, redact

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData

log = logging.getLogger(__name__)

FLUSH_S = 2.0  # longest wait for the last push when the router ends
FAMILIES_MAX = 64  # families of one request: encoding them holds the interpreter for a few milliseconds at most
Read: TypeAlias = Callable[[], Awaitable[list[Any]]]  # returns the families of the page, as prometheus_client has them


class MetricsPush:
    """Sends all metrics at a fixed interval."""

    def __init__(self, read: Read, settings: MetricsSettings, *, service_name: str) -> None:
        """These variables of OpenTelemetry apply too: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT,
        OTEL_RESOURCE_ATTRIBUTES."""
        self._read, self._interval_s = read, settings.otlp_interval_s
        self._sender = _Sender(settings.otlp_endpoint, service_name)

    async def watch(self) -> None:
        """Push until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.push()

    async def push(self) -> None:
        """Send the current metrics. Returns when the collector has received them, or when the push has failed."""
        parts = await self._read()
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            try:
                self._sender.send(parts)
            finally:
                with suppress(RuntimeError):  # the event loop no longer waits
                    loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="push metrics", daemon=True).start()
        await sent.wait()

    async def close(self) -> None:
        """Push the counts since the last push; after FLUSH_S they are lost."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self.push()
        finally:
            self._sender.shutdown()


class _Sender(OtelLogBridge):
    """OpenTelemetry's exporter, used by one thread at a time."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        super().__init__()
        parts = urlsplit(endpoint)
        path = parts.path if parts.path.strip("/") else METRICS_PATH
        self._collector = parts.netloc
        instance = secrets.token_hex(16)
        about = {"service.name": service_name, "service.version": __version__, "service.instance.id": instance}
        self._resource = Resource.create(about)
        self._scope = InstrumentationScope("warmroute", __version__)
        self._begun_ns = time.time_ns()
        self._failing, self._shut = False, False
        self._turn = threading.Lock()  # the last push may begin while an earlier one still hangs
        self._exporter = OTLPMetricExporter(f"{parts.scheme}://{parts.netloc}{path}")

    def send(self, parts: list[Any]) -> None:
        """Send one page, in as many requests as it needs."""
        with self._turn:
            families = (family for family in points_of(parts) if family.numbers or family.distributions)
            while some := list(islice(families, FAMILIES_MAX)):
                if self._shut or not self._try_send(some):
                    return

    def _try_send(self, families: list[PointFamily]) -> bool:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        try:
            fine = self._exporter.export(self._data(families)) is MetricExportResult.SUCCESS
        except Exception as error:  # the exporter should never raise
            self.why, fine = redact(error), False
        if fine is self._failing and not self._shut:
            self._failing = not fine
            if self._failing:
                fields = {"collector": self._collector, "why": self.why or "unknown"}
                log.warning(
                    "the collector accepts no metrics", extra={"event": "metrics_collector_down", "fields": fields}
                )
            else:
                log.info(
                    "the collector accepts metrics again",
                    extra={"event": "metrics_collector_up", "fields": {"collector": self._collector}},
                )
        return fine

    def _data(self, families: list[PointFamily]) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

        metrics = list(self._metrics(families))
        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])

    def _metrics(self, families: list[PointFamily]) -> Iterator[Metric]:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Gauge,
            Histogram,
            HistogramDataPoint,
            Metric,
            NumberDataPoint,
            Sum,
        )

        begun_ns, now_ns, cumulative = self._begun_ns, time.time_ns(), AggregationTemporality.CUMULATIVE
        for family in families:
            numbers = [NumberDataPoint(labels, begun_ns, now_ns, value) for labels, value in family.numbers]
            data: Sum | Gauge | Histogram
            if family.kind == "histogram":
                unknown = cast("float", None)  # the least and the greatest value: omitted from the request
                histograms = [
                    HistogramDataPoint(
                        each.labels,
                        begun_ns,
                        now_ns,
                        sum(each.counts),
                        each.total,
                        each.counts,
                        each.bounds,
                        unknown,
                        unknown,
                    )
                    for each in family.distributions
                ]
                data = Histogram(histograms, cumulative)
            elif family.kind == "counter":
                data = Sum(numbers, cumulative, is_monotonic=True)
            else:
                data = Gauge(numbers)
            yield Metric(family.name, family.text, "", data)

    def shutdown(self) -> None:
        """Stop sending, cut short the wait before another try, and restore the libraries' loggers."""
        self._shut = True
        self._exporter.shutdown()
        self.let_go()
