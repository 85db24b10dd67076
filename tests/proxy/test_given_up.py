"""Answers that an engine ended before their time, since an operator aborted them or since it is about to leave."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import DONE, data_event
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, Reply, idle, running, stream

CHAT, COMPLETIONS, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"


def reason(status: int | None = None) -> dict[str, Any]:
    """SGLang's."""
    return {"type": "abort", "message": "Aborted", "status_code": status, "err_type": None}


def answer(path: str, text: str, status: int | None = None) -> dict[str, Any]:
    """A whole answer that was given up when it had come to this text."""
    if path == GENERATE:
        meta = {"prompt_tokens": 5, "completion_tokens": len(text), "finish_reason": reason(status)}
        return {"text": text, "output_ids": [7] if text else [], "meta_info": meta}
    if path == MESSAGES:
        content = [{"type": "text", "text": text}] if text else []
        return {"type": "message", "content": content, "usage": {"input_tokens": 5, "output_tokens": len(text)}}
    said = {"text": text} if path == COMPLETIONS else {"message": {"role": "assistant", "content": text or None}}
    return {"choices": [{"index": 0, **said, "finish_reason": "abort"}], "usage": {"prompt_tokens": 5}}


def gives_up(path: str, text: str, status: int | None = None, *, streams: bool = False, spaces: bool = False) -> Reply:
    """An engine that does."""
    made = answer(path, text, status)
    if streams and path == CHAT:
        delta = {"delta": {"content": text}, "finish_reason": "abort"}
        made = {"choices": [{"index": 0, **delta}]}

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        if streams:
            return await stream(request, [data_event(made), DONE])
        body = json.dumps(made, separators=None if spaces else (",", ":"))
        return web.Response(text=body, content_type="application/json")

    return reply


def blamed(app: RouterServer) -> int:
    """Failures in a row, of all replicas."""
    return sum(member.breaker.failures for member in app.control.router.members)


async def ask(client: ClientSession, app: RouterServer, path: str, *, streams: bool = False, **headers: str) -> str:
    """What the client gets."""
    asked = {"model": "m", "stream": streams, "text": "x", "prompt": "x", "messages": [], "max_tokens": 8}
    async with client.post(app.url + path, json=asked, headers=headers) as response:
        assert response.status == 200
        return await response.text()


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, GENERATE])
async def test_a_part_reaches_its_client(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str, spaces: bool
) -> None:
    """While its replica is well, the operator wanted just that."""
    async with running(engine, other) as app:
        for _ in range(4):
            for fake in (engine, other):
                fake.script.clear()
                fake.script.append(gives_up(path, "half of it", spaces=spaces))
            assert "half of it" in await ask(client, app, path)
            assert app.control.pages.decisions[-1].retries == ()
        assert len(engine.seen) + len(other.seen) == 4
        assert blamed(app) == 0
        assert idle(app)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_a_part_in_a_stream(client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str) -> None:
    """That came at once, with its reason."""
    async with running(engine, other) as app:
        for fake in (engine, other):
            fake.script.append(gives_up(path, "half of it", streams=True))
        said = await ask(client, app, path, streams=True)
        assert "half of it" in said
        assert said.endswith(DONE.decode())
        assert (len(engine.seen) + len(other.seen), blamed(app)) == (1, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, GENERATE])
@pytest.mark.parametrize("streams", [False, True])
async def test_nothing_is_made_good_elsewhere(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str, streams: bool
) -> None:
    """An answer without a token is tried on another replica, and nobody is blamed; where no other is left, the client
    gets what there is."""
    streams = streams and path != MESSAGES
    async with running(engine, other) as app:
        for fake in (engine, other):
            fake.script.append(gives_up(path, "", streams=streams))
        await ask(client, app, path, streams=streams)
        assert len(engine.seen) == len(other.seen) == 1
        assert blamed(app) == 0
        assert len(app.control.pages.decisions[-1].retries) == 1


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_replica_that_is_not_well_is_no_operators_doing(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str
) -> None:
    """Its `/health` fails at that moment, or nobody listens there any more: the answer is made anew, and it is
    blamed."""
    failed: list[FakeEngine] = []

    async def fails_once(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        failed.append(fake)
        fake.healthy = len(failed) > 1
        return await gives_up(path, "half of it" if len(failed) == 1 else "all of it")(fake, request)

    async with running(engine, other) as app:
        for fake in (engine, other):
            fake.script.append(fails_once)
        assert "all of it" in await ask(client, app, path)
        assert blamed(app) == 1


async def test_sglang_says_that_it_failed(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """An abort with a status of 500 and above is a failure, whatever was generated; one below is the answer."""
    async with running(engine, other) as app:
        for fake in (engine, other):
            fake.script.extend([gives_up(GENERATE, "half", 500), gives_up(GENERATE, "half", 400)])
        await ask(client, app, GENERATE)
        assert len(engine.seen) == len(other.seen) == 1
        assert blamed(app) == 1
        assert "half" in await ask(client, app, GENERATE)
        assert len(engine.seen) + len(other.seen) == 3


@pytest.mark.parametrize("well", [True, False])
async def test_a_stream_to_be_continued(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, well: bool
) -> None:
    """It ends as its engine ended it while the replica is well; else another one goes on."""
    first = {"id": "c", "choices": [{"index": 0, "text": "w0 ", "token_ids": [1], "finish_reason": None}]}
    begun = {**first, "choices": [{**first["choices"][0], "prompt_token_ids": [5, 6]}]}  # type: ignore[dict-item]
    last = {"id": "c", "choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}]}
    asked: list[FakeEngine] = []

    async def reply(fake: FakeEngine, request: web.Request) -> web.StreamResponse:
        asked.append(fake)
        if len(asked) > 1:
            rest = {**last, "choices": [{**last["choices"][0], "finish_reason": "stop"}]}  # type: ignore[dict-item]
            return await stream(request, [data_event({**first, "id": "d"}), data_event(rest), DONE])
        fake.healthy = well
        return await stream(request, [data_event(begun), data_event(last), DONE])

    engine.owned_by = other.owned_by = "vllm"
    async with running(engine, other) as app:
        for fake in (engine, other):
            fake.script.append(reply)
        said = await ask(client, app, COMPLETIONS, streams=True, **{"x-warmroute-stream-failover": "exact"})
        assert ('"abort"' in said) is well
        assert said.endswith(DONE.decode())
        assert len(asked) == (1 if well else 2)
        assert blamed(app) == (0 if well else 1)
