"""An engine that only pings is as silent as one that sends nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.http.exchange import FIRST_EVENT_BYTES_MAX, UpstreamResponse
from tests.http.wire import STREAM, RawEngine, Wire, connect, on_uvloop, post, proxied
from tests.support.fakes import running
from tests.support.recorded import SSE, chunked, head, words

CHUNKED = head(SSE, "transfer-encoding: chunked")
WORDS = words("a", "b")


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


PINGS = {
    "comments": b": ping\n\n",
    "blank lines": b"\n",
    "retry": b"retry: 100\n\n",
    "ids": b"id: 1\n\n",
    "empty data": b"data:\n\n",
}


@pytest.mark.inside
@pytest.mark.parametrize("name", PINGS)
@on_uvloop
async def test_pings_are_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that only pings has not begun: its request is late as that of a silent one is, and may be tried
    elsewhere when it is stuck."""
    ping = chunk(PINGS[name])

    async def play(wire: Wire) -> None:
        if len(engine.seen) == 1:
            await wire.send(CHUNKED, *([ping] * 20))
            await wire.lost.wait()
        else:
            await wire.send(CHUNKED, ping, ping, *map(chunk, WORDS), b"0\r\n\r\n")

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client, upstream = await connect(app.url), app.http.upstream
        client.ask(post(body=STREAM))
        await engine.asked(1)
        [answer] = await _asking(app, 1)
        begun_s = answer.since_s
        while not answer._pieces:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
            assert answer.silent_since(begun_s + 5.0) <= begun_s + 5.0
        assert not answer.begun
        assert not client.raw
        upstream.look(begun_s + 5.0)
        upstream.look(begun_s + 5.0 + upstream.limits.first_byte_timeout_s + 1.0)
        assert (await client.answer()).status == 504
        client.ask(post(body=STREAM))
        answer = await client.answer(1)
        assert bytes(answer.body) == 2 * PINGS[name] + b"".join(WORDS)
        client.transport.close()


async def _asking(app: Any, count: int) -> list[UpstreamResponse]:
    answers: list[UpstreamResponse] = []
    while len(answers) != count:
        answers = [each for each in app.http.upstream._answers if each.replica]
        await asyncio.sleep(0)
    return answers


@pytest.mark.promise("A stream of pings alone counts as silent, and its request moves to another replica.", "faults")
@pytest.mark.finding("2026-11-28/12")
@on_uvloop
async def test_a_request_of_which_only_pings_came_is_tried_elsewhere() -> None:
    """When its replica is found stuck, as a silent one is."""

    async def pings(wire: Wire) -> None:
        await wire.pour(CHUNKED, 1)
        while not wire.lost.is_set():
            await wire.pour(chunk(b": ping\n\n"), 1)
            await asyncio.sleep(0)

    async def answers(wire: Wire) -> None:
        await wire.pour(chunked(WORDS), 1)

    async with RawEngine(pings) as pinging, RawEngine(answers) as good, running(pinging.url, good.url) as app:
        clients = [await connect(app.url) for _ in range(6)]
        for client in clients:
            client.ask(post(body=STREAM))
        await pinging.asked(1)
        while not pinging.poured > 1_000:
            await asyncio.sleep(0)
        answering = asyncio.gather(*(client.answer() for client in clients))
        while not answering.done():
            app.http.on_replica_stalled(pinging.url)
            await asyncio.sleep(0)
        for answer in await answering:
            assert (answer.status, answer.body.count(b"[DONE]")) == (200, 1)
        for client in clients:
            client.transport.close()


@pytest.mark.inside
@pytest.mark.promise("A stream of pings alone counts as silent, and its request moves to another replica.", "faults")
@pytest.mark.finding("2026-11-28/12")
@pytest.mark.parametrize(
    "ping", [b": ping\n\n", b"data: {}\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', b": }\n\n" * 9]
)
@on_uvloop
async def test_a_stream_that_only_pings_is_silent(ping: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its first token a stream that sends pings alone is cut as a silent one is, whichever way they take."""
    more = asyncio.Event()

    async def play(wire: Wire) -> None:
        await wire.send(CHUNKED, chunk(WORDS[0]), chunk(WORDS[0]))
        await more.wait()
        for _ in range(5):
            await wire.send(chunk(ping), chunk(b": " + b"a" * 60 + b"}\n\n"))
        await wire.lost.wait()

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client, upstream = await connect(app.url), app.http.upstream
        client.ask(post(body=STREAM))
        await client.until(lambda: client.raw.count(b"data:") == 2)
        now_s = asyncio.get_running_loop().time()
        upstream.look(now_s)
        upstream._worked.clear()  # no other answer shows that the replica works
        more.set()
        await client.until(lambda: client.raw.count(b"a" * 60) == 5)
        upstream.look(now_s + upstream.limits.idle_timeout_s + 1.0)
        answer = await client.answer()
        assert json.loads(answer.body.rpartition(b"data: ")[2])["error"]["code"] == "stream_stalled"
        client.transport.close()


@pytest.mark.inside
@on_uvloop
async def test_comments_without_end_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes of comments before the first event, and the engine has failed."""

    async def play(wire: Wire) -> None:
        await wire.send(CHUNKED)
        while not wire.lost.is_set():
            await wire.pour(chunk(b": ping\n\n" * 100), 1)
            await asyncio.sleep(0)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=STREAM))
        assert (await client.answer()).status == 502
        assert engine.poured >= FIRST_EVENT_BYTES_MAX
        client.transport.close()
