"""Streams of the Responses API in two legs: engines send two events of them before any work is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from router.core.facts.legs import Handshake
from router.edge.edge import Edge
from tests.support.fakes import FakeEngine, Reply, named_event, ok, reset, response_events, stream
from tests.support.splitting import SplitPlacer, splitting
from tests.support.waiting import until

EARLY = 2  # events before any work
FAILED = named_event("response.failed", sequence_number=EARLY, response={"status": "failed", "error": {"code": "x"}})


@asynccontextmanager
async def pair(**overrides: float) -> AsyncIterator[tuple[FakeEngine, FakeEngine, Edge, SplitPlacer]]:
    """An engine that prefills, one that decodes, and an edge before them."""
    async with FakeEngine(owned_by="vllm") as prefill, FakeEngine(owned_by="vllm") as decode:
        addresses = {prefill.url: "127.0.0.1:5710"}
        legs = ([prefill.url], [decode.url], addresses)
        async with splitting(Handshake.OFFLOADING, *legs, **overrides) as (edge, placer, _):
            yield prefill, decode, edge, placer


async def asked(edge: Edge) -> tuple[int, bytes]:
    """(status, body) of a streamed response."""
    body = {"model": "m", "input": "hi", "stream": True, "store": False}
    async with ClientSession() as client, client.post(f"{edge.url}/v1/responses", json=body) as response:
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
    async with pair() as (prefill, decode, edge, placer):
        prefill.script.append(behind(decode, reset))
        decode.script.append(early_then(lambda _: None))
        assert await asked(edge) == (200, b"".join(response_events()))
        assert placer.placed == [(prefill.url, decode.url), ("", decode.url)]
        assert placer.failures == [(prefill.url, "prefill_broke_early")]
        async with asyncio.timeout(60):
            await decode.cancelled.wait()


async def test_blocks_that_did_not_come_are_told_in_a_third_event() -> None:
    """The decoding engine's stream fails behind the early events: the request is tried again in one leg."""
    async with pair() as (prefill, decode, edge, placer):

        async def fails(_: FakeEngine, request: web.Request) -> web.StreamResponse:
            return await stream(request, [*response_events()[:EARLY], FAILED])

        decode.script.append(fails)
        assert await asked(edge) == (200, b"".join(response_events()))
        assert placer.placed == [(prefill.url, decode.url), ("", decode.url)]
        assert placer.failures == [(decode.url, "decode_blocks")]
        assert placer.broken == [(prefill.url, decode.url)]


async def test_early_events_are_no_beginning() -> None:
    """The prefill has ended, and nothing comes behind the early events: the stream is tried again at the time in which
    it should have begun."""
    async with pair(pulls__stall_s=0.05, upstream__first_byte_timeout_s=600.0) as (_, decode, edge, placer):
        decode.script.append(early_then(lambda _: None))
        async with asyncio.timeout(60):
            assert await asked(edge) == (200, b"".join(response_events()))
        assert placer.failures == [(decode.url, "decode_blocks_stalled")]


@pytest.mark.parametrize("pieces", [1, 3, len(response_events())])
async def test_what_came_early_comes_first(pieces: int) -> None:
    """However the events are cut, the client gets the engine's bytes, in their order, when work has begun."""
    said = b"".join(response_events())
    size = -(-len(said) // pieces)

    async def cut(_: FakeEngine, request: web.Request) -> web.StreamResponse:
        return await stream(request, [said[at : at + size] for at in range(0, len(said), size)])

    async with pair() as (prefill, decode, edge, placer):
        prefill.script.append(ok)
        decode.script.append(cut)
        assert await asked(edge) == (200, said)
        assert placer.failures == []
        assert placer.placed == [(prefill.url, decode.url)]


async def test_a_client_that_leaves_behind_early_events_ends_both_legs() -> None:
    """It has heard nothing yet, and both engines are told at once."""
    async with pair() as (prefill, decode, edge, placer):
        prefill.script.append(early_then(lambda _: None))
        decode.script.append(early_then(lambda _: None))
        asking = asyncio.create_task(asked(edge))
        async with asyncio.timeout(60):
            await asyncio.gather(prefill.at_work.wait(), decode.at_work.wait())
        asking.cancel()
        await until(lambda: not (edge.proxy.in_flight or edge.legs.open or placer.legs))
        async with asyncio.timeout(60):
            await asyncio.gather(prefill.cancelled.wait(), decode.cancelled.wait())
        assert placer.failures == []
