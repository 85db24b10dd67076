"""Where the picker sends a request, and what Envoy is told of it, in every mode of bodies."""

from __future__ import annotations

import time

import pytest

from router.extproc.processing_responses import CHUNK_BYTES_MAX
from tests.extproc.asking import CHAT, asking, chat, destinations, endpoint, picking, removed, set_headers
from tests.support.fakes import FakeEngine
from tests.support.figures import figure
from tests.support.waiting import until


async def test_a_request_is_sent_to_a_replica(engine: FakeEngine) -> None:
    """The endpoint is named in a header and in metadata, alike; the body stays as it came."""
    async with picking(engine) as app, asking(app) as it:
        told = await it.pick()
        assert destinations(told) == [endpoint(engine)]
        assert not told.request_body.response.HasField("body_mutation")
        assert "x-request-id" in set_headers(told)


async def test_a_conversation_stays_where_its_prefix_is(engine: FakeEngine, other: FakeEngine) -> None:
    """Turns of a conversation go to one replica, and the other is named as the one to try next."""
    text = "word " * 2_000
    async with picking(engine, other) as app:
        chosen = []
        for turn in range(3):
            async with asking(app) as it:
                chosen.append(destinations(await it.pick(chat(text + "x" * turn * 512))))
                await it.answer()
                assert await it.hear() is not None
                await it.finish()
        assert len({each[0] for each in chosen}) == 1
        assert {frozenset(each) for each in chosen} == {frozenset((endpoint(engine), endpoint(other)))}


async def test_no_fallbacks_where_the_gateway_takes_one_endpoint(engine: FakeEngine, other: FakeEngine) -> None:
    """`extproc.fallbacks_max: 0` names one endpoint, as ORIGINAL_DST wants it."""
    async with picking(engine, other, extproc__fallbacks_max=0) as app, asking(app) as it:
        assert len(destinations(await it.pick())) == 1


async def test_full_duplex_gets_its_body_back(engine: FakeEngine) -> None:
    """With FULL_DUPLEX_STREAMED nothing is said before all of the body is here; then head and body go back in order."""
    body = chat("word " * 30_000)
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        await it.head()
        for at in range(0, len(body), 50_000):
            await it.body(body[at : at + 50_000], end=at + 50_000 >= len(body))
        told = await it.hear()
        assert told is not None
        assert destinations(told) == [endpoint(engine)]
        assert set_headers(told)["content-length"] == str(len(body))
        pieces = []
        while not pieces or not pieces[-1].end_of_stream:
            piece = await it.hear()
            assert piece is not None
            pieces.append(piece.request_body.response.body_mutation.streamed_response)
        assert b"".join(piece.body for piece in pieces) == body
        assert max(len(piece.body) for piece in pieces) <= CHUNK_BYTES_MAX


async def test_trailers_end_a_body_too(engine: FakeEngine) -> None:
    """A body that is ended by trailers gets them answered behind its last piece."""
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        await it.head()
        await it.body(chat(), end=False)
        await it.send(request_trailers={})
        told = [await it.hear() for _ in range(3)]
        assert [each.WhichOneof("response") for each in told if each] == [
            "request_headers", "request_body", "request_trailers"
        ]  # fmt: skip
        assert told[1] is not None
        assert not told[1].request_body.response.body_mutation.streamed_response.end_of_stream


@pytest.mark.parametrize("mode", ["none", "streamed", "partial"])
async def test_a_body_that_stays_away_is_placed_unread(engine: FakeEngine, mode: str) -> None:
    """Where the body does not come by here in time, the replica is named with the head."""
    async with picking(engine) as app, asking(app, mode) as it:
        await it.head()
        told = await it.hear()
        assert told is not None
        assert destinations(told) == [endpoint(engine)]
        if mode == "streamed":
            await it.body(chat())
            passed = await it.hear()
            assert passed is not None
            assert passed.HasField("request_body")


async def test_a_request_without_a_body_is_placed(engine: FakeEngine) -> None:
    """A stored response is fetched from a replica: the head is all there is."""
    async with picking(engine) as app, asking(app) as it:
        await it.head("/v1/responses/resp_1", method="GET", end=True)
        told = await it.hear()
        assert told is not None
        assert told.HasField("request_headers")
        assert destinations(told) == [endpoint(engine)]


async def test_a_forged_destination_is_replaced(engine: FakeEngine) -> None:
    """A client that names an endpoint gets the one that was picked, however often it names one."""
    forged = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-warmroute-tenant": "acme"}
    async with picking(engine) as app, asking(app) as it:
        told = await it.pick(headers=forged)
        assert destinations(told) == [endpoint(engine)]
        assert removed(told) == {"x-warmroute-tenant"}


async def test_only_endpoints_of_the_subset_are_picked(engine: FakeEngine, other: FakeEngine) -> None:
    """A subset hint is heeded, by address or by host; with none that is known the request is refused."""
    async with picking(engine, other) as app:
        for _ in range(4):
            async with asking(app) as it:
                assert destinations(await it.pick(subset=[endpoint(other)])) == [endpoint(other)]
        async with asking(app) as it:
            assert len(destinations(await it.pick(subset=["127.0.0.1"]))) == 2
        for nobody in ([], ["10.0.0.1:8000"]):
            async with asking(app) as it:
                told = await it.pick(subset=nobody)
                assert told.immediate_response.status.code == 503


@pytest.mark.figures
async def test_a_lease_ends_with_its_stream(engine: FakeEngine) -> None:
    """The lease is open until the gateway ends the stream, and is back at once when the client leaves."""
    async with picking(engine) as app:
        (member,) = app.router.members
        async with asking(app) as it:
            await it.pick(chat(stream=True))
            await it.answer()
            assert await it.hear() is not None
            assert len(member.leases) == 1
            await it.finish()
        assert not member.leases
        async with asking(app) as it:
            await it.pick(chat(stream=True))
            assert len(member.leases) == 1
            it.leave()
            left_s = time.monotonic()
            await until(lambda: not member.leases)
            figure("gateway_lease_back_ms", 50.0, (time.monotonic() - left_s) * 1e3)
        assert app.extproc.in_flight == 0


async def test_an_unknown_mode_is_taken_for_buffered(engine: FakeEngine) -> None:
    """A gateway that does not say how it shows bodies, as older ones, is taken to send whole ones."""
    async with picking(engine) as app, asking(app) as it:
        message: dict[str, object] = {"headers": {"headers": []}}
        pairs = {":method": b"POST", ":path": CHAT.encode()}
        message["headers"] = {"headers": [{"key": k, "raw_value": v} for k, v in pairs.items()]}
        await it.send(request_headers=message)
        first = await it.hear()
        assert first is not None
        assert first.HasField("request_headers")
        await it.body(chat())
        told = await it.hear()
        assert told is not None
        assert destinations(told) == [endpoint(engine)]
