"""Dying engines and leaving clients."""

import asyncio
import json

import pytest
from aiohttp import ClientSession

from tests.support.fakes import (
    FakeEngine,
    Reply,
    breaks_midway,
    empty_stream,
    error_event,
    events,
    half_then_waits,
    headers_then_reset,
    idle,
    mute,
    outwaited,
    reset,
    running,
    silent,
    status,
)

CHAT = "/v1/chat/completions"
SHUTDOWN = json.dumps({"error": {"message": "cannot schedule new futures after shutdown", "code": 500}})

EARLY_FAILURES: dict[str, Reply] = {
    "reset": reset,
    "headers_then_reset": headers_then_reset,
    "empty_stream": empty_stream,
    "error_event": error_event,
    "502": status(502),
    "503": status(503),
    "500 of an engine shutting down": status(500, SHUTDOWN),
}


def body(*, stream: bool = True, text: str = "x") -> dict[str, object]:
    """A chat request."""
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("kind", EARLY_FAILURES)
async def test_early_failure_is_retried_elsewhere(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, kind: str
) -> None:
    """A failure before the first byte costs the client nothing: one more replica is tried, never the same."""
    engine.script.append(EARLY_FAILURES[kind])
    other.script.append(EARLY_FAILURES[kind])
    async with running(engine, other) as app:
        failing = {e.url: e for e in (engine, other)}
        async with client.post(app.url + CHAT, json=body()) as response:
            # The first one failed; the other is scripted to fail too, so both have been asked exactly once.
            assert response.status in (200, 500, 502, 503)
        assert [len(e.seen) for e in failing.values()] == [1, 1]
        async with client.post(app.url + CHAT, json=body()) as response:
            assert await response.read() == b"".join(events())
        assert idle(app)


@pytest.mark.parametrize("kind", EARLY_FAILURES)
async def test_retry_succeeds(client: ClientSession, engine: FakeEngine, other: FakeEngine, kind: str) -> None:
    """After an early failure the client gets the whole healthy answer of another replica, and the receipt says so."""
    async with running(engine, other) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            first = engine if response.headers["x-warmroute-replica"] == engine.url else other
        first.script.append(EARLY_FAILURES[kind])
        async with client.post(app.url + CHAT, json=body()) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-reason"] == "retry"
            assert response.headers["x-warmroute-replica"] != first.url
            assert await response.read() == b"".join(events())
        assert idle(app)


async def test_refused_moves_on(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A replica that refuses connections is out at once, and its conversation moves without an error."""
    async with running(engine, other) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            first = engine if response.headers["x-warmroute-replica"] == engine.url else other
        await first.stop()
        async with client.post(app.url + CHAT, json=body()) as response:
            assert response.status == 200
        assert [m.id for m in app.router.fleet.ready()] == [(other if first is engine else engine).url]
        async with client.post(app.url + CHAT, json=body()) as response:
            assert response.headers["x-warmroute-reason"] == "only"


async def test_silent_request_on_a_lost_replica(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """vLLM on SIGTERM closes its listener and leaves requests silent: they move when that is noticed."""
    async with running(engine, other) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            first = engine if response.headers["x-warmroute-replica"] == engine.url else other
        first.script.append(silent)
        pending = asyncio.ensure_future(client.post(app.url + CHAT, json=body()))
        await first.at_work.wait()
        app.router.fleet.observe_health(first.url, False, proof=True)
        app.http.upstream.fail_silent_calls(first.url)
        async with await pending as response:
            assert response.headers["x-warmroute-replica"] != first.url
            assert await response.read() == b"".join(events())
        assert idle(app)


async def test_all_of_one_model_dead(client: ClientSession, engine: FakeEngine) -> None:
    """A replica of another model is no help: the refusal names the model that no replica can serve now."""
    async with FakeEngine(models=("another",)) as another, running(engine, another) as app:
        await engine.stop()
        async with client.post(app.url + CHAT, json=body()) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (503, "no_replica_ready")
            assert "'m'" in error["message"]
            assert "Retry-After" in response.headers
        assert idle(app)


async def test_all_dead(client: ClientSession, engine: FakeEngine) -> None:
    """With nobody left, a refused connection is 503 with Retry-After and a broken one 502, both in OpenAI's form."""
    async with running(engine) as app:
        engine.script.append(reset)
        async with client.post(app.url + CHAT, json=body()) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_failed")
        await engine.stop()
        async with client.post(app.url + CHAT, json=body()) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica_ready")
            assert "Retry-After" in response.headers
        assert idle(app)


async def test_timeout(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A request without a first byte in time is 504, and is not tried again unless told so."""
    engine.script.append(silent)
    other.script.append(silent)
    async with running(engine, other) as app:
        asked = asyncio.ensure_future(client.post(app.url + CHAT, json=body()))
        while not (engine.seen or other.seen):
            await asyncio.sleep(0)
        async with await outwaited(app, asked, engine, other) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, "timed_out")
        assert len(engine.seen) + len(other.seen) == 1
        assert idle(app)


async def test_timeout_retried_by_setting(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Told so, a request that timed out is tried elsewhere."""
    async with running(engine, other, upstream__retry_on_timeout=True) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            first = engine if response.headers["x-warmroute-replica"] == engine.url else other
        first.script.append(silent)
        asked = asyncio.ensure_future(client.post(app.url + CHAT, json=body()))
        await first.at_work.wait()
        async with await outwaited(app, asked, first) as response:
            assert response.status == 200
            assert response.headers["x-warmroute-replica"] != first.url


async def test_stored_responses_are_not_retried(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A response that may have been stored is not made twice."""
    for fake in (engine, other):
        fake.script.append(reset)
    async with running(engine, other) as app:
        async with client.post(app.url + "/v1/responses", json={"model": "m", "input": "x"}) as response:
            assert response.status == 502
        assert len(engine.seen) + len(other.seen) == 1


@pytest.mark.promise("Retries are bounded in any state of the fleet.", "faults")
async def test_retry_budget(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Retries stay within their budget, so a dead fleet is not hammered. Nothing flows in by time here, so that it does
    not count how long that takes."""
    for fake in (engine, other):
        fake.script.extend([reset] * 200)
    async with running(engine, other, upstream__retry_floor_per_s=0.0) as app:
        for _ in range(60):
            async with client.post(app.url + CHAT, json=body()) as response:
                assert response.status == 502
        # Nobody who was not asked is blamed for it.
        asked = {engine.url: len(engine.seen), other.url: len(other.seen)}
        assert all(m.breaker.failures <= asked[m.id] for m in app.router.fleet.members.values())
        # 60 first attempts; 10 retries in stock, and 0.2 a request on top.
        assert len(engine.seen) + len(other.seen) <= 60 + 10 + 12


async def test_break_midway(client: ClientSession, engine: FakeEngine) -> None:
    """A stream that breaks off ends in an error: the client is told, not fooled."""
    engine.script.append(breaks_midway)
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            told = (await response.read()).removeprefix(b"".join(events()[:2]))
            assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        assert idle(app)
        assert app.control.pages.decisions[-1].ending == "failed"


async def test_idle_stream_is_cut(client: ClientSession, engine: FakeEngine) -> None:
    """A stream that falls silent for longer than the limit is cut, not kept for ever."""
    engine.script.append(half_then_waits)
    begun = b"".join(events()[:2])
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=body()) as response:
            assert await response.content.readexactly(len(begun)) == begun
            told = await outwaited(app, asyncio.ensure_future(response.read()), engine)
            assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == "stream_stalled"
        assert idle(app)


@pytest.mark.parametrize("reply", [silent, mute, half_then_waits])
@pytest.mark.parametrize("streams", [True, False])
async def test_client_leaves(engine: FakeEngine, reply: Reply, streams: bool) -> None:
    """A client that leaves cancels the engine's work at once, streaming or not, and blames nobody."""
    engine.script.append(reply)
    async with running(engine) as app:
        async with ClientSession() as leaver:
            pending = asyncio.ensure_future(leaver.post(app.url + CHAT, json=body(stream=streams)))
            await engine.at_work.wait()
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await asyncio.wait_for(engine.cancelled.wait(), 60)
        async with asyncio.timeout(60):
            while not idle(app):
                await asyncio.sleep(0)
        assert app.control.pages.decisions[-1].status == 499
        assert app.router.fleet.ready()


async def test_drain(client: ClientSession, engine: FakeEngine) -> None:
    """Stopping lets running answers finish."""
    engine.script.append(half_then_waits)
    async with running(engine, listen__drain_s=60.0) as app:
        response = await client.post(app.url + CHAT, json=body())
        await engine.at_work.wait()
        reading = asyncio.ensure_future(response.read())
        asyncio.get_running_loop().call_later(0.1, engine.go_on.set)
    assert await reading == b"".join(events())


async def test_restart_is_noticed(client: ClientSession, engine: FakeEngine) -> None:
    """An engine whose counters went back has restarted: nothing is believed cached any more."""
    engine.metrics = "vllm:prompt_tokens_total 5000\n"
    async with running(engine) as app:
        for _ in range(2):
            async with client.post(app.url + CHAT, json=body(text="word " * 1000)):
                pass
        assert app.router.index.blocks(engine.url) > 0
        engine.metrics = "vllm:prompt_tokens_total 0\n"
        await app.control.probe_now()
        assert app.router.index.blocks(engine.url) == 0


async def test_unhealthy_replica_gets_nothing(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """Two failed health checks in a row take a replica out; one good one brings it back."""
    async with running(engine, other) as app:
        engine.healthy = False
        await app.control.probe_now()
        assert len(app.router.fleet.ready()) == 2
        await app.control.probe_now()
        assert [m.id for m in app.router.fleet.ready()] == [other.url]
        engine.healthy = True
        await app.control.probe_now()
        assert len(app.router.fleet.ready()) == 2
