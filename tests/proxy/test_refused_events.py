"""A request's own fault, told inside a stream: nobody is blamed, and nobody else is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import DONE, data_event, named_event
from router.router_server import RouterServer
from tests.support.fakes import (
    FakeEngine,
    Reply,
    events,
    generate_events,
    idle,
    message_events,
    response_events,
    running,
    stream,
)

TOO_LONG = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
ASKED: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 8, "messages": [], "prompt": "x", "input": "x"}
# What a stream begins with, and the event by which an engine refuses its request.
REFUSALS: dict[str, tuple[list[bytes], bytes]] = {
    "/v1/chat/completions": (events()[:2], data_event({"error": TOO_LONG})),
    "/v1/completions": (events()[:2], data_event({"error": {"code": 400}})),
    "/v1/messages": (message_events()[:3], named_event("error", error={"type": "invalid_request_error"})),
    "/v1/responses": (response_events()[:3], named_event("response.failed", response={"error": {"code": "400"}})),
    "/generate": (generate_events()[:1], data_event({"error": {"type": "BadRequestError", "code": None}})),
}


def refuses(pieces: list[bytes], *, cut: bool = False) -> Reply:
    """A reply of these events; with `cut` the connection breaks behind them."""

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        sent = await stream(request, pieces)
        if cut and request.transport is not None:
            request.transport.abort()
        return sent

    return reply


def blamed(app: RouterServer) -> int:
    """Failures in a row, of all replicas."""
    return sum(member.breaker.failures for member in app.control.router.members)


@pytest.mark.parametrize("path", REFUSALS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("cut", [False, True])
async def test_it_passes_once(client: ClientSession, engine: FakeEngine, path: str, begun: bool, cut: bool) -> None:
    """As the first event, or behind others; whether the engine ends the stream or breaks it off."""
    before, error = REFUSALS[path]
    before = before if begun else []
    async with FakeEngine() as other, running(engine, other) as app:
        for _ in range(4):
            for fake in (engine, other):
                fake.script.clear()
                fake.script.append(refuses([*before, error] if cut else [*before, error, DONE], cut=cut))
            async with client.post(app.url + path, json=ASKED | {"text": "x", "store": False}) as response:
                got = await response.read()
            assert got.removesuffix(DONE) == b"".join([*before, error])
            record = app.control.pages.decisions[-1]
            assert (record.ending, record.retries) == ("refused", ())
        assert len(engine.seen) + len(other.seen) == 4
        assert blamed(app) == 0
        assert idle(app)


async def test_a_stream_to_be_continued_is_not(client: ClientSession, engine: FakeEngine) -> None:
    """No other replica would make a request good that is at fault itself."""
    error = data_event({"error": TOO_LONG})
    chunk: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "delta": {"content": "w"}, "token_ids": [1]}]}
    begun = data_event({**chunk, "prompt_token_ids": [5, 6]})
    async with FakeEngine(owned_by="vllm") as other, running(engine, other) as app:
        engine.owned_by = "vllm"
        for fake in (engine, other):
            fake.script.append(refuses([begun, error, DONE]))
        asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-warmroute-stream-failover": "exact"}
        async with client.post(app.url + "/v1/chat/completions", json=asked, headers=headers) as response:
            got = await response.read()
        assert json.loads(got.split(b"\n\n")[-3].removeprefix(b"data: "))["error"] == TOO_LONG
        assert len(engine.seen) + len(other.seen) == 1
        assert blamed(app) == 0
