"""Traces from end to end: what clients say and replicas hear, and what a real collector is sent."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.telemetry.request_record import session_key
from tests.http.wire import connect, post
from tests.proxy.test_stream_failover import asked, body_of, pair, script
from tests.support.fakes import (
    FakeEngine,
    breaks_midway,
    half_then_waits,
    idle,
    mute,
    ok,
    reset,
    running,
    status,
)
from tests.support.speaking import Speaking
from tests.telemetry.collector import Collector
from tests.telemetry.traced import CHAT, ask, body, check_nested, traced


async def test_a_stream(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """A streamed request is one trace: parse, match and place, the call with its first byte and first token, and the
    stream; attributes are those of the conventions and of the receipt."""
    messages = [{"role": "user", "content": "a word " * 500}]  # long enough for a conversation with a name
    asked = body(stream=True, stream_options={"include_usage": True}, messages=messages)
    async with running(engine, **traced(collector)) as app:
        began_ns = time.time_ns()
        async with client.post(app.url + CHAT, json=asked) as r:
            await r.read()
            receipt = r.headers
        spans = await collector.trace()
        sighting = app.control.pages.decisions[-1].cache.analysis
    root = check_nested(spans)
    assert [got.name for got in spans] == [f"POST {CHAT}", "parse", "match and place", "POST", "stream"]
    assert root.parent == ""
    assert sighting is not None
    assert sighting.conversation
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
        "gen_ai.provider.name": "fake",
        "gen_ai.conversation.id": f"{sighting.conversation:016x}",
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


async def test_a_continued_stream(client: ClientSession, collector: Collector) -> None:
    """The first token is an event of the call that sent it, at the time at which it came: the call that continues the
    stream begins later."""
    async with pair(**traced(collector)) as (one, two, app):
        script(one, two, Speaking(after=7))
        await asked(client, app, CHAT, body_of(CHAT))
        spans = await collector.trace()
    check_nested(spans)
    first, second = (got for got in spans if got.name == "POST")
    assert (first.events, second.events) == (["first byte", "first token"], ["first byte"])
    assert first.about["error.type"] == "broke_midway"


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
        while not sum(app.control.admission.count_queued()[0].values()):
            await asyncio.sleep(0.001)
        engine.go_on.set()
        await asyncio.gather(first, second)
        await collector.until(lambda: len(collector.named(f"POST {CHAT}")) == 2)
    (queue,) = collector.named("queue")
    spans = [got for got in collector.spans if got.trace == queue.trace]
    root = check_nested(spans)
    took_s = (queue.span.end_time_unix_nano - queue.span.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(root.about["warmroute.queued_seconds"], abs=1e-3)


async def test_an_agents_conversation(client: ClientSession, engine: FakeEngine, collector: Collector) -> None:
    """A sub-agent's trace has the key of its conversation, as all requests of that have, and that of its parent's; the
    names themselves are in no span."""
    headers = {"x-session-affinity": "ses_child", "x-parent-session-id": "ses_parent"}
    async with running(engine, **traced(collector)) as app:
        assert (await ask(client, app.url, headers))[0] == 200
        spans = await collector.trace()
    attributes = spans[0].about
    assert attributes["gen_ai.conversation.id"] == session_key(b"ses_child")
    assert attributes["warmroute.agent"] == "opencode/sub"
    assert attributes["warmroute.agent_parent"] == session_key(b"ses_parent")
    assert not any("ses_" in str(value) for got in spans for value in got.about.values())
