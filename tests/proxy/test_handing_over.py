"""Replicas leave while they answer: what they say goes on on others, nothing is cut or fails, and nobody waits."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine import tokens
from loadtest.fake_engine.command import Engines, EngineSettings
from router.router_server import RouterServer
from tests.proxy.test_stream_failover import CHAT, COMPLETIONS, asked, body_of, metric, pair, script
from tests.support.fakes import FakeEngine, Reply, idle, running, status
from tests.support.speaking import Speaking, chunks_of, said_in, whole

REPLICAS, STREAMS, LATER = 3, 12, 3  # streams at the start, and those that begin before each replacement
ANSWER_TOKENS = 3_400  # 60 s at the simulated engine's 18 ms a token
HAND_OVER_S = 0.1
# How much faster than life engines are: so slow that a busy machine replaces all before an answer ends, then fast.
SLOW, FAST = 0.05, 1_000.0


def long_request(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a request whose answer takes a minute."""
    fields = {"stream": True, "max_tokens": ANSWER_TOKENS, "stream_options": {"include_usage": True}}
    if number % 2:
        return COMPLETIONS, {"model": "sim", "prompt": f"tell me of {'x' * number}", **fields}
    return CHAT, {"model": "sim", "messages": [{"role": "user", "content": f"tell me of {'x' * number}"}], **fields}


def expected(path: str, body: dict[str, Any]) -> tuple[str, list[tuple[int, int, int]]]:
    """Text and counts of the unbroken answer."""
    chat = [tokens.Message("user", each["content"]) for each in body.get("messages", ())]
    prompt = tokens.render_chat(chat, None) if path == CHAT else body["prompt"].encode()
    count = tokens.count(prompt)
    return tokens.answer(prompt, ANSWER_TOKENS), [(count, ANSWER_TOKENS, count + ANSWER_TOKENS)]


async def replace(
    client: ClientSession, app: RouterServer, engines: list[Engines], index: int, stack: AsyncExitStack
) -> None:
    """Replace a replica as a rollout does: it drains, ends once it has nothing to do, and another is at its place."""
    old, page = engines[index], f"{app.control.admin_url}/admin/replicas/drain"
    async with client.post(page, json={"url": old.urls[0]}) as response:
        assert response.status == 200
    async with asyncio.timeout(60):
        while old.replicas[0].model.running_n or old.replicas[0].model.waiting_n:
            await asyncio.sleep(0.01)
    await old.stop()
    port = int(old.urls[0].rpartition(":")[2])
    settings = EngineSettings(replicas=1, port=port, time_scale=SLOW)
    engines[index] = await stack.enter_async_context(Engines(settings))
    async with client.delete(page, params={"url": old.urls[0]}) as response:
        assert response.status == 200
    await app.control.probe_now()


async def test_rolling_restart(client: ClientSession) -> None:
    """Answers of a minute, a tenth of a second until a replica's streams are handed on, and all replicas replaced: each
    answer is whole and as it would have been, no replica is blamed, and the last replica is replaced before the first
    answer has ended."""
    async with AsyncExitStack() as stack:
        first = EngineSettings(replicas=1, port=0, time_scale=SLOW)
        engines = [await stack.enter_async_context(Engines(first)) for _ in range(REPLICAS)]
        urls = [each.urls[0] for each in engines]
        app = await stack.enter_async_context(running(*urls, upstream__drain_migrate_after_s=HAND_OVER_S))
        requests = [long_request(number) for number in range(STREAMS + LATER * REPLICAS)]
        to_come = iter(requests)
        streams = [asyncio.create_task(asked(client, app, *next(to_come))) for _ in range(STREAMS)]
        async with asyncio.timeout(60):
            while sum(each.replicas[0].model.running_n for each in engines) < STREAMS:
                await asyncio.sleep(0.01)
        for index in range(REPLICAS):
            streams += [asyncio.create_task(asked(client, app, *next(to_come))) for _ in range(LATER)]
            await replace(client, app, engines, index, stack)
        assert not any(stream.done() for stream in streams)
        for each in engines:
            each.replicas[0].time_scale = FAST
        for got, (path, body) in zip(await asyncio.gather(*streams), requests, strict=True):
            said = said_in(chunks_of(got))
            assert (said["text"], said["usage"]) == expected(path, body)
            assert (said["names"], said["ids"], len(said["finish"])) == (1, [], 1)
        moved = await metric(app, 'warmroute_stream_failovers_total{mode="exact",reason="drain"}')
        assert STREAMS <= moved <= len(streams)
        page = (await app.control.metrics.page_in_slices()).decode()
        assert "# TYPE warmroute_replica_failures_total counter" in page
        failures = [line for line in page.splitlines() if line.startswith("warmroute_replica_failures_total{")]
        # A request whose replica leaves while it connects is placed again, which blames nobody.
        assert [line for line in failures if not line.endswith(" 0.0") and 'kind="left"' not in line] == []
        assert idle(app)


async def test_begins_after_its_replica_leaves(client: ClientSession) -> None:
    """A stream that has said nothing when its replica's time is over is handed on once it has."""
    async with pair(upstream__drain_migrate_after_s=0.0) as (one, two, app):
        asked_for, may_begin = asyncio.Event(), asyncio.Event()
        queue = [Speaking(after=7, how="hang"), Speaking()]

        async def reply(engine: FakeEngine, request: Any) -> Any:
            asked_for.set()
            await may_begin.wait()
            return await queue.pop(0).reply()(engine, request)

        for engine in (one, two):
            engine.script.extend([reply, reply])
        body = body_of(COMPLETIONS)
        asking = asyncio.create_task(asked(client, app, COMPLETIONS, body))
        async with asyncio.timeout(60):
            await asked_for.wait()
        app.http.on_replica_removed((one if one.seen else two).url)
        await asyncio.sleep(0.05)  # its time is over
        may_begin.set()
        async with asyncio.timeout(60):
            assert said_in(chunks_of(await asking)) == said_in(whole(COMPLETIONS, body))
        assert await metric(app, 'warmroute_stream_failovers_total{mode="exact",reason="drain"}') == 1


async def test_hand_over(client: ClientSession) -> None:
    """The streams of a replica that is about to leave are handed on when its time is over, and blame nobody; those
    that cannot be continued stay."""
    async with pair(upstream__drain_migrate_after_s=0.0) as (one, two, app):
        body = body_of(CHAT)
        script(one, two, Speaking(after=7, how="hang"))
        asking = asyncio.create_task(asked(client, app, CHAT, body))
        async with asyncio.timeout(60):
            while not (one.at_work.is_set() or two.at_work.is_set()):
                await asyncio.sleep(0.001)
        app.http.on_replica_removed((one if one.at_work.is_set() else two).url)
        got = await asking
        assert said_in(chunks_of(got)) == said_in(whole(CHAT, body))
        assert await metric(app, 'warmroute_stream_failovers_total{mode="exact",reason="drain"}') == 1
        failures = [
            line
            for line in (await app.control.metrics.page_in_slices()).decode().splitlines()
            if "replica_failures_total{" in line
        ]
        assert all(line.endswith(" 0.0") for line in failures)


async def test_rollout(client: ClientSession) -> None:
    """Two replicas are replaced one after the other while an answer is given: it is handed on twice, and whole."""
    async with pair(upstream__drain_migrate_after_s=0.0) as (one, two, app):
        body = body_of(CHAT)
        queue = [Speaking(after=7, how="hang"), Speaking(after=6, how="hang"), Speaking()]

        async def reply(engine: FakeEngine, request: Any) -> Any:
            return await queue.pop(0).reply()(engine, request)

        for engine in (one, two):
            engine.script.extend([reply] * 3)
        asking = asyncio.create_task(asked(client, app, CHAT, body))
        for left in (2, 1):
            async with asyncio.timeout(60):
                while len(queue) > left or not (one.at_work.is_set() or two.at_work.is_set()):
                    await asyncio.sleep(0.001)
            busy = one if one.at_work.is_set() else two
            busy.at_work.clear()
            await asyncio.sleep(0.05)  # its events are on their way
            app.http.on_replica_removed(busy.url)
        assert said_in(chunks_of(await asking)) == said_in(whole(CHAT, body))
        assert not queue


async def test_drain(client: ClientSession) -> None:
    """A replica that is told to drain gets nothing new and hands its streams on; told otherwise, it is as before. An
    unknown one is 404."""
    async with pair(upstream__drain_migrate_after_s=0.0) as (one, two, app):
        page, body = f"{app.control.admin_url}/admin/replicas/drain", body_of(CHAT)
        script(one, two, Speaking(after=7, how="hang"))
        asking = asyncio.create_task(asked(client, app, CHAT, body))
        async with asyncio.timeout(60):
            while not (one.at_work.is_set() or two.at_work.is_set()):
                await asyncio.sleep(0.001)
        busy, other = (one, two) if one.at_work.is_set() else (two, one)
        async with client.post(page, json={"url": busy.url}) as response:
            assert response.status == 200
        assert said_in(chunks_of(await asking)) == said_in(whole(CHAT, body))
        before = len(other.seen)
        for engine in (one, two):
            engine.script.clear()
        for _ in range(4):
            await asked(client, app, CHAT, body)
        assert len(other.seen) == before + 4
        for status_ in (200, 404):
            async with client.delete(page, params={"url": busy.url}) as response:
                assert response.status == status_
        async with client.post(page, json={"url": "http://127.0.0.1:1"}) as response:
            assert response.status == 404


async def test_back_in_time(client: ClientSession) -> None:
    """A replica that is ready again before its time is over keeps its streams."""
    async with pair(upstream__drain_migrate_after_s=0.05) as (one, two, app):
        script(one, two, Speaking(after=7, how="hang"))
        asking = asyncio.create_task(asked(client, app, CHAT, body_of(CHAT)))
        async with asyncio.timeout(60):
            while not (one.at_work.is_set() or two.at_work.is_set()):
                await asyncio.sleep(0.001)
        busy = one if one.at_work.is_set() else two
        app.http.on_replica_removed(busy.url)
        app.http.on_replica_ready(busy.url)
        await asyncio.sleep(0.1)
        assert not asking.done()
        busy.go_on.set()
        assert said_in(chunks_of(await asking)) == said_in(whole(CHAT, body_of(CHAT)))
        assert await metric(app, 'warmroute_stream_failovers_total{mode="exact",reason="drain"}') == 0


@pytest.mark.parametrize("refusal", [status(429, headers={"Retry-After": "1"}), status(500)], ids=["full", "fails"])
async def test_offered_again(client: ClientSession, refusal: Reply) -> None:
    """A stream that nobody else takes at once, as all are full, or whose taker fails, is offered again: it was broken
    on purpose."""
    async with pair(upstream__drain_migrate_after_s=0.0) as (one, two, app):
        body = body_of(CHAT)
        queue = [Speaking(after=7, how="hang").reply(), refusal, Speaking().reply()]

        async def reply(engine: FakeEngine, request: Any) -> Any:
            return await queue.pop(0)(engine, request)

        for engine in (one, two):
            engine.script.extend([reply] * 3)
        asking = asyncio.create_task(asked(client, app, CHAT, body))
        async with asyncio.timeout(60):
            while not (one.at_work.is_set() or two.at_work.is_set()):
                await asyncio.sleep(0.001)
        app.http.on_replica_removed((one if one.at_work.is_set() else two).url)
        async with asyncio.timeout(60):
            assert said_in(chunks_of(await asking)) == said_in(whole(CHAT, body))
        assert not queue
