"""Streams that break go on on another replica, and their clients see one."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientSession

from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, Reply, idle, running, status
from tests.support.speaking import Speaking, chunks_of, said_in, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KILLS = int(os.environ.get("WARMROUTE_KILLS", "2"))  # 50 for a thousand random kills
EXACT = {"x-warmroute-stream-failover": "exact"}
IN_HALVES = {"disagg__kv_connector": "sglang"}
USAGE = {"stream_options": {"include_usage": True}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[FakeEngine, FakeEngine, RouterServer]]:
    """A router before two engines that say they are vLLM."""
    async with FakeEngine(owned_by="vllm") as one, FakeEngine(owned_by="vllm") as two:
        async with running(one, two, **settings) as app:
            yield one, two, app
            async with asyncio.timeout(60):
                while not idle(app):
                    await asyncio.sleep(0)


def body_of(path: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A request."""
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": "m", "stream": True, "temperature": 0, "max_tokens": 40, **asked, **USAGE, **fields}


def script(one: FakeEngine, two: FakeEngine, first: Speaking, then: Reply | None = None) -> None:
    """Whichever engine is asked first breaks, and the other goes on."""
    queue = [first.reply(), then or Speaking(seed=9).reply()]

    async def reply(engine: FakeEngine, request: Any) -> Any:
        return await queue.pop(0)(engine, request)

    for engine in (one, two):
        engine.script.clear()
        engine.script.extend([reply, reply])


async def asked(client: ClientSession, app: RouterServer, path: str, body: dict[str, Any], **headers: str) -> bytes:
    """The bytes of a stream."""
    async with client.post(app.url + path, json=body, headers=EXACT | headers) as response:
        assert response.status == 200
        return await response.read()


async def metric(app: RouterServer, name: str) -> float:
    """A series as it is scraped."""
    for line in (await app.control.metrics.page_in_slices()).decode().splitlines():
        series, _, value = line.rpartition(" ")
        if series == name:
            return float(value)
    return 0.0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_event(client: ClientSession, path: str) -> None:
    """Killed behind each event in turn, the client's stream is the unbroken one, under one name and without ids; the
    engines end with no request open."""
    async with pair(limits__recent_decisions_max=512) as (one, two, app):
        app.http._budget.tokens = app.http._budget.floor_per_s = 1e6
        for number in range(KILLS):
            body = body_of(path, f"tell {number}")
            expected = said_in(whole(path, body))
            count = len(whole(path, body))
            for after in range(1, count + 1):
                script(one, two, Speaking(after=after))
                got = await asked(client, app, path, body)
                assert said_in(chunks_of(got)) == expected, after
                assert b'token_ids":[' not in got
                assert "Accept-Encoding" not in (one.seen + two.seen)[-1].headers
                assert got.endswith(b"data: [DONE]\n\n")


async def test_without_limit(client: ClientSession) -> None:
    """A chat that names no limit goes on to its own end: a completion that named none would end at sixteen tokens."""
    async with pair() as (one, two, app):
        body = body_of(CHAT, "tell 1", max_tokens=None)
        assert said_in(whole(CHAT, body))["usage"][0][1] > 40
        script(one, two, Speaking(after=7))
        got = await asked(client, app, CHAT, body)
        assert said_in(chunks_of(got)) == said_in(whole(CHAT, body))


@pytest.mark.parametrize("how", ["close", "end", "error"])
async def test_kinds_of_breaks(client: ClientSession, how: str) -> None:
    """A reset, an end without a reason, and an engine that says that it died: all are continued, each counted."""
    async with pair() as (one, two, app):
        body = body_of(CHAT)
        script(one, two, Speaking(after=7, how=how))
        got = await asked(client, app, CHAT, body)
        assert said_in(chunks_of(got)) == said_in(whole(CHAT, body))
        cause = "broke_midway" if how == "close" else "unfinished"
        assert await metric(app, f'warmroute_stream_failovers_total{{mode="exact",reason="{cause}"}}') == 1


async def test_random_kills(client: ClientSession) -> None:
    """Random places, stop strings, cut characters, events of several tokens, tools: the unbroken answer each time, or
    for tools an error behind the beginning of it; no token comes twice or not at all."""
    rng = random.Random(5)
    honest = 0
    async with pair() as (one, two, app):
        app.http._budget.tokens = app.http._budget.floor_per_s = 1e6
        for number in range(20 * KILLS):
            path = rng.choice([CHAT, COMPLETIONS])
            stop = rng.choice([[], ["STOP"], [" cat sat", "s"], ["🙂"]])
            body = body_of(path, f"say {number}", stop=stop, max_tokens=rng.randint(1, 60), min_tokens=1)
            if path == CHAT and rng.random() < 0.3:
                body["tools"] = TOOLS
            count = len(whole(path, body))
            first = Speaking(after=rng.randint(1, count), together_max=rng.randint(1, 3), seed=number)
            script(one, two, first, Speaking(together_max=rng.randint(1, 3), seed=number + 1).reply())
            got = await asked(client, app, path, body)
            if "tools" in body and b"stream_broken" in got:
                honest += 1
                shown = said_in(chunks_of(got.rpartition(b"data: ")[0]))["text"]
                assert said_in(whole(path, body))["text"].startswith(shown)
            else:
                assert said_in(chunks_of(got)) == said_in(whole(path, body))
        differs = await metric(app, 'warmroute_stream_failovers_refused_total{reason="differs"}')
        assert differs == honest < 5 * KILLS
        continued = await metric(app, 'warmroute_stream_failovers_total{mode="exact",reason="broke_midway"}')
        assert 0 < continued <= 20 * KILLS - honest  # of others all was said
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="again"}') == 0


async def test_tools(client: ClientSession) -> None:
    """A chat with tools is the unbroken one, or ends in an honest error; its body is let go with its end."""
    whole_ones = 0
    async with pair() as (one, two, app):
        app.http._budget.tokens = app.http._budget.floor_per_s = 1e6
        for after in range(1, 30, 3):
            body = body_of(CHAT, tools=TOOLS)
            script(one, two, Speaking(after=after))
            got = await asked(client, app, CHAT, body)
            if b"stream_broken" not in got:
                assert said_in(chunks_of(got)) == said_in(whole(CHAT, body))
                whole_ones += 1
        assert app.http._server.bodies.held_bytes == 0
        assert whole_ones + await metric(app, 'warmroute_stream_failovers_refused_total{reason="differs"}') == 10
        assert whole_ones


async def test_official_client(client: ClientSession) -> None:
    """OpenAI's own client sees one stream, whose usage is that of the whole."""
    async with pair() as (one, two, app):
        body = body_of(CHAT, max_tokens=30)
        script(one, two, Speaking(after=9))
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as official:
            stream = await official.chat.completions.create(**body, extra_headers=EXACT)
            chunks = [chunk.model_dump(exclude_unset=True) async for chunk in stream]
        assert said_in(chunks) == said_in(whole(CHAT, body))


async def test_messages(client: ClientSession) -> None:
    """Messages have no ids: Anthropic's own client gets an error, behind nothing but the beginning of the unbroken
    message, and no other replica is asked. A header says so before."""
    said: list[Any] = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"model": "m", "max_tokens": 40, "messages": said, "extra_headers": EXACT}
    async with pair() as (one, two, app):
        async with anthropic.AsyncAnthropic(base_url=app.url, api_key="x", max_retries=0) as official:
            script(one, two, Speaking())
            async with official.messages.stream(**body) as stream:
                unbroken = "".join([text async for text in stream.text_stream])
            for after in (1, 2, 3, 9, 20):
                script(one, two, Speaking(after=after))
                one.seen.clear()
                two.seen.clear()
                shown = list[str]()
                with pytest.raises(anthropic.APIError, match="stream_broken"):
                    await _read(official, body, shown)
                assert unbroken.startswith("".join(shown))
                assert len(one.seen + two.seen) == 1
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="no_ids"}') == 5


async def _read(official: anthropic.AsyncAnthropic, body: dict[str, Any], shown: list[str]) -> None:
    """Read a refused stream's text as far as it comes."""
    async with official.messages.stream(**body) as stream:
        assert stream.response.headers["x-warmroute-stream-failover-refused"] == "no_ids"
        async for text in stream.text_stream:
            shown.append(text)


async def test_not_asked(client: ClientSession) -> None:
    """Without a wish nothing is asked of engines, and a stream that breaks ends in an error; so does it where the
    settings forbid it, whatever the request wants, and where engines take no streams in one leg."""
    for settings, headers in (({}, {}), ({"upstream__stream_failover": "off"}, EXACT), (IN_HALVES, EXACT)):
        async with pair(**settings) as (one, two, app):
            script(one, two, Speaking(after=7))
            async with client.post(app.url + CHAT, json=body_of(CHAT), headers=headers) as response:
                got = await response.read()
            assert b"stream_broken" in got
            assert b"return_token_ids" not in (one.seen + two.seen)[0].body
            assert len(one.seen + two.seen) == 1


@pytest.mark.parametrize(
    "settings", [{"upstream__stream_failover": "exact"}, {"upstream__stream_failover_models": ("m=exact",)}]
)
async def test_by_settings(client: ClientSession, settings: dict[str, Any]) -> None:
    """All streams, or those of a model, are continued where the settings say so; a request may decline."""
    async with pair(**settings) as (one, two, app):
        body = body_of(CHAT)
        for wish, broken in (({}, False), ({"x-warmroute-stream-failover": "off"}, True)):
            script(one, two, Speaking(after=7))
            async with client.post(app.url + CHAT, json=body, headers=wish) as response:
                got = await response.read()
            assert (b"stream_broken" in got) is broken
            if not broken:
                assert said_in(chunks_of(got)) == said_in(whole(CHAT, body))


@pytest.mark.parametrize("wish", ["maybe", "approximate"])
async def test_bad_wish(client: ClientSession, wish: str) -> None:
    """A wish that is none is refused with its name."""
    async with pair() as (_, __, app):
        headers = {"x-warmroute-stream-failover": wish}
        async with client.post(app.url + CHAT, json=body_of(CHAT), headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "bad_stream_failover"


async def test_honest_where_not_exact(client: ClientSession) -> None:
    """A request whose second half would differ is served as ever, and told so; it ends in an error, and the metric says
    why."""
    async with pair() as (one, two, app):
        body = body_of(CHAT, presence_penalty=1)
        script(one, two, Speaking(after=7))
        async with client.post(app.url + CHAT, json=body, headers=EXACT) as response:
            assert response.headers["x-warmroute-stream-failover-refused"] == "penalty"
            assert b"stream_broken" in await response.read()
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="penalty"}') == 1


async def test_once(client: ClientSession) -> None:
    """A stream that breaks a second time ends in an error behind what came."""
    async with pair() as (one, two, app):
        body = body_of(CHAT)
        script(one, two, Speaking(after=6), Speaking(after=5).reply())
        got = await asked(client, app, CHAT, body)
        assert b"stream_broken" in got
        text = said_in(whole(CHAT, body))["text"]
        assert text.startswith(said_in(chunks_of(got))["text"])
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="again"}') == 1


async def test_nobody_else(client: ClientSession) -> None:
    """Where no other replica is there, or the other refuses, the stream ends as it would have; no lease is left."""
    async with FakeEngine(owned_by="vllm") as engine, running(engine) as app:
        engine.script.append(Speaking(after=7).reply())
        assert b"stream_broken" in await asked(client, app, CHAT, body_of(CHAT))
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="replica"}') == 1
        assert idle(app)
    async with pair() as (one, two, app):
        script(one, two, Speaking(after=7), status(400))
        assert b"stream_broken" in await asked(client, app, CHAT, body_of(CHAT))
        failures = sorted(member.breaker.failures for member in app.router.members)
        assert failures == [0, 1]  # whoever refuses is not to blame


async def test_servers_that_take_two_legs_alone_continue_nothing(client: ClientSession) -> None:
    """A stream goes on in one leg, and SGLang's servers that prefill or decode take none: whoever asks is told, and
    none of them is asked."""
    async with pair(disagg__kv_connector="sglang") as (one, two, app):
        script(one, two, Speaking(after=7))
        async with client.post(app.url + CHAT, json=body_of(CHAT), headers=EXACT) as response:
            assert response.headers["x-warmroute-stream-failover-refused"] == "split"
            assert b"stream_broken" in await response.read()
        assert len(one.seen) + len(two.seen) == 1


async def test_budget(client: ClientSession) -> None:
    """Continuations are retries: without budget there is none."""
    async with pair(upstream__retry_ratio=0, upstream__retry_floor_per_s=0) as (one, two, app):
        app.http._budget.tokens = 0.0
        script(one, two, Speaking(after=7))
        assert b"stream_broken" in await asked(client, app, CHAT, body_of(CHAT))
        assert await metric(app, 'warmroute_stream_failovers_refused_total{reason="budget"}') == 1


async def test_client_leaves_in_between(client: ClientSession) -> None:
    """A client that leaves while the other replica is asked leaves no lease behind, and the replica is let go."""
    async with pair() as (one, two, app):
        script(one, two, Speaking(after=7), Speaking(after=0, how="hang").reply())
        async with client.post(app.url + CHAT, json=body_of(CHAT), headers=EXACT) as response:
            await response.content.readany()
            async with asyncio.timeout(60):
                while not (one.at_work.is_set() or two.at_work.is_set()):
                    await asyncio.sleep(0.001)
            response.close()
        async with asyncio.timeout(60):
            while not idle(app):
                await asyncio.sleep(0.001)


async def test_final_receipt(client: ClientSession) -> None:
    """The final receipt says that the stream was continued, and the request's line says after what, and where."""
    async with pair() as (one, two, app):
        script(one, two, Speaking(after=7))
        headers = {"x-warmroute-final-receipt": "1"}
        got = await asked(client, app, CHAT, body_of(CHAT), **headers)
        receipt = json.loads(got.rpartition(b": warmroute ")[2])
        assert receipt["continued"] == "exact"
        async with client.get(f"{app.control.admin_url}/admin/decisions") as response:
            row = (await response.json())["decisions"][0]
        urls = {one.url, two.url}
        assert row["continued"] == {"how": "exact", "cause": "broke_midway", "replica": (urls - {row["replica"]}).pop()}
        assert row["reason"] == "retry"
        assert not row["verified"]
        assert receipt["completion_tokens"] == said_in(whole(CHAT, body_of(CHAT)))["usage"][0][1]
