"""Streams in two legs whose first events come of no work: two of the Responses API, chat's role, `message_start`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from loadtest.common.answers import DONE, data_event, named_event
from router.core.types.disagg_types import KvConnector
from router.proxy.http_frontend import HttpFrontend
from tests.support.fakes import FakeEngine, Reply, events, message_events, ok, reset, response_events, stream
from tests.support.splitting import SplitPlacer, splitting
from tests.support.waiting import until

EARLY = 2  # events of the Responses API before any work
ROLE = data_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
FAILED = named_event("response.failed", sequence_number=EARLY, response={"status": "failed", "error": {"code": "x"}})
SAID = {"role": "user", "content": "hi"}
# Path -> (body, what a decoding engine of vLLM's says where no blocks came, what a healthy engine says).
BROKEN: dict[str, tuple[dict[str, Any], list[bytes], list[bytes]]] = {
    "/v1/responses": ({"input": "hi", "store": False}, [*response_events()[:EARLY], FAILED], response_events()),
    "/v1/chat/completions": (
        {"messages": [SAID]},
        [ROLE, data_event({"error": {"message": "Internal server error", "code": 500}}), DONE],
        events(),
    ),
    "/v1/messages": (
        {"messages": [SAID], "max_tokens": 9},
        [message_events()[0], named_event("error", error={"type": "internal_error", "message": "x"})],
        message_events(),
    ),
}


@asynccontextmanager
async def pair(**overrides: Any) -> AsyncIterator[tuple[FakeEngine, FakeEngine, HttpFrontend, SplitPlacer]]:
    """An engine that prefills, one that decodes, and a frontend before them."""
    async with FakeEngine(owned_by="vllm") as prefill, FakeEngine(owned_by="vllm") as decode:
        addresses = {prefill.url: "127.0.0.1:5710"}
        legs = ([prefill.url], [decode.url], addresses)
        async with splitting(KvConnector.OFFLOADING, *legs, **overrides) as (http, placer, _):
            yield prefill, decode, http, placer


async def asked(http: HttpFrontend, path: str = "/v1/responses") -> tuple[int, bytes]:
    """(status, body) of a stream."""
    body = {"model": "m", "stream": True, **BROKEN[path][0]}
    async with ClientSession() as client, client.post(f"{http.url}{path}", json=body) as response:
        return response.status, await response.read()


def early_then(then: Callable[[web.StreamResponse], object]) -> Reply:
    """The early events, and when `go_on` is set whatever `then` does."""

    async def reply(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in response_events()[:EARLY]:
            await response.write(piece)
        engine.at_work.set()
        await engine.go_on.wait()
        then(response)
        return response

    return reply


def behind(other: FakeEngine, reply: Reply) -> Reply:
    """The reply, once the other engine has sent what it sends early."""

    async def late(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await other.at_work.wait()
        await asyncio.sleep(0)
        return await reply(engine, request)

    return late


async def test_a_prefill_that_breaks_behind_early_events_is_made_good() -> None:
    """The decoding engine has said that the request arrived, which its client has not been told: it gets the answer of
    another attempt, whole."""
    async with pair() as (prefill, decode, http, placer):
        prefill.script.append(behind(decode, reset))
        decode.script.append(early_then(lambda _: None))
        assert await asked(http) == (200, b"".join(response_events()))
        assert placer.placed == [(prefill.url, decode.url), ("", decode.url)]
        assert placer.failures == [(prefill.url, "prefill_broke_early")]
        async with asyncio.timeout(60):
            await decode.cancelled.wait()


@pytest.mark.parametrize("path", BROKEN)
@pytest.mark.parametrize("at_once", [True, False])
async def test_blocks_that_did_not_come_are_told_behind_early_events(path: str, at_once: bool) -> None:
    """The decoding engine's stream fails behind events that come of no work, in one piece with them or not: the request
    is tried again in one leg, and its client hears of the answer alone."""
    _, said, healthy = BROKEN[path]
    async with pair() as (prefill, decode, http, placer):

        async def fails(_: FakeEngine, request: web.Request) -> web.StreamResponse:
            return await stream(request, [b"".join(said)] if at_once else said)

        decode.script.append(fails)
        assert await asked(http, path) == (200, b"".join(healthy))
        assert placer.placed == [(prefill.url, decode.url), ("", decode.url)]
        assert placer.failures == [(decode.url, "decode_blocks")]
        assert placer.broken == [(prefill.url, decode.url)]


async def test_a_stream_that_is_nothing_but_a_role_is_whole() -> None:
    """Where no more comes, what came is passed on as it is."""
    async with pair() as (_, decode, http, placer):

        async def short(_: FakeEngine, request: web.Request) -> web.StreamResponse:
            return await stream(request, [ROLE])

        decode.script.append(short)
        status, body = await asked(http, "/v1/chat/completions")
        assert (status, body.startswith(ROLE)) == (200, True)
        assert len(placer.placed) == 1


async def test_early_events_are_no_beginning() -> None:
    """The prefill has ended, and nothing comes behind the early events: the stream is tried again at the time in which
    it should have begun."""
    async with pair(p2p__timeout_s=0.05, upstream__first_byte_timeout_s=600.0) as (_, decode, http, placer):
        decode.script.append(early_then(lambda _: None))
        async with asyncio.timeout(60):
            assert await asked(http) == (200, b"".join(response_events()))
        assert placer.failures == [(decode.url, "decode_blocks_stalled")]


@pytest.mark.parametrize("pieces", [1, 3, len(response_events())])
async def test_what_came_early_comes_first(pieces: int) -> None:
    """However the events are cut, the client gets the engine's bytes, in their order, when work has begun."""
    said = b"".join(response_events())
    size = -(-len(said) // pieces)

    async def cut(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [said[at : at + size] for at in range(0, len(said), size)])

    async with pair() as (prefill, decode, http, placer):
        prefill.script.append(ok)
        decode.script.append(cut)
        assert await asked(http) == (200, said)
        assert placer.failures == []
        assert placer.placed == [(prefill.url, decode.url)]


async def test_a_client_that_leaves_behind_early_events_ends_both_legs() -> None:
    """It has heard nothing yet, and both engines are told at once."""
    async with pair() as (prefill, decode, http, placer):
        prefill.script.append(early_then(lambda _: None))
        decode.script.append(early_then(lambda _: None))
        asking = asyncio.create_task(asked(http))
        async with asyncio.timeout(60):
            await asyncio.gather(prefill.at_work.wait(), decode.at_work.wait())
        asking.cancel()
        await until(lambda: not (http.proxy.in_flight or http.legs.open or placer.legs))
        async with asyncio.timeout(60):
            await asyncio.gather(prefill.cancelled.wait(), decode.cancelled.wait())
        assert placer.failures == []
