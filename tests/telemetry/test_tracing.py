"""Traces from end to end: what clients say and replicas hear, and what a real collector is sent."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from aiohttp import ClientSession, web
from multidict import CIMultiDict

from router.settings.schema import SettingsError
from router.telemetry import logs
from router.telemetry.trace_context import parse
from tests.http.wire import connect, post
from tests.support.fakes import (
    FakeEngine,
    breaks_midway,
    half_then_waits,
    idle,
    mute,
    ok,
    reset,
    running,
    settings,
    status,
)
from tests.support.keyring import Keyring
from tests.telemetry.collector import Collector, Got

CHAT = "/v1/chat/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent at once, and not after five seconds."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """One that is well."""
    async with Collector() as it:
        yield it


def traced(collector: Collector, ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """Settings."""
    return {"tracing__endpoint": collector.url, "tracing__sample_ratio": ratio, **more}


def body(**more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": "a word " * 50}], **more}


async def ask(client: ClientSession, url: str, headers: Any = None, **more: Any) -> tuple[int, bytes]:
    """Status and body of the answer."""
    async with client.post(url + CHAT, json=body(**more), headers=headers) as response:
        return response.status, await response.read()


def check_nested(spans: list[Got]) -> Got:
    """Every span lies within its parent in time, all but the first have one among them; returns the first."""
    by_id = {got.id: got for got in spans}
    assert len(by_id) == len(spans)
    roots = [got for got in spans if got.parent not in by_id]
    assert len(roots) == 1, [got.name for got in roots]
    for got in spans:
        assert got.span.start_time_unix_nano <= got.span.end_time_unix_nano, got.name
        if got.parent in by_id:
            outer = by_id[got.parent].span
            assert outer.start_time_unix_nano <= got.span.start_time_unix_nano, got.name
            assert got.span.end_time_unix_nano <= outer.end_time_unix_nano, got.name
        for event in got.span.events:
            assert got.span.start_time_unix_nano <= event.time_unix_nano <= got.span.end_time_unix_nano
    return roots[0]


# -- spans -----------------------------------------------------------------------------------------------------------


async def test_a_stream(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """A streamed request is one trace: parse, match and place, the call with its first byte and first token, and the
    stream; attributes are those of the conventions and of the receipt."""
    async with running(engine, **traced(collector)) as app:
        began_ns = time.time_ns()
        async with client.post(app.url + CHAT, json=body(stream=True, stream_options={"include_usage": True})) as r:
            await r.read()
            receipt = r.headers
        spans = await collector.trace()
    root = check_nested(spans)
    assert [got.name for got in spans] == [f"POST {CHAT}", "parse", "match and place", "POST", "stream"]
    assert root.parent == ""
    assert abs(root.span.start_time_unix_nano - began_ns) < 10e9
    assert root.span.kind == root.span.SPAN_KIND_SERVER
    assert not any(got.failed for got in spans)
    expected = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": CHAT,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "warmroute.request_id": receipt["x-warmroute-request-id"],
        "warmroute.replica": engine.url,
        "warmroute.reason": receipt["x-warmroute-reason"],
        "warmroute.grade": receipt["x-warmroute-grade"],
        "warmroute.predicted_cached_tokens": 0,
        "warmroute.ending": "ok",
        "warmroute.retries": 0,
    }
    assert expected.items() <= root.about.items()
    assert root.about["warmroute.prompt_tokens"] > 10
    call, stream = spans[3], spans[4]
    assert call.span.kind == call.span.SPAN_KIND_CLIENT
    assert call.events == ["first byte", "first token"]
    assert call.about["server.port"] == engine.port
    assert call.about["url.full"] == engine.url + CHAT
    assert call.about["http.response.status_code"] == 200
    assert stream.parent == call.id
    assert stream.about["warmroute.events"] == 6
    assert root.resource["service.name"] == "warmroute"


async def test_an_answer_at_once(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """What does not stream has no stream, and its call ends when all of it is here."""
    async with running(engine, **traced(collector, tracing__service_name="gate")) as app:
        assert (await ask(client, app.url))[0] == 200
        spans = await collector.trace()
    check_nested(spans)
    assert [got.name for got in spans] == [f"POST {CHAT}", "parse", "match and place", "POST"]
    assert spans[3].events == []
    assert spans[0].resource["service.name"] == "gate"


async def test_a_retry(client: ClientSession, engine: FakeEngine, other: FakeEngine, collector: Collector) -> None:
    """Each attempt is a call of its own, to its own replica, which hears of its own span; the first says why it failed.
    What was made good is no error of the request."""
    failures = [reset]

    async def first_fails(replica: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await (failures.pop() if failures else ok)(replica, request)

    engine.script.append(first_fails)
    other.script.append(first_fails)
    async with running(engine, other, **traced(collector)) as app:
        assert (await ask(client, app.url, stream=True))[0] == 200
        spans = await collector.trace()
    root = check_nested(spans)
    names = ["parse", "match and place", "POST", "match and place", "POST", "stream"]
    assert [got.name for got in spans] == [f"POST {CHAT}", *names]
    assert [got.name for got in spans if got.failed] == ["POST"]
    first, second = (got for got in spans if got.name == "POST")
    assert first.about["error.type"] == "broke_early"
    assert "http.request.resend_count" not in first.about
    assert second.about["http.request.resend_count"] == root.about["warmroute.retries"] == 1
    assert {first.about["warmroute.replica"], second.about["warmroute.replica"]} == {engine.url, other.url}
    for call in (first, second):
        (seen,) = (engine if call.about["warmroute.replica"] == engine.url else other).seen
        assert seen.headers.getall("traceparent") == [f"00-{root.trace}-{call.id}-01"]
    assert spans[-1].parent == second.id


async def test_all_attempts_fail(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, collector: Collector
) -> None:
    """Where no attempt could make it good, all calls and the request are errors."""
    engine.script.append(reset)
    other.script.append(status(429, headers={"Retry-After": "7"}))
    async with running(engine, other, **traced(collector)) as app:
        code, _ = await ask(client, app.url)
        spans = await collector.trace()
    root = check_nested(spans)
    calls = {got.about["error.type"]: got for got in spans if got.name == "POST"}
    assert calls.keys() == {"broke_early", "shed"}
    assert calls["shed"].about["http.response.status_code"] == 429
    assert all(call.failed for call in calls.values())
    assert root.failed is (code >= 500)


@pytest.mark.parametrize(
    ("reply", "stream", "code", "kind"),
    [
        (status(500, '{"error": "a word"}'), False, 500, "500"),
        (status(503), False, 503, "engine"),
        (breaks_midway, True, 200, "broke_midway"),
    ],
)
async def test_errors(
    client: ClientSession, engine: FakeEngine, collector: Collector, reply: Any, stream: bool, code: int, kind: str
) -> None:
    """A failing engine and a stream that breaks off set the status of the request and of the call, by kind."""
    engine.script.append(reply)
    async with running(engine, **traced(collector, upstream__retries_max=0)) as app:
        assert (await ask(client, app.url, stream=stream))[0] == code
        spans = await collector.trace()
    root, call = check_nested(spans), next(got for got in spans if got.name == "POST")
    assert root.failed
    assert call.failed
    assert root.about["error.type"] == call.about["error.type"] == kind
    assert all(got.failed for got in spans if got.name == "stream")


async def test_what_the_client_did_wrong_is_no_error(
    client: ClientSession, engine: FakeEngine, collector: Collector
) -> None:
    """A 4xx leaves the request's status unset, as conventions want it; parsing is as far as it came."""
    async with running(engine, **traced(collector)) as app:
        async with client.post(app.url + CHAT, data=b"{") as response:
            assert response.status == 400
        spans = await collector.trace()
    root = check_nested(spans)
    assert [got.name for got in spans] == [f"POST {CHAT}", "parse"]
    assert root.about["http.response.status_code"] == 400
    assert not root.failed


async def test_nobody_is_there(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """Without a replica to place it on, a request's trace ends there, as an error."""
    engine.healthy = False
    async with running(engine, **traced(collector)) as app:
        assert (await ask(client, app.url))[0] == 503
        root = check_nested(await collector.trace())
    assert root.failed
    assert root.about["error.type"] == "no_replica_ready"


@pytest.mark.parametrize("reply", [half_then_waits, mute])
async def test_a_client_that_leaves(engine: FakeEngine, collector: Collector, reply: Any) -> None:
    """The trace ends when its client leaves, before the answer or within it, and blames nobody."""
    engine.script.append(reply)
    async with running(engine, **traced(collector)) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, json.dumps(body(stream=True)).encode()))
        await engine.at_work.wait()
        if reply is half_then_waits:
            await client.until(lambda: bool(client.answers))
        client.transport.abort()
        spans = await collector.trace()
        while not idle(app):
            await asyncio.sleep(0)
        engine.go_on.set()
    root = check_nested(spans)
    assert root.about["warmroute.ending"] == "client_left"
    assert root.about["http.response.status_code"] == 499
    assert not any(got.failed for got in spans)
    assert ("stream" in [got.name for got in spans]) is (reply is half_then_waits)


async def test_waiting_for_a_place(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """Who waited has a span for it within the placing, as long as the log line says."""
    engine.script.append(mute)
    limits = {"admission__in_flight_max": 1}
    async with running(engine, **traced(collector, **limits)) as app:
        first = asyncio.create_task(ask(client, app.url))
        await engine.at_work.wait()
        second = asyncio.create_task(ask(client, app.url))
        while not sum(app.hub.admission.queued()[0].values()):
            await asyncio.sleep(0.001)
        engine.go_on.set()
        await asyncio.gather(first, second)
        await collector.until(lambda: len(collector.named(f"POST {CHAT}")) == 2)
    (queue,) = collector.named("queue")
    spans = [got for got in collector.spans if got.trace == queue.trace]
    root = check_nested(spans)
    took_s = (queue.span.end_time_unix_nano - queue.span.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(root.about["warmroute.queued_seconds"], abs=1e-3)


async def test_what_is_nobodys_request_has_no_trace(
    client: ClientSession, engine: FakeEngine, collector: Collector
) -> None:
    """The router's own pages, and what leads nowhere, make no spans: a load balancer asks every second."""
    async with running(engine, **traced(collector)) as app:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/nowhere"):
            await (await client.get(app.url + path, headers={"traceparent": SAMPLED})).read()
        await ask(client, app.url)
        await collector.trace()
    assert {got.about.get("http.route", CHAT) for got in collector.spans} == {CHAT}


# -- context ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_samples(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """The client's trace goes on whatever the ratio: its span is our parent, ours the engine's, and `tracestate` and
    `baggage` go through."""
    headers = {"traceparent": SAMPLED, "tracestate": "a=1,b@c=2", "baggage": "user=7"}
    async with running(engine, **traced(collector, 0.0)) as app:
        await ask(client, app.url, headers, stream=True)
        spans = await collector.trace()
    root = check_nested(spans)
    assert (root.trace, root.parent) == (TRACE, SPAN)
    assert root.span.trace_state == "a=1,b@c=2"
    call = next(got for got in spans if got.name == "POST")
    seen = engine.seen[0].headers
    assert seen.getall("traceparent") == [f"00-{TRACE}-{call.id}-01"]
    assert seen.getall("tracestate") == ["a=1,b@c=2"]
    assert seen["baggage"] == "user=7"


async def test_a_client_that_does_not(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """An unsampled parent means no spans, at a ratio of 1 too, and reaches the engine as it came."""
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url, {"traceparent": UNSAMPLED, "tracestate": "a=1"})
        await ask(client, app.url)
        await collector.trace()
    assert TRACE not in {got.trace for got in collector.spans}
    assert engine.seen[0].headers["traceparent"] == UNSAMPLED
    assert engine.seen[0].headers["tracestate"] == "a=1"


async def test_who_is_not_chosen_is_told_so(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """Where the ratio leaves a request out, the engine hears that it is not sampled, and does not begin a trace."""
    async with running(engine, **traced(collector, 0.0)) as app:
        for _ in range(5):
            await ask(client, app.url)
    parents = [parse(seen.headers["traceparent"].encode()) for seen in engine.seen]
    assert [parent is not None and parent.sampled for parent in parents] == [False] * 5
    assert len({parent.trace_id for parent in parents if parent is not None}) == 5
    assert collector.spans == []


async def test_the_ratio_is_kept(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """Of requests without a parent about that part is traced, and those whose replica was told so."""
    async with running(engine, **traced(collector, 0.5)) as app:
        for _ in range(100):
            await ask(client, app.url)
    told = [parse(seen.headers["traceparent"].encode()) for seen in engine.seen]
    sampled = {f"{parent.trace_id:032x}" for parent in told if parent is not None and parent.sampled}
    assert 20 < len(sampled) < 80
    assert {got.trace for got in collector.spans} == sampled


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", f"00-{'0' * 32}-{SPAN}-01")],
        [("traceparent", "nonsense")],
        [("traceparent", SAMPLED), ("traceparent", SAMPLED)],
        [("traceparent", SAMPLED + "-x")],
        [],
    ],
)
async def test_a_context_that_is_none(
    client: ClientSession, engine: FakeEngine, collector: Collector, headers: list[tuple[str, str]]
) -> None:
    """Instead of a `traceparent` that is wrong, missing or there twice a new trace begins, and the `tracestate` that
    came with it is dropped."""
    given = CIMultiDict([*headers, ("tracestate", "a=1")])
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url, given)
        root = check_nested(await collector.trace())
    assert root.trace != TRACE
    assert root.parent == ""
    seen = engine.seen[0].headers
    assert [each[3:35] for each in seen.getall("traceparent")] == [root.trace]
    assert "tracestate" not in seen


async def test_a_long_state_is_left_out(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """A `tracestate` beyond 4 KiB goes nowhere; the trace goes on."""
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url, {"traceparent": SAMPLED, "tracestate": "a=" + "x" * 5_000})
        spans = await collector.trace()
    assert spans[0].trace == TRACE
    assert spans[0].span.trace_state == ""
    assert "tracestate" not in engine.seen[0].headers


@pytest.mark.parametrize("given", [SAMPLED, UNSAMPLED, "nonsense", ""])
async def test_without_tracing_headers_pass(client: ClientSession, engine: FakeEngine, given: str) -> None:
    """Without an endpoint the router is no part of a trace: right, wrong or absent, the engine gets what the client
    sent."""
    headers = {"traceparent": given, "tracestate": "a=1", "baggage": "b=2"} if given else {}
    async with running(engine) as app:
        await ask(client, app.url, headers)
    seen = engine.seen[0].headers
    assert {name: seen.get(name) for name in ("traceparent", "tracestate", "baggage")} == {
        "traceparent": headers.get("traceparent"),
        "tracestate": headers.get("tracestate"),
        "baggage": headers.get("baggage"),
    }


# -- what is told ----------------------------------------------------------------------------------------------------


async def test_logs_and_traces_meet(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a sampled request has its trace's id; others have none."""
    told: list[Any] = []
    monkeypatch.setattr(logs, "log_requests", told.extend)
    async with running(engine, **traced(collector, 0.0)) as app:
        await ask(client, app.url, {"traceparent": SAMPLED})
        await ask(client, app.url)
        await ask(client, app.url, {"traceparent": UNSAMPLED})
    assert [record.trace_id for record in told] == [TRACE, "", ""]


async def test_a_tenant_is_named_if_proved(
    client: ClientSession, engine: FakeEngine, collector: Collector, tmp_path: Any
) -> None:
    """A trace names the tenant of a key, and not a name that a client gives itself."""
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url, {"x-warmroute-tenant": "acme"})
        root = (await collector.trace())[0]
    assert "acme" not in str(root.span)
    ring = Keyring(tmp_path, acme={})
    async with running(engine, **traced(collector), **ring.settings) as app:
        await ask(client, app.url, ring.of("acme"))
        root = (await collector.trace(2))[0]
    assert root.about["warmroute.tenant"] == "acme"


async def test_ids_of_stored_responses_are_not_told(
    client: ClientSession, engine: FakeEngine, collector: Collector
) -> None:
    """Who knows the id of a stored response may be able to read it: traces have its route alone."""
    async with running(engine, **traced(collector)) as app:
        async with client.get(app.url + "/v1/responses/resp_canary?include=canary") as response:
            await response.read()
        await collector.until(lambda: collector.spans)
    assert collector.named("GET /v1/responses/{id}")
    assert b"canary" not in b"".join(collector.bodies)


# -- the collector ---------------------------------------------------------------------------------------------------


def dropped(page: str) -> int:
    """What the metrics say."""
    return int(float(page.split("\nwarmroute_spans_dropped_total ")[1].split("\n")[0]))


async def test_the_collectors_own_headers(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that wants a key gets it from OpenTelemetry's own variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=sesame")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=gate-0")
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url)
        root = (await collector.trace())[0]
    assert collector.headers[0]["api-key"] == "sesame"
    assert root.resource["k8s.pod.name"] == "gate-0"


async def test_a_key_that_is_none(
    client: ClientSession,
    engine: FakeEngine,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A collector's key that cannot be sent is not shown in the log either, which says that something is wrong."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "sesame,api-key=open%0Asesame")
    with caplog.at_level(logging.DEBUG):
        async with running(engine, **traced(collector)) as app:
            await ask(client, app.url)
    told = [(r.getMessage(), getattr(r, "fields", {})) for r in caplog.records if r.name == "router.telemetry.tracing"]
    assert [message for message, _ in told] == ["OpenTelemetry warns", "the collector takes no spans"]
    assert told[1][1]["why"] == "InvalidHeader"
    assert "sesame" not in caplog.text + str(told)


async def test_what_waits_is_sent_at_the_end(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that wait when the router ends are sent before it has."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url)
    assert len(collector.named(f"POST {CHAT}")) == 1


async def test_a_collector_that_is_away(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the collector refuses, requests go on, what it did not take is counted, and the log says so once when it
    begins and once when it is over, whatever the libraries below say."""
    said: list[logging.LogRecord] = []
    collecting = logging.Handler()
    monkeypatch.setattr(collecting, "emit", said.append)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, collecting])
    monkeypatch.setattr(root, "level", logging.DEBUG)
    collector.statuses.extend([400] * 3)
    async with running(engine, **traced(collector)) as app:
        for n in range(3):
            assert (await ask(client, app.url))[0] == 200
            await collector.until(partial(collector.asked, n + 1))
        assert (await ask(client, app.url))[0] == 200
        await collector.trace()
        while not [r for r in said if r.getMessage().endswith("again")]:
            await asyncio.sleep(0.001)
        page = await (await client.get(app.url + "/metrics")).text()
    assert dropped(page) == 3 * 4
    about = [r for r in said if r.name.startswith(("router.telemetry.tracing", "opentelemetry", "urllib3"))]
    assert [r.getMessage() for r in about] == ["the collector takes no spans", "the collector takes spans again"]
    fields = about[0].fields
    assert fields["collector"] == collector.url.removeprefix("http://")
    assert fields["why"] == "status 400"


async def test_a_full_queue(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """While the collector answers nothing, whole traces are dropped for which there is no room, and counted; requests
    do not wait for it, and the end waits two seconds at most."""
    collector.holding = True
    async with running(engine, **traced(collector, tracing__queue_spans_max=10)) as app:
        for _ in range(20):
            assert (await ask(client, app.url))[0] == 200
        page = await (await client.get(app.url + "/metrics")).text()
        began_s = time.monotonic()
    took_s = time.monotonic() - began_s
    assert dropped(page) >= (20 - 1 - 5) * 4
    assert dropped(page) % 4 == 0
    assert took_s < 30, "of which the collector may have two; the rest is a slow machine"


async def test_nobody_listens(client: ClientSession, engine: FakeEngine) -> None:
    """A collector that was never there costs no request, and the end no more than its two seconds."""
    gone = Collector()
    async with gone:
        pass
    async with running(engine, **traced(gone)) as app:
        assert [(await ask(client, app.url))[0] for _ in range(5)] == [200] * 5
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 30
    async with asyncio.timeout(60):
        while app.edge.spans_dropped() != 5 * 4:  # the thread is told to give up, and nobody waits for it
            await asyncio.sleep(0.001)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://a b/",
        "http://collector:0",
        "http://user:sesame@collector:4318",
        "http://collector:4318/v1/traces?key=sesame",
        "http://collector:4318/#sesame",
        "http://[collector/sesame",
    ],
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    """What is no URL of a collector, or has a password in it, is refused by name and never shown."""
    with pytest.raises(SettingsError) as caught:
        settings(tracing__endpoint=endpoint)
    (problem,) = caught.value.problems
    assert problem.startswith("'tracing.endpoint'")
    assert "sesame" not in problem


def test_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry the settings are refused, with the command that installs it; without tracing they are
    fine."""

    def nowhere(_: str) -> None:
        raise ModuleNotFoundError

    monkeypatch.setattr("router.telemetry.tracing.find_spec", nowhere)
    with pytest.raises(SettingsError, match=r"pip install '\.\[tracing\]'"):
        settings(tracing__endpoint="http://collector:4318")
    settings()
