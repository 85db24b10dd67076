"""Metrics pushed to a collector: a real HTTP server on port 0 that decodes what it is sent as OTLP."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import ClientSession, web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from router.config.schema import MetricsSettings, SettingsError
from router.eventloop import start_task
from router.telemetry.metrics import Metrics
from router.telemetry.otlp_metrics import MetricsPush
from router.telemetry.tracing import NOISY
from tests.support.fakes import FakeEngine, listening, running, settings
from tests.telemetry.counted import metrics, record, router
from tests.telemetry.traced import ask


@dataclass
class Receiver:
    """What came."""

    statuses: deque[int] = field(default_factory=deque)  # of the next answers; 200 when there are none left
    requests: list[ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event | None = None  # what answers wait for
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        """Take one push."""
        body = await request.read()
        self.headers.append(request.headers)
        self.asked.set()
        if self.go_on is not None:
            await self.go_on.wait()
        status = self.statuses.popleft() if self.statuses else 200
        if status == 200:
            self.requests.append(ExportMetricsServiceRequest.FromString(body))
        return web.Response(status=status)

    def got(self) -> dict[str, Metric]:
        """The last word on each metric, by name."""
        scopes = [scope for each in self.requests for of in each.resource_metrics for scope in of.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """One that is well."""
    it, app = Receiver(), web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/metrics", it.take)
    runner, port = await listening(app)
    it.url = f"http://127.0.0.1:{port}"
    yield it
    if it.go_on is not None:
        it.go_on.set()
    await runner.cleanup()


@asynccontextmanager
async def pushing(of: Metrics, url: str) -> AsyncIterator[MetricsPush]:
    """A push, closed at the end."""
    push = MetricsPush(of.families, MetricsSettings(otlp_endpoint=url), service_name="gate")
    try:
        yield push
    finally:
        await push.close()


def labels(point: Any) -> dict[str, str]:
    """Attributes of a point."""
    return {pair.key: pair.value.string_value for pair in point.attributes}


async def test_a_push_is_the_page(receiver: Receiver) -> None:
    """Every family of the page that has a sample is there once, whole, with its kind, labels and numbers."""
    it = metrics(router(2))
    for n in range(150):
        it.observe(record(model=f"m{n}", duration_s=1.0, ttft_s=0.04))
    it.observe(record(model="m0", duration_s=400.0, ttft_s=0.04))
    async with pushing(it, receiver.url) as push:
        await push.push()
        got = receiver.got()
    pages = [family for family in it.registry.collect() if family.samples]
    assert got.keys() == {family.name for family in pages}
    requests = got["warmroute_requests"].sum
    assert requests.is_monotonic
    assert {labels(point)["model"]: point.as_double for point in requests.data_points}["m0"] == 2.0
    assert len([point for point in requests.data_points if point.as_double]) == 150
    (ttft,) = [point for point in got["warmroute_ttft_seconds"].histogram.data_points if labels(point)["model"] == "m0"]
    assert (ttft.count, ttft.sum, list(ttft.bucket_counts)[:3]) == (2, 0.08, [0, 2, 0])
    assert list(ttft.explicit_bounds)[:2] == [0.025, 0.05]
    assert len(ttft.bucket_counts) == len(ttft.explicit_bounds) + 1
    durations = got["warmroute_duration_seconds"].histogram.data_points
    (duration,) = [point for point in durations if labels(point)["model"] == "m0"]
    assert duration.bucket_counts[-1] == 1
    assert not duration.HasField("max")
    assert len(got["warmroute_replica_ready"].gauge.data_points) == 2
    about = {pair.key: pair.value.string_value for pair in receiver.requests[0].resource_metrics[0].resource.attributes}
    assert about["service.name"] == "gate"


async def test_the_loop_goes_on_while_metrics_are_read() -> None:
    """Many series are read in slices."""
    it = metrics(router(3))
    for n in range(40):
        it.observe(record(model=f"m{n}", ttft_s=0.1, duration_s=1.0))
    reading, turns = asyncio.create_task(it.families()), 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= sum(len(part.samples) for part in reading.result()) / 200


async def test_a_router_pushes(
    client: ClientSession, engine: FakeEngine, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its settings, with the key that the collector wants, and a last time when it ends."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=sesame")
    async with running(engine, metrics__otlp_endpoint=receiver.url, metrics__otlp_interval_s=3_600.0) as app:
        assert (await ask(client, app.url))[0] == 200
    assert receiver.headers[0]["api-key"] == "sesame"
    points = [point for point in receiver.got()["warmroute_requests"].sum.data_points if point.as_double]
    assert [(labels(point)["status"], point.as_double) for point in points] == [("200", 1.0)]


async def test_pushes_come_in_intervals(receiver: Receiver) -> None:
    """One after the other, until the task ends."""
    push = MetricsPush(metrics().families, MetricsSettings(otlp_endpoint=receiver.url), service_name="gate")
    push._interval_s = 0.0
    stop = start_task(push.watch())
    await until(receiver, lambda: len(receiver.headers) >= 3)
    await stop()
    await push.close()


async def until(receiver: Receiver, enough: Callable[[], object]) -> None:
    """Return when it is true; looked at whenever a push came."""
    async with asyncio.timeout(60):
        while not enough():
            receiver.asked.clear()
            await receiver.asked.wait()


async def test_a_collector_that_is_away(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """However many pushes fail, the log says so once, with the reason; and once when it takes them again. What was
    counted meanwhile is not lost."""
    caplog.set_level(logging.INFO)
    it = metrics()
    receiver.statuses.extend([400] * 3)
    async with pushing(it, receiver.url) as push:
        for _ in range(5):
            it.observe(record(duration_s=1.0))
            await push.push()
        await push.push()
        assert sum(point.as_double for point in receiver.got()["warmroute_requests"].sum.data_points) == 5.0
    told = [(each.event, each.fields.get("why")) for each in caplog.records if hasattr(each, "event")]
    assert told == [("metrics_collector_down", "status 400"), ("metrics_collector_up", None)]
    assert not [each for each in caplog.records if each.name.startswith(NOISY)]
    assert all(logging.getLogger(name).propagate for name in NOISY)


async def test_a_collector_that_hangs_holds_no_end_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the router waits for the last push no longer than it says, while the loop goes on."""
    monkeypatch.setattr("router.telemetry.otlp_metrics.FLUSH_S", 0.05)
    receiver.go_on = asyncio.Event()
    push = MetricsPush(metrics().families, MetricsSettings(otlp_endpoint=receiver.url), service_name="gate")
    hanging = asyncio.create_task(push.push())
    await receiver.asked.wait()
    async with asyncio.timeout(60):
        await push.close()
    assert not hanging.done()
    receiver.go_on.set()
    await hanging
    assert receiver.headers


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "http://user:sesame@c:1", "http://c:1?key=sesame"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    """A URL that cannot be one is told with its setting, and not quoted: it may have a password."""
    with pytest.raises(SettingsError) as told:
        settings(metrics__otlp_endpoint=endpoint)
    assert "'metrics.otlp_endpoint': " in str(told.value)
    assert "sesame" not in str(told.value)
