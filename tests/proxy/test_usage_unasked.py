"""Engines that send usage to all clients: these get the bytes that the engine sends, from the first stream on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from router.ingress.usage import LEFT_ALONE
from tests.extproc.asking import asking, chat, picking
from tests.support.fakes import DONE, USAGE, FakeEngine, Reply, data_event, running, stream
from tests.support.keyring import Keyring

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
LAST = {"id": "c", "choices": [], "usage": USAGE}


def sent(*, beside: bool = False, last: bool = False) -> list[bytes]:
    """A stream with usage `beside` its choices, and in a `last` event."""
    more = {"usage": USAGE} if beside else {}
    events = [{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}], **more} for _ in range(3)]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **more})
    return [*map(data_event, (*events, *([LAST] if last else []))), DONE]


def starts_with(**flags: bool) -> Reply:
    """The answers of an engine that was started so, and that gives who asks what it asked for."""

    async def reply(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        options = engine.seen[-1].json.get("stream_options") or {}
        last = bool(flags.get("last") or options.get("include_usage"))
        beside = bool(flags.get("beside") or options.get("continuous_usage_stats"))
        return await stream(request, sent(beside=beside, last=last))

    return reply


FORCED = {"sglang": {"last": True}, "vllm": {"last": True, "beside": True}}


async def got(client: ClientSession, url: str, path: str = CHAT, **more: Any) -> bytes:
    """What a client gets of one stream."""
    body = BODY | ({"prompt": "hi"} if path == COMPLETIONS else {}) | more.pop("fields", {})
    async with client.post(url + path, json=body, **more) as answer:
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("kind", FORCED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_clients_get_what_the_engine_sends(client: ClientSession, kind: str, path: str) -> None:
    """Nothing is asked for, nothing is taken out, and the router knows the usage all the same."""
    flags = FORCED[kind]
    async with FakeEngine(owned_by=kind) as engine, running(engine) as app:
        for _ in range(3):
            engine.script.append(starts_with(**flags))
            assert await got(client, app.url, path) == b"".join(sent(**flags))
            assert "stream_options" not in engine.seen[-1].json
        assert app.control.pages.decisions[-1].usage is not None


async def test_streams_that_begin_together_are_all_left_as_they_are(client: ClientSession) -> None:
    """Nothing is known of a replica before one of its streams is whole."""
    async with FakeEngine(owned_by="sglang") as engine, running(engine) as app:
        engine.script += [starts_with(last=True)] * 8
        every = await asyncio.gather(*(got(client, app.url) for _ in range(8)))
    assert every == [b"".join(sent(last=True))] * 8


async def test_an_engine_that_is_started_anew_is_looked_at_anew(client: ClientSession) -> None:
    """With a flag that it did not have before, or without the one that it had."""
    async with FakeEngine(owned_by="sglang") as engine, running(engine) as app:
        for flags in ({}, {"last": True}, {}):
            app.http.on_replica_unreachable(engine.url)
            for asked in (False, not flags):
                engine.script.append(starts_with(**flags))
                assert await got(client, app.url) == b"".join(sent(**flags))
                assert ("stream_options" in engine.seen[-1].json) is asked


async def test_a_new_flag_is_found_out_in_time(client: ClientSession) -> None:
    """An engine started anew behind an address that never refused: usage beside choices shows its flag at once, a last
    event in the next stream that is left as it is."""
    async with FakeEngine(owned_by="vllm") as engine, running(engine) as app:
        for _ in range(2):
            engine.script.append(starts_with())
            assert await got(client, app.url) == b"".join(sent())
        engine.script.append(starts_with(beside=True, last=True))
        assert await got(client, app.url) == b"".join(sent(beside=True, last=True))
        assert "stream_options" in engine.seen[-1].json
        engine.script.append(starts_with(beside=True, last=True))
        await got(client, app.url)
        assert "stream_options" not in engine.seen[-1].json
    async with FakeEngine(owned_by="sglang") as engine, running(engine) as app:
        engine.script += [starts_with(), *[starts_with(last=True)] * (LEFT_ALONE + 1)]
        whole = [b'"usage"' in await got(client, app.url) for _ in range(LEFT_ALONE + 2)]
    assert whole == [False] * LEFT_ALONE + [True, True]


async def test_a_stream_that_does_not_end_well_shows_nothing(client: ClientSession) -> None:
    """One that breaks before its usage may come, and one of an error."""

    async def broken(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = await stream(request, sent()[:2])
        request.transport.close()  # type: ignore[union-attr]  # it is open
        return response

    async with FakeEngine(owned_by="sglang") as engine, running(engine) as app:
        engine.script += [broken, starts_with(last=True)]
        assert b"stream_broken" in await got(client, app.url)
        assert await got(client, app.url) == b"".join(sent(last=True))


@pytest.mark.parametrize("kind", FORCED)
async def test_usage_in_every_event_is_the_clients_own_affair(client: ClientSession, kind: str) -> None:
    """A client that asks for it gets its own options, alone or with usage at the end, and all that the engine makes of
    them."""
    async with FakeEngine(owned_by=kind) as engine, running(engine) as app:
        engine.script += [starts_with()] * 4
        await got(client, app.url)
        for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": True}):
            last = "include_usage" in options
            alike = await got(client, app.url, fields={"stream_options": options})
            assert alike == b"".join(sent(beside=True, last=last))
            assert engine.seen[-1].json["stream_options"] == options
        await got(client, app.url)
        assert "stream_options" in engine.seen[-1].json, "the client's own wish says nothing of the engine"


async def test_tenants_with_a_rate_of_tokens_get_the_same(client: ClientSession, tmp_path: Path) -> None:
    """What they pay for is counted by usage that comes unasked, too."""
    ring = Keyring(tmp_path, acme={"tokens_per_min": 100_000})
    async with FakeEngine(owned_by="sglang") as engine, running(engine, **ring.settings) as app:
        for _ in range(2):
            engine.script.append(starts_with(last=True))
            assert await got(client, app.url, headers=ring.of("acme")) == b"".join(sent(last=True))
        assert app.control.pages.decisions[-1].usage is not None


async def test_behind_a_gateway_it_is_the_same(engine: FakeEngine) -> None:
    """The first stream is left as it is; then usage is asked for, or never, as that stream has shown."""
    engine.owned_by = "vllm"
    for shown in (sent(last=True), sent(), sent(beside=True)):
        async with picking(engine) as app:
            for asked in (False, shown == sent()):
                async with asking(app, "buffered", "streamed") as it:
                    picked = await it.pick(chat(stream=True))
                    body = picked.request_body.response.body_mutation.body
                    assert (b"include_usage" in body) is asked
                    await it.answer()
                    await it.hear()
                    for n, piece in enumerate(shown):
                        await it.piece(piece, end=n == len(shown) - 1)
                        passed = await it.hear()
                        assert passed is not None
                        mutation = passed.response_body.response.body_mutation
                        assert mutation.WhichOneof("mutation") is None or mutation.body == piece
                    await it.finish()
