"""Streams that are silent while their replica works: it hides what it makes, and nobody is blamed for that."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession

from router.http import upstream
from router.router_server import RouterServer
from tests.proxy.test_early_alone import later
from tests.support.fakes import FakeEngine, events, half_then_waits, idle, running
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BEGUN = b"".join(events()[:2])
BODY = {"model": "m", "stream": True, "messages": []}


def at_work(app: RouterServer, engine: FakeEngine, after_s: float) -> None:
    """The replica shows work then, counted from now."""
    app.http.upstream._worked[engine.url] = asyncio.get_running_loop().time() + after_s


def well(app: RouterServer, engine: FakeEngine, after_s: float) -> None:
    """The replica, which counts nothing, is well then."""
    app.http.upstream._well[engine.url] = asyncio.get_running_loop().time() + after_s


async def test_the_default_is_long(client: ClientSession, engine: FakeEngine) -> None:
    """Ten minutes of thinking that nobody asked to see are no break; then it is one, and blames nobody."""
    engine.script.append(half_then_waits)
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert await response.content.readexactly(len(BEGUN)) == BEGUN
            later(app, 590.0)
            assert app.http.in_flight == 1
            later(app, 601.0)
            assert b"stream_stalled" in await response.read()
        record = app.control.pages.decisions[-1]
        assert (record.ending, (record.error or "").partition(":")[0]) == ("failed", "stalled")
        (member,) = app.control.router.members
        assert member.breaker.failures == 0
        assert idle(app)


async def test_a_replica_at_work_is_waited_for(client: ClientSession, engine: FakeEngine) -> None:
    """However long, up to an hour; and no longer than a moment behind its last sign of work."""
    engine.script.extend([half_then_waits, half_then_waits])
    async with running(engine) as app:
        for silent_s in (1_800.0, upstream.HIDDEN_S_MAX + 1):
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert await response.content.readexactly(len(BEGUN)) == BEGUN
                at_work(app, engine, silent_s)
                later(app, silent_s)
                if silent_s < upstream.HIDDEN_S_MAX:
                    assert app.http.in_flight == 1
                    later(app, silent_s + upstream.WORK_S_MAX + 1)
                assert b"stream_stalled" in await response.read()
        assert idle(app)


@pytest.mark.parametrize("counted", [True, False])
async def test_a_short_limit(client: ClientSession, engine: FakeEngine, counted: bool) -> None:
    """Holds at once where the engine's counters stand still; where it counts nothing and is well it has as long as
    before a first byte."""
    engine.script.append(half_then_waits)
    async with running(engine, upstream__idle_timeout_s=5.0, upstream__first_byte_timeout_s=60.0) as app:
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert await response.content.readexactly(len(BEGUN)) == BEGUN
            if not counted:
                well(app, engine, 50.0)
                later(app, 50.0)
                assert app.http.in_flight == 1
                well(app, engine, 61.0)
                later(app, 61.0)
            else:
                later(app, 10.0)
            assert b"stream_stalled" in await response.read()
        assert idle(app)


@pytest.mark.parametrize("metrics", [None, "vllm:generation_tokens_total 7\n"])
async def test_the_hub_says_who_is_at_work(client: ClientSession, engine: FakeEngine, metrics: str | None) -> None:
    """Of an engine that counts nothing, that it is well; of another one, only when its counters move."""
    engine.metrics = metrics
    engine.script.append(half_then_waits)
    async with running(engine, probe__interval_s=0.05) as app:
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert await response.content.readexactly(len(BEGUN)) == BEGUN
            known = app.http.upstream
            if metrics is None:
                await until(lambda: engine.url in known._well)
            else:
                known._worked.clear()
                tokens = 7

                def moves() -> bool:
                    nonlocal tokens
                    tokens += 1
                    engine.metrics = f"vllm:generation_tokens_total {tokens}\n"
                    return known._worked.get(engine.url, 0.0) > since_s

                since_s = asyncio.get_running_loop().time() + 1.5  # behind what the first events have shown
                await until(moves)
                assert engine.url not in known._well
        await engine.cancelled.wait()


async def test_three_silent_streams_open_no_breaker(client: ClientSession, engine: FakeEngine) -> None:
    """Whatever their number."""
    engine.script.extend([half_then_waits] * 4)
    async with running(engine) as app:
        for _ in range(4):
            async with client.post(app.url + CHAT, json=BODY) as response:
                assert await response.content.readexactly(len(BEGUN)) == BEGUN
                later(app, 601.0)
                assert b"stream_stalled" in await response.read()
        (member,) = app.control.router.members
        assert member.breaker.failures == 0
        async with client.post(app.url + CHAT, json=BODY) as response:
            assert response.status == 200
