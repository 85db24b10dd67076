"""What the picker makes of answers: receipts, endings, first tokens, usage, and who is charged with a failure."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.types.placements import Confidence, EndReason, PlacementReason
from router.router_server import RouterServer
from router.telemetry.request_record import RequestRecord
from tests.extproc.asking import Asking, asking, chat, destinations, endpoint, picking, removed, set_headers
from tests.support.fakes import USAGE, FakeEngine, events
from tests.support.waiting import until


async def ended(app: RouterServer, count: int = 1) -> RequestRecord:
    """The record of the last of so many requests that have ended."""
    await until(lambda: len(app.control.history.recent) == count)
    return app.control.history.recent[-1]


async def told(it: Asking, status: int = 200, **more: Any) -> dict[str, str]:
    """Headers that the client gets with an answer of this status."""
    await it.answer(status, **more)
    said = await it.hear()
    assert said is not None
    return set_headers(said)


async def test_an_unseen_answer_is_graded_so(engine: FakeEngine) -> None:
    """In the cheap mode the receipt says `unseen`, the record ends well with nothing counted, and the replica's page
    says how many answers went past."""
    async with picking(engine) as app:
        async with asking(app) as it:
            await it.pick(chat(stream=True))
            headers = await told(it)
            await it.finish()
        record = await ended(app)
        assert headers["x-warmroute-grade"] == Confidence.UNSEEN == record.receipt.grade  # type: ignore[union-attr]  # it has one
        assert headers["x-warmroute-replica"] == engine.url
        assert (record.status, record.ending, record.usage, record.times.ttft_s) == (200, EndReason.OK, None, None)
        assert record.stream
        (member,) = app.router.members
        assert app.control.pages._replica(member, 0.0)["unseen_answers"] == 1
        assert app.router.fleet.member(engine.url).breaker.failures == 0  # type: ignore[union-attr]  # it is there


async def test_a_stream_that_is_shown_teaches(engine: FakeEngine) -> None:
    """With bodies streamed by, first tokens, events and usage are known, and the grade is an ordinary one."""
    async with picking(engine) as app:
        async with asking(app, "buffered", "streamed") as it:
            await it.pick(chat(stream=True, stream_options={"include_usage": True}))
            assert (await told(it))["x-warmroute-grade"] == Confidence.ESTIMATED
            pieces = events(usage=USAGE)
            for n, piece in enumerate(pieces):
                await it.piece(piece, end=n == len(pieces) - 1)
                passed = await it.hear()
                assert passed is not None
                assert not passed.response_body.response.HasField("body_mutation")
            await it.finish()
        record = await ended(app)
        assert record.usage is not None
        assert (record.usage.prompt_tokens, record.usage.cached_tokens) == (100, 32)
        assert record.times.ttft_s is not None
        assert (record.ending, record.times.events) == (EndReason.OK, len(pieces))


@pytest.mark.parametrize("whole", [True, False])
async def test_a_stream_that_nobody_announced(engine: FakeEngine, whole: bool) -> None:
    """The answer's type says what it is: its first token and usage are seen, and whether it is whole. No speed is
    learned from it."""
    async with picking(engine) as app:
        async with asking(app, "buffered", "streamed") as it:
            await it.pick(chat(stream=False))
            await told(it, content_type="text/event-stream")
            pieces = events(usage=USAGE) if whole else events()[:2]
            for n, piece in enumerate(pieces):
                await it.piece(piece, end=n == len(pieces) - 1)
                await it.hear()
            await it.finish()
        record = await ended(app)
        assert record.ending is (EndReason.OK if whole else EndReason.FAILED)
        assert (record.usage is not None, record.times.ttft_s is not None) == (whole, True)
        assert app.router.members[0].batches.first_token_s == 0.0


async def test_usage_that_only_we_asked_for_is_taken_out(engine: FakeEngine) -> None:
    """The engine is asked for usage where the stream comes by here, and the client gets none of it."""
    engine.owned_by = "vllm"
    async with picking(engine) as app:
        async with asking(app, "buffered", "streamed") as it:  # this one is left as it is
            await it.pick(chat(stream=True))
            await told(it)
            await it.piece(b"".join(events()), end=True)
            await it.hear()
            await it.finish()
        await ended(app)
        async with asking(app, "buffered", "streamed") as it:
            asked = await it.pick(chat(stream=True))
            body = asked.request_body.response.body_mutation.body
            assert b'"include_usage":true' in body
            assert set_headers(asked)["content-length"] == str(len(body))
            await told(it)
            got = b""
            pieces = events(usage=USAGE)
            for n, piece in enumerate(pieces):
                for part, end in ((piece[:7], False), (piece[7:], n == len(pieces) - 1)):
                    await it.piece(part, end=end)
                    passed = await it.hear()
                    assert passed is not None
                    mutation = passed.response_body.response.body_mutation
                    got += part if mutation.WhichOneof("mutation") is None else mutation.body
            await it.finish()
        assert got == b"".join(events())
        assert (await ended(app, 2)).usage is not None


async def test_full_duplex_echoes_answers(engine: FakeEngine) -> None:
    """With FULL_DUPLEX_STREAMED each piece goes back, the last one as the end; trailers pass."""
    async with picking(engine) as app, asking(app, "duplex", "duplex") as it:
        await it.head()
        await it.body(chat(stream=True))
        assert destinations(await it.hear() or pytest.fail("no answer")) == [endpoint(engine)]
        await it.hear()
        await told(it)
        for end in (False, True):
            await it.piece(b"data: x\n\n", end=end)
            passed = await it.hear()
            assert passed is not None
            echoed = passed.response_body.response.body_mutation.streamed_response
            assert (echoed.body, echoed.end_of_stream) == (b"data: x\n\n", end)
        await it.send(response_trailers={})
        passed = await it.hear()
        assert passed is not None
        assert passed.HasField("response_trailers")


@pytest.mark.parametrize(
    ("status", "ending", "failures"),
    [(400, EndReason.REFUSED_BY_ENGINE, 0), (429, EndReason.REFUSED_BY_ENGINE, 0), (500, EndReason.FAILED, 1)],
)
async def test_an_error_is_whose_it_is(engine: FakeEngine, status: int, ending: EndReason, failures: int) -> None:
    """A 4xx is the request's, a 5xx the replica's."""
    async with picking(engine) as app:
        async with asking(app) as it:
            await it.pick()
            await told(it, status)
            await it.finish()
        record = await ended(app)
        assert (record.status, record.ending) == (status, ending)
        assert app.router.fleet.member(engine.url).breaker.failures == failures  # type: ignore[union-attr]  # it is there


async def test_a_replica_that_sheds_load_may_rest(engine: FakeEngine, other: FakeEngine) -> None:
    """A 503 with Retry-After lets the replica rest, and others take what comes."""
    async with picking(engine, other) as app:
        async with asking(app) as it:
            first = destinations(await it.pick())[0]
            await told(it, 503, served=first, headers={"retry-after": "30"})
            await it.finish()
        for _ in range(4):
            async with asking(app) as it:
                assert destinations(await it.pick()) != [first]
                await it.finish()


async def test_a_fallback_moves_the_lease(engine: FakeEngine, other: FakeEngine) -> None:
    """Where the gateway went down its list, the lease is at the replica that serves, the receipt says `retry`, and the
    first replica is charged."""
    async with picking(engine, other) as app:
        async with asking(app) as it:
            first, second = destinations(await it.pick(chat(stream=True)))
            headers = await told(it, served=second)
            assert headers["x-warmroute-replica"] == f"http://{second}"
            assert headers["x-warmroute-reason"] == PlacementReason.RETRY
            open_at = {member.id: len(member.leases) for member in app.router.members}
            assert open_at == {f"http://{first}": 0, f"http://{second}": 1}
            await it.finish()
        record = await ended(app)
        assert record.retries == (("fallback", f"http://{first}"),)
        assert record.ending == EndReason.OK
        assert app.router.fleet.member(f"http://{first}").breaker.failures == 1  # type: ignore[union-attr]  # it is there
        assert not any(member.leases for member in app.router.members)


async def test_an_endpoint_that_nobody_knows_served(engine: FakeEngine) -> None:
    """A gateway may choose by itself: then no lease is open, and the client is told no replica."""
    async with picking(engine) as app:
        async with asking(app) as it:
            await it.pick()
            assert "x-warmroute-replica" not in await told(it, served="10.0.0.9:8000")
            assert not any(member.leases for member in app.router.members)
            await it.finish()
        assert (await ended(app)).ending == EndReason.OK


async def test_an_answer_of_the_gateways_own_is_nobodys(engine: FakeEngine) -> None:
    """A gateway that says who served, and says nothing with a 503, reached nobody: the attempt counts as unreached."""
    async with picking(engine) as app:
        for served, status in ((endpoint(engine), 200), ("", 503)):
            async with asking(app) as it:
                await it.pick()
                await told(it, status, served=served)
                await it.finish()
        assert (await ended(app, 2)).ending == EndReason.UNREACHED


async def test_what_engines_say_of_themselves_is_not_passed_on(engine: FakeEngine) -> None:
    """Headers of ours that an engine sends are taken out."""
    async with picking(engine) as app, asking(app) as it:
        await it.pick()
        await it.answer(headers={"x-warmroute-replica": "http://forged", "x-warmroute-odd": "1"})
        said = await it.hear()
        assert said is not None
        assert set_headers(said)["x-warmroute-replica"] == engine.url
        assert removed(said) == {"x-warmroute-odd"}


async def test_without_receipts_nothing_is_told(engine: FakeEngine) -> None:
    """`api.receipts: false` leaves the id alone."""
    async with picking(engine, api__receipts=False) as app, asking(app) as it:
        await it.pick()
        assert set(await told(it)) == {"x-warmroute-request-id"}


async def test_a_stream_that_breaks_off_counts_as_left(engine: FakeEngine) -> None:
    """A stream that is shown and ends unfinished: nobody can tell the client's leaving from the replica's death, so
    nobody is blamed."""
    async with picking(engine) as app:
        async with asking(app, "buffered", "streamed") as it:
            await it.pick(chat(stream=True))
            await told(it)
            await it.piece(events()[0])
            await it.hear()
            await it.finish()
        record = await ended(app)
        assert (record.status, record.ending, record.times.events) == (200, EndReason.CLIENT_LEFT, 1)


async def test_a_gateway_without_heads_of_answers(engine: FakeEngine) -> None:
    """Where no answer's head ever comes, the end of the stream is the end of an answer, not of a client."""
    async with picking(engine) as app:
        async with asking(app) as it:
            await it.pick()
            await it.finish()
        assert (await ended(app)).ending == EndReason.OK
        async with asking(app) as it:
            await it.pick()
            await told(it)
            await it.finish()
        async with asking(app) as it:
            await it.pick()
            await it.finish()
        record = await ended(app, 3)
        assert (record.ending, record.status) == (EndReason.CLIENT_LEFT, 499)


TOO_LONG = b'data: {"error":{"message":"too long","type":"invalid_request_error","code":"context_length_exceeded"}}\n\n'
FULL = b'{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}'


@pytest.mark.parametrize(("status", "pieces"), [(200, [events()[0], TOO_LONG]), (200, [TOO_LONG]), (503, [FULL])])
async def test_what_blames_no_replica(engine: FakeEngine, status: int, pieces: list[bytes]) -> None:
    """A request's own fault inside a stream, and a queue that is full, which lets its replica rest for a moment."""
    async with picking(engine) as app:
        async with asking(app, "buffered", "streamed") as it:
            await it.pick(chat(stream=True))
            await told(it, status)
            for n, piece in enumerate(pieces):
                await it.piece(piece, end=n == len(pieces) - 1)
                await it.hear()
            await it.finish()
        assert (await ended(app)).ending == EndReason.REFUSED_BY_ENGINE
        (member,) = app.router.members
        assert member.breaker.failures == 0
        assert member.restrictions.full is (status == 503)
