"""What a stream brings: nothing is read before there is room for it, and what is no message is counted."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.extproc.stream_messages import SAY_S, MalformedCount
from router.http.read_flow import GROWS_BYTES
from router.router_server import RouterServer
from tests.extproc.asking import CHAT, Asking, asking, chat, destinations, endpoint, error_of, picking, set_headers
from tests.support.fakes import FakeEngine
from tests.support.keyring import Keyring
from tests.support.waiting import until

MALFORMED = (b"\xff" * 100, b"\x12\xff", b"\x0a\x05ab", b"\x22" + b"\xff" * 12, b"\xff" * 70_000)
MB = 1 << 20


async def metric(app: RouterServer, client: ClientSession, name: str) -> float:
    """A metric without labels, as the admin listener shows it."""
    async with client.get(app.admin_url + "/metrics") as answer:
        found = re.search(rf"^warmroute_{name} (\S+)$", await answer.text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.promise("Malformed messages at the picker are counted, and logged once a minute.", "gateway")
@pytest.mark.finding("2026-11-28/22")
async def test_malformed_messages_are_counted(
    engine: FakeEngine, client: ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """In place of a head, of a body and of an answer: the stream ends with an error, a metric counts it, and the log
    has one line of it all and no traceback. The next request is served, and nothing of the broken ones is left."""
    async with picking(engine) as app:
        for message in MALFORMED:
            async with asking(app) as it:
                await it.raw(message)
                assert await it.failure() == "INVALID_ARGUMENT"
            async with asking(app) as it:
                await it.head()
                await it.hear()
                await it.raw(message)
                assert await it.failure() == "ABORTED"
            async with asking(app) as it:
                await it.pick()
                await it.raw(message)
                assert await it.hear() is None  # the request was answered: its gateway goes on with it
        async with asking(app) as it:
            assert destinations(await it.pick()) == [endpoint(engine)]
            await it.finish()
        await until(lambda: not app.extproc.in_flight)
        assert await metric(app, client, "picker_malformed_messages_total") == 3 * len(MALFORMED)
        assert not any(member.leases for member in app.router.members)
        assert app.extproc.counters()["bodies_bytes"] == 0
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [vars(record).get("event") for record in said] == ["extproc_malformed_message"]
    assert not any(record.exc_info for record in caplog.records)


def test_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Each line says how many there were since the last one."""
    now_s = 0.0
    count = MalformedCount(lambda: now_s)
    for _ in range(5):
        count.add("x")
    now_s = SAY_S
    count.add("x" * 1_000)
    assert [vars(record)["fields"]["count"] for record in caplog.records] == [1, 5]
    assert len(vars(caplog.records[1])["fields"]["error"]) == 200
    assert count.total == 6


# Streams without a head


async def test_a_stream_without_a_head_is_cut(engine: FakeEngine) -> None:
    """After the time that a head may take, and it has no place among the streams under way."""
    async with picking(engine, listen__head_timeout_s=0.05) as app, asking(app) as it:
        assert await it.failure() == "DEADLINE_EXCEEDED"
        assert app.extproc.in_flight == 0
        async with asking(app) as other:
            assert destinations(await other.pick()) == [endpoint(engine)]


@pytest.mark.inside  # it looks at what is held for first messages
async def test_first_messages_are_within_the_budget(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many streams are read as have room if each brings the longest message that there may be; those that come then
    wait for one of them to be cut, and are served."""
    monkeypatch.setattr("router.extproc.first_message_limit.CROWDED_S", 0.05)
    limits = {
        "limits__body_bytes_max": 9 * MB,
        "limits__total_body_bytes_max": 32 * MB,
        "listen__head_timeout_s": 3_600.0,
    }
    async with picking(engine, **limits) as app, AsyncExitStack() as stack:
        heads = app.extproc._picker._heads
        assert heads.reading_max == 3
        phantoms = [await stack.enter_async_context(asking(app)) for _ in range(12)]
        await until(lambda: heads.reading == 3)
        async with asking(app) as it:
            assert destinations(await it.pick()) == [endpoint(engine)]
        assert heads.reading <= 3
        assert {await phantom.failure() for phantom in phantoms[:9]} == {"DEADLINE_EXCEEDED"}
        for phantom in phantoms[9:]:
            phantom.leave()
        await until(lambda: not heads.reading)


# Room for bodies


@asynccontextmanager
async def small(engine: FakeEngine, **more: float) -> AsyncIterator[RouterServer]:
    """A picker with room for two bodies of the longest that it takes."""
    limits = {"limits__body_bytes_max": MB, "limits__total_body_bytes_max": 2 * MB}
    async with picking(engine, **limits, **more) as app:
        yield app


async def sent_head(it: Asking, length: int | None) -> None:
    """Send a head that says this length of its body."""
    await it.head(headers={} if length is None else {"content-length": str(length)})


async def let_in(stack: AsyncExitStack, app: RouterServer, length: int | None) -> Asking:
    """A request whose body may come."""
    it = await stack.enter_async_context(asking(app))
    await sent_head(it, length)
    told = await it.hear()
    assert told is not None
    assert told.HasField("request_headers")
    return it


@pytest.mark.parametrize("length", [MB, None])
async def test_bodies_wait_for_room(engine: FakeEngine, length: int | None) -> None:
    """Bodies that have room may come, by the lengths of their heads, or as long as any where those say none. One more
    is let in when one of them has been placed, and until then its gateway is told nothing and keeps it."""
    async with small(engine) as app, AsyncExitStack() as stack:
        one, two = [await let_in(stack, app, length) for _ in range(2)]
        assert app.extproc.counters()["bodies_bytes"] == 2 * MB
        three = await stack.enter_async_context(asking(app))
        await sent_head(three, length)
        waiting = asyncio.ensure_future(three.hear())
        async with asking(app) as without_body:  # what has none needs no room
            await without_body.head("/v1/models", method="GET", end=True)
            assert await without_body.hear() is not None
        assert not waiting.done()
        await one.body(chat())
        assert await one.hear() is not None
        assert await waiting is not None
        await three.body(chat())
        assert len(destinations(await three.hear())) == 1  # type: ignore[arg-type]  # an answer
        await two.body(chat())
        await two.hear()
        assert app.extproc.counters()["bodies_bytes"] == 0


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_no_room_in_time_is_503(engine: FakeEngine, mode: str) -> None:
    """After `limits.body_budget_timeout_s`, with the time to come again."""
    async with small(engine, limits__body_budget_timeout_s=0.05) as app, AsyncExitStack() as stack:
        for _ in range(2):
            await let_in(stack, app, MB)
        async with asking(app, mode) as it:
            await sent_head(it, MB)
            told = await it.hear()
            assert told is not None
            assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (503, "bodies_full")
            assert int(set_headers(told)["retry-after"]) >= 1


async def test_pieces_wait_for_room(engine: FakeEngine) -> None:
    """A body in pieces, whose length nobody has said, gets its room a step ahead of them."""
    async with small(engine, limits__body_budget_timeout_s=0.05) as app, asking(app, "duplex") as it:
        await it.head()
        for n in range(1, 4):
            await it.body(b"x" * 60_000, end=False)
            await until(lambda n=n: app.extproc.counters()["bodies_bytes"] == n * 60_000 + GROWS_BYTES)
        async with AsyncExitStack() as stack:
            await let_in(stack, app, MB)
            for _ in range(2):
                await it.body(b"x" * 300_000, end=False)
            told = await it.hear()
        assert told is not None
        assert error_of(told)[1]["error"]["code"] == "bodies_full"
        await until(lambda: app.extproc.counters()["bodies_bytes"] == 0)


@pytest.mark.promise("Bodies at the picker and at the main listener have one budget of bytes.", "gateway")
@pytest.mark.finding("2026-11-28/11")
async def test_both_faces_have_one_budget(engine: FakeEngine, client: ClientSession) -> None:
    """What gateways hold is no room for clients of the proxy, and the metric counts all of it once."""
    limits = {
        "limits__body_bytes_max": MB,
        "limits__total_body_bytes_max": 2 * MB,
        "limits__body_budget_timeout_s": 0.05,
    }
    async with picking(engine, listen__mode="both", **limits) as app:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await let_in(stack, app, MB)
            assert await metric(app, client, "bodies_bytes") == 2 * MB
            async with client.post(app.http.url + CHAT, data=chat("x" * (MB // 2))) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "bodies_full")
        await until(lambda: not app.extproc.in_flight)
        async with client.post(app.http.url + CHAT, data=chat("x" * (MB // 2))) as answer:
            assert answer.status == 200


# A picker with keys


async def test_with_keys_nothing_is_left_to_the_gateway(engine: FakeEngine, tmp_path: Path) -> None:
    """A picker that knows no replica yet refuses by itself where keys are asked for: a gateway that fails open would
    serve whoever comes."""
    engine.healthy = False
    ring = Keyring(tmp_path, acme={})
    async with picking(engine, **ring.settings) as app:
        async with asking(app) as it:
            assert error_of(await it.pick())[0] == 401
        async with asking(app) as it:
            told = await it.pick(headers={"authorization": f"Bearer {ring.keys['acme']}"})
            assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (503, "no_replica_ready")


async def test_the_log_says_what_the_gateway_must_have(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once at the start, with keys alone: it must fail closed."""

    def said() -> list[str]:
        return [vars(r)["fields"]["next"] for r in caplog.records if vars(r).get("event") == "extproc_must_fail_closed"]

    caplog.set_level(logging.INFO)
    async with picking(engine):
        assert said() == []
    async with picking(engine, **Keyring(tmp_path, acme={}).settings) as app:
        (what,) = said()
        assert "failure_mode_allow: false" in what
        assert "FailClose" in what
        app.apply(resolve(app._config.settings))
    assert len(said()) == 1
