"""The page of metrics as OpenMetrics, with ids of traces beside times that were counted of sampled requests."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from prometheus_client.samples import Sample

from router.telemetry.metrics import CONTENT_TYPE, EOF
from tests.support.fakes import FakeEngine, running
from tests.telemetry.collector import Collector
from tests.telemetry.counted import metrics, record, router
from tests.telemetry.traced import CHAT, ask, traced

TYPE = "application/openmetrics-text; version=1.0.0"
# What Prometheus 3 sends.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TRACES = [f"{n:032x}" for n in range(1, 4)]


def examples(page: bytes) -> list[tuple[str, str, str]]:
    """Name of the sample, bucket and trace of every exemplar on the page."""
    samples = [sample for family in openmetrics(page.decode()) for sample in family.samples if sample.exemplar]
    return [(each.name, each.labels["le"], each.exemplar.labels["trace_id"]) for each in samples if each.exemplar]


async def test_both_formats_tell_the_same() -> None:
    """A strict parser reads the page of OpenMetrics, which ends once, and finds every sample of the other."""
    it = metrics(router(3))
    for n in range(40):
        it.observe(record(model=f"m{n}", ttft_s=0.1, duration_s=1.0, events=3))
    content_type, page = await it.page_for(ACCEPT)
    assert content_type.startswith(TYPE)
    assert page.endswith(EOF)
    assert page.count(EOF) == 1

    def told(samples: list[Sample]) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
        return {(each.name, tuple(sorted(each.labels.items())), each.value) for each in samples}

    one = told([sample for family in openmetrics(page.decode()) for sample in family.samples])
    assert one == told([sample for family in plain(it.page().decode()) for sample in family.samples])


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain;version=0.0.4", "application/openmetrics-text;version=0.0.1"]
)
async def test_others_get_the_text_format(accept: str) -> None:
    """Who does not ask for a version of OpenMetrics that is served gets the page as it always was."""
    it = metrics()
    assert await it.page_for(accept) == (CONTENT_TYPE, it.page())


async def test_exemplars_are_of_sampled_requests() -> None:
    """Each bucket names the last sampled request that fell into it; a request without a trace is nobody's example, and
    the text format has none."""
    it = metrics()
    for trace_id, ttft_s in zip(["", *TRACES, ""], (0.04, 0.04, 0.04, 7.0, 7.0), strict=True):
        it.observe(record(trace_id=trace_id, at_s=1_000.0, ttft_s=ttft_s, duration_s=400.0))
    _, page = await it.page_for(TYPE)
    assert examples(page) == [
        ("warmroute_ttft_seconds_bucket", "0.05", TRACES[1]),
        ("warmroute_ttft_seconds_bucket", "7.5", TRACES[2]),
        ("warmroute_duration_seconds_bucket", "+Inf", TRACES[2]),
    ]
    assert f'# {{trace_id="{TRACES[1]}"}} 0.04 1400.0\n'.encode() in page
    assert b"trace_id" not in it.page()


async def test_a_slow_bucket_leads_to_a_trace(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """Both listeners answer in OpenMetrics where it is asked for, with the id of a trace that the collector has."""
    async with running(engine, **traced(collector)) as app:
        assert (await ask(client, app.url, stream=True))[0] == 200
        root = (await collector.trace())[0]
        for url in (app.url, app.admin_url):
            async with client.get(url + "/metrics", headers={"Accept": ACCEPT}) as response:
                assert response.headers["Content-Type"].startswith(TYPE)
                found = examples(await response.read())
            assert [(name, trace) for name, _, trace in found] == [
                ("warmroute_ttft_seconds_bucket", root.trace),
                ("warmroute_duration_seconds_bucket", root.trace),
            ]
            async with client.get(url + "/metrics", headers={"Accept": "*/*" + ", */*" * 1_000}) as response:
                assert response.headers["Content-Type"] == CONTENT_TYPE
        assert root.about["http.route"] == CHAT
