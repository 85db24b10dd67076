"""Rates of tokens that no stream evades, and counts that no engine makes up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import DONE, data_event, named_event
from router.core.dialects.tenant_isolation import CHAT, GENERATE, MESSAGES
from router.core.types.placements import Usage
from router.ingress.token_estimate import validate_usage
from tests.support.fakes import FakeEngine, Reply, running, status
from tests.support.keyring import Keyring

pytestmark = [
    pytest.mark.promise(
        "Streams count against token rates by tokens, whatever their events or usage fields say.", "tenants"
    ),
    pytest.mark.promise("Impossible token counts of an engine count towards no rate.", "tenants"),
]

RATE = 1_000
WORDS = "word " * 400  # some 500 tokens by four bytes each
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ABSURD = (1 << 30, 10**12, 9 * 10**18, 5_000_000)


def said(path: str) -> list[bytes]:
    """A stream of two events of many words, without usage."""
    if path == MESSAGES:
        delta = named_event("content_block_delta", index=0, delta={"type": "text_delta", "text": WORDS})
        stop = named_event("message_delta", delta={"stop_reason": "end_turn"})
        return [delta, delta, stop, named_event("message_stop")]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": WORDS}}]}] * 2
    return [*map(data_event, [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]), DONE]


def words(path: str, *, ends: bool = True) -> Reply:
    """Say them; without `ends` the end does not come, and the client leaves."""

    async def reply(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in said(path) if ends else said(path)[:2]:
            await response.write(event)
            await asyncio.sleep(0.001)  # so that each comes by itself, and takes the shortcut
        if not ends:
            await engine.go_on.wait()
        return response

    return reply


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("ends", [True, False], ids=["whole", "left"])
async def test_few_events_of_many_words_are_many_tokens(
    client: ClientSession, engine: FakeEngine, tmp_path: Path, path: str, ends: bool
) -> None:
    """An engine that puts hundreds of tokens into one event, and tells no usage, lets nobody get more than the rate:
    neither to the end of its streams, nor by leaving before."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": RATE})
    passed = 0
    async with running(engine, **ring.settings) as app:
        for _ in range(60):
            engine.script.append(words(path, ends=ends))
            asked = BODY | {"stream": True, "max_tokens": 1_000}
            async with client.post(app.url + path, json=asked, headers=ring.of("acme")) as answer:
                if answer.status == 429:
                    break
                passed += 1
                while came := await answer.content.readany():
                    if not ends and b"word" in came:
                        answer.close()
                        break
            while app.http.in_flight:
                await asyncio.sleep(0.005)
    assert 1 <= passed <= 3


async def test_who_leaves_a_stream_that_counts_pays_what_it_counted(client: ClientSession, tmp_path: Path) -> None:
    """Engines that tell in each event how many tokens there are so far, and repeat the text, are believed."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": RATE})

    async def counting(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n in range(1, 50):
            counted = {"prompt_tokens": 3, "completion_tokens": n, "finish_reason": None}
            await response.write(data_event({"text": WORDS * n, "meta_info": counted}))
        await engine.go_on.wait()
        return response

    async with FakeEngine(owned_by="sglang") as engine, running(engine, **ring.settings) as app:
        engine.script.append(counting)
        asked = {"model": "m", "text": "x", "stream": True}
        async with client.post(app.url + GENERATE, json=asked, headers=ring.of("acme")) as answer:
            while b'"completion_tokens":49' not in (await answer.content.readany()).replace(b" ", b""):
                pass
            answer.close()
        while app.http.in_flight:
            await asyncio.sleep(0.005)
        async with client.post(app.url + GENERATE, json=asked, headers=ring.of("acme")) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("asks", [True, False, "auto"])
async def test_usage_is_asked_for_where_tokens_are_limited(client: ClientSession, tmp_path: Path, asks: Any) -> None:
    """Engines that are known to tell usage are asked for it on behalf of a tenant with a rate of tokens, whatever the
    settings say of others, once one stream has shown that they send none unasked; the client does not get the event."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": RATE}, free={})
    async with FakeEngine(owned_by="vllm") as engine, running(engine, api__ask_usage=asks, **ring.settings) as app:
        for tenant, asked in (("acme", False), ("acme", True), ("free", asks is not False)):
            async with client.post(app.url + CHAT, json=BODY | {"stream": True}, headers=ring.of(tenant)) as answer:
                assert b'"usage"' not in await answer.read()
            assert ("stream_options" in engine.seen[-1].json) == asked


@pytest.mark.parametrize("tokens", ABSURD)
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_absurd_usage_locks_nobody_out(
    client: ClientSession, tmp_path: Path, tokens: int, field: str, stream: bool
) -> None:
    """Counts that a body, an answer and the model's context leave no room for are no usage: the tenant pays for what it
    got, and no counter of metrics has them."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": RATE})
    usage = {"prompt_tokens": 5, "completion_tokens": 5} | {field: tokens}
    async with FakeEngine(owned_by="vllm") as engine, running(engine, **ring.settings) as app:
        served = app.control.router.models.context_tokens("m")
        assert served < min(ABSURD), "the fake engine says how long a context it has"
        for _ in range(2):
            engine.script.append(absurd(usage, stream=stream))
            async with client.post(app.url + CHAT, json=BODY | {"stream": stream}, headers=ring.of("acme")) as answer:
                assert answer.status == 200
                await answer.read()
        page = (await app.control.metrics.page_in_slices()).decode()
    counted = [
        float(line.rpartition(" ")[2]) for line in page.splitlines() if "_tokens_total" in line and line[0] != "#"
    ]
    assert max(counted) < 1_000


def absurd(usage: dict[str, int], *, stream: bool) -> Reply:
    """An answer with this usage."""
    if not stream:
        return status(200, json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}))
    finish = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
    events = [data_event(finish), data_event({"choices": [], "usage": usage}), DONE]

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return reply


def test_what_can_be_is_believed() -> None:
    """Media and stored conversations fill a context that no body shows; several answers to one prompt have each as many
    tokens as bytes."""
    assert validate_usage(Usage(1_000, 10), 900, 0, 200) is not None
    assert validate_usage(Usage(1_101, 10), 900, 0, 200) is None
    assert validate_usage(Usage(10, 900), 10, 900, 200) is not None
    assert validate_usage(Usage(10, 901), 10, 900, 200) is None
    assert validate_usage(None, 1, 1, 1) is None
