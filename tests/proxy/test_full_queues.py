"""A full queue is no death: nobody is blamed, one other replica is tried, and clients hear when to come again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import DONE, data_event, named_event
from router.core.fleet.breaker import State
from router.router_server import RouterServer
from tests.support.fakes import FakeEngine, Reply, error_event, idle, running, status, stream

CHAT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"
FULL = {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
SCRUBBED = {"type": "error", "error": {"type": "overloaded_error", "message": "Internal server error"}}
ABORT = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
WHOLE: dict[str, dict[str, Any]] = {CHAT: FULL, GENERATE: FULL, MESSAGES: SCRUBBED, RESPONSES: {"error": FULL}}
EVENTS: dict[str, bytes] = {
    CHAT: data_event({"error": FULL}),
    GENERATE: data_event({"text": "", "meta_info": {"finish_reason": ABORT}}),
    MESSAGES: named_event("error", error=SCRUBBED["error"]),
    RESPONSES: data_event({"error": FULL}),
}
OTHER = json.dumps({"error": {"message": "Not now.", "type": "Unavailable", "code": 503}})


def full(path: str, *, streams: bool) -> Reply:
    """An engine whose queue is full."""

    async def reply(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [EVENTS[path], DONE])

    return reply if streams else status(503, json.dumps(WHOLE[path]))


def states(app: RouterServer) -> set[State]:
    """What the replicas are sent."""
    return {member.state(app.control.placer._clock()) for member in app.control.router.members}


async def ask(client: ClientSession, app: RouterServer, path: str, *, streams: bool) -> tuple[int, str]:
    """Status, and Retry-After."""
    asked = {
        "model": "m",
        "stream": streams,
        "text": "x",
        "input": "x",
        "messages": [],
        "max_tokens": 8,
        "store": False,
    }
    async with client.post(app.url + path, json=asked) as response:
        await response.read()
        return response.status, response.headers.get("Retry-After", "")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", WHOLE)
async def test_the_other_one_is_tried(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, path: str, streams: bool
) -> None:
    """Once each, however often; and what has room again is found at once."""
    async with running(engine, other) as app:
        for _ in range(4):
            for fake in (engine, other):
                fake.script.append(full(path, streams=streams))
            assert await ask(client, app, path, streams=streams) == (429, "1")
            assert not engine.script
            assert not other.script
        assert states(app) == {State.RESTING}
        assert not any(member.breaker.failures for member in app.control.router.members)
        assert (await ask(client, app, path, streams=streams))[0] == 200
        assert idle(app)


@pytest.mark.parametrize("streams", [False, True])
async def test_one_that_has_room_serves(
    client: ClientSession, engine: FakeEngine, other: FakeEngine, streams: bool
) -> None:
    """No client sees the full one, which is left alone for a moment."""
    async with running(engine, other, routing__policy="round_robin") as app:
        engine.script.append(full(CHAT, streams=streams))
        for _ in range(6):
            assert (await ask(client, app, CHAT, streams=streams))[0] == 200
        assert len(engine.seen) == 1
        assert not any(member.breaker.failures for member in app.control.router.members)


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("served", [True, False])
async def test_other_words(client: ClientSession, engine: FakeEngine, well: bool, served: bool) -> None:
    """Any other 503 with an error of the engine's is the same, if the engine is well and has served others lately;
    else it is a failure."""
    async with running(engine) as app:
        if served:
            assert (await ask(client, app, CHAT, streams=False))[0] == 200
        engine.healthy = well
        engine.script.append(status(503, OTHER))
        expected = (429, "1") if well and served else (503, "")
        assert await ask(client, app, CHAT, streams=False) == expected
        (member,) = app.control.router.members
        assert member.breaker.failures == (0 if well and served else 1)


async def test_no_error_of_an_engine(client: ClientSession, engine: FakeEngine) -> None:
    """A proxy's 503 says that the engine behind it is gone; so does an engine's 500 in a stream."""
    async with running(engine) as app:
        assert (await ask(client, app, CHAT, streams=False))[0] == 200
        engine.script.extend([status(503, "<html>no healthy upstream</html>"), error_event])
        assert (await ask(client, app, CHAT, streams=False))[0] == 503
        await ask(client, app, CHAT, streams=True)
        (member,) = app.control.router.members
        assert member.breaker.failures == 2
