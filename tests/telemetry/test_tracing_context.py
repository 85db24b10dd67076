"""Whose trace a request joins, what tracing says of clients, and how spans reach the collector."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pytest
from aiohttp import ClientSession, web
from multidict import CIMultiDict

from loadtest.common.answers import DONE, data_event
from router.config.schema import SettingsError
from router.telemetry import logs
from router.telemetry.process_totals import SPANS_DROPPED
from router.telemetry.trace_context import parse
from tests.support.fakes import (
    FakeEngine,
    running,
    settings,
    stream,
)
from tests.support.keyring import Keyring
from tests.telemetry.collector import Collector
from tests.telemetry.traced import CHAT, ask, body, check_nested, traced

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


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


@pytest.mark.promise("An invalid trace header fails no request and reaches no engine.", "records")
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


@pytest.mark.promise("An invalid trace header fails no request and reaches no engine.", "records")
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


@pytest.mark.promise("Spans hold no ids of stored responses and no names that a client gives itself.", "records")
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


@pytest.mark.promise("Spans hold no ids of stored responses and no names that a client gives itself.", "records")
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


@pytest.mark.promise("Spans hold no ids of stored responses and no names that a client gives itself.", "records")
@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        ("/v1/chat/completions", {}, True),
        ("/v1/chat/completions", {"stream": True}, True),
        ("/v1/chat/completions", {"store": True}, False),
        ("/v1/responses", {"input": "a word", "stream": True}, False),
        ("/v1/responses", {"input": "a word", "store": False}, False),
        ("/v1/messages", {"max_tokens": 9, "stream": True}, True),
    ],
)
async def test_ids_of_answers_are_told_where_none_is_stored(
    client: ClientSession, engine: FakeEngine, collector: Collector, path: str, more: dict[str, Any], told: bool
) -> None:
    """Model and reasons to finish are told of every answer, its id only where nobody can fetch the answer by it."""
    answer = {"id": "canary-1", "model": "m", "choices": [{"index": 0, "finish_reason": "stop"}]}
    reasons = {"/v1/messages": ["end_turn"], "/v1/responses": ["completed"]}.get(path, ["stop"])
    if path == "/v1/chat/completions":
        pieces = [data_event(answer), DONE]
        engine.script.append(lambda _, request: stream(request, pieces) if more.get("stream") else said(answer))
    async with running(engine, **traced(collector)) as app:
        async with client.post(app.url + path, json={**body(), **more}) as response:
            assert response.status == 200
            await response.read()
        await collector.until(lambda: collector.named(f"POST {path}"))
    about = collector.named(f"POST {path}")[0].about
    assert about["gen_ai.response.model"] == "m"
    assert [each.string_value for each in about["gen_ai.response.finish_reasons"].values] == reasons
    assert ("gen_ai.response.id" in about) is told
    assert path != "/v1/chat/completions" or (b"canary-1" in b"".join(collector.bodies)) is told


async def said(answer: dict[str, Any]) -> web.Response:
    """An answer, whole."""
    return web.json_response(answer)


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


@pytest.mark.promise("A collector's credentials are in no log line and no complaint about settings.", "records")
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
    assert [message for message, _ in told] == ["OpenTelemetry warns", "the collector accepts no spans"]
    assert told[1][1]["why"] == "invalid header"
    assert "sesame" not in caplog.text + str(told)


async def test_what_waits_is_sent_at_the_end(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans that wait when the router ends are sent before it has."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    async with running(engine, **traced(collector)) as app:
        await ask(client, app.url)
    assert len(collector.named(f"POST {CHAT}")) == 1


@pytest.mark.promise(
    "A slow or absent collector costs no request, bounded memory, and two seconds at the end.", "records"
)
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
    assert [r.getMessage() for r in about] == ["the collector accepts no spans", "the collector accepts spans again"]
    fields = about[0].fields
    assert fields["collector"] == collector.url.removeprefix("http://")
    assert fields["why"] == "status 400"


@pytest.mark.promise(
    "A slow or absent collector costs no request, bounded memory, and two seconds at the end.", "records"
)
async def test_a_full_queue(
    client: ClientSession, engine: FakeEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the collector answers nothing, whole traces are dropped for which there is no room, and counted; requests
    do not wait for it, and the end waits no longer than its time."""
    monkeypatch.setattr("router.telemetry.tracing.FLUSH_S", 0.05)
    collector.holding = True
    async with running(engine, **traced(collector, tracing__queue_spans_max=10)) as app:
        for _ in range(20):
            assert (await ask(client, app.url))[0] == 200
        page = await (await client.get(app.url + "/metrics")).text()
    assert not collector.bodies, "the end came before an answer of the collector"
    assert dropped(page) >= (20 - 1 - 5) * 4
    assert dropped(page) % 4 == 0


@pytest.mark.promise(
    "A slow or absent collector costs no request, bounded memory, and two seconds at the end.", "records"
)
async def test_nobody_listens(client: ClientSession, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that was never there costs no request, and the end no more than its time."""
    monkeypatch.setattr("router.telemetry.tracing.FLUSH_S", 0.05)
    gone = Collector()
    async with gone:
        pass
    async with running(engine, **traced(gone)) as app:
        assert [(await ask(client, app.url))[0] for _ in range(5)] == [200] * 5
    async with asyncio.timeout(60):
        while app._ingress.counters()[SPANS_DROPPED] != 5 * 4:  # the thread is told to give up, and nobody waits for it
            await asyncio.sleep(0.001)


@pytest.mark.promise("A collector's credentials are in no log line and no complaint about settings.", "records")
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
