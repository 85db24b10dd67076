"""Engines are read in turns, and what they send beside bodies has limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

import router.proxy.relay
from router.core.dialects import OPENAI
from router.http.engine_connection import EXCESS_BYTES_MAX, SLICE_BYTES, UpstreamConnection
from router.http.exchange import UpstreamResponse
from router.http.outbox import Outbox
from router.http.read_fairness import TURN_BYTES, ReadFairness
from tests.attack.relayed import Way, relayed
from tests.http.test_read_fairness import Loop, Transport
from tests.http.wire import STREAM, RawEngine, Wire, connect, on_uvloop, post, proxied
from tests.support.fakes import running
from tests.support.recorded import SSE, chunked, head, words

ASKED = b'{"model":"m","messages":[]}'
CHUNKED = head(SSE, "transfer-encoding: chunked")
JSON_CHUNKED = head("content-type: application/json", "transfer-encoding: chunked")
WORDS = words("a", "b")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """One chunk."""
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


class Socket(Transport):
    """The engine's connection, of which nothing is written."""

    def abort(self) -> None:
        """Close now."""
        self.closing = True

    def get_write_buffer_size(self) -> int:
        """All of the request was sent."""
        return 0

    def writelines(self, _: object) -> None:
        """The request is of no interest."""


class Fed:
    """A connection without a socket, an answer that waits for its first bytes, and turns of a loop by hand."""

    def __init__(self, pace: ReadFairness | None = None, loop: Loop | None = None) -> None:
        self.loop = loop or Loop()
        ticks = iter(range(1_000_000))  # each look at the clock finds that the time is over
        self.pace = pace or ReadFairness(cast("Any", self.loop), lambda: float(next(ticks)))
        self.transport = Socket()
        self.why = ""
        self.free: list[UpstreamConnection] = []
        self.connection = UpstreamConnection(self.free.append, Outbox(cast("Any", Loop())), self.pace)
        self.connection.connection_made(cast("Any", self.transport))
        self.answer = UpstreamResponse("r", cast("Any", self), until_whole=False, whole_bytes_max=64 << 20)
        self.answer._connection = self.connection
        self.connection.send(self.answer, b"", b"")

    def time(self) -> float:
        """No time passes."""
        return 0.0

    @property
    def got(self) -> int:
        """Bytes of the body so far."""
        return sum(map(len, self.answer._pieces))


@pytest.mark.promise("An engine is read in turns with all others, however fast it sends.", "engines")
@pytest.mark.finding("2026-11-28/9")
def test_one_connection_has_one_slice_a_turn_where_that_takes_long() -> None:
    """What is left of a read is parsed in the turns behind it, and nothing more is read meanwhile."""
    fed, body = Fed(), chunk(b"x" * 100) * 1_000
    fed.connection.data_received(JSON_CHUNKED + body)
    before = -1
    while not fed.transport.reading:
        assert 0 <= fed.got - before <= SLICE_BYTES + 1
        before = fed.got
        fed.loop.serve()
    assert fed.got == 100_000
    assert fed.loop.soon == []


@pytest.mark.promise("An engine is read in turns with all others, however fast it sends.", "engines")
@pytest.mark.finding("2026-11-28/9")
def test_events_are_read_in_slices_however_they_are_framed() -> None:
    """A stream of a known length is no body that may be passed on in one go: each of its events may be looked at."""
    fed, body = Fed(), b"data: {}\n\n" * 5_000
    fed.connection.data_received(head(SSE, f"content-length: {len(body)}"))
    fed.connection.data_received(body)
    assert fed.got <= SLICE_BYTES
    while not fed.transport.reading:
        before = fed.got
        fed.loop.serve()
        assert fed.got - before <= SLICE_BYTES
    assert fed.got == len(body)


def test_others_go_first_that_wait_already() -> None:
    """A long read of one connection waits behind those of others, however many there are, and all get their turns."""
    loop = Loop()
    first = Fed(loop=loop)
    others = [Fed(first.pace, loop) for _ in range(20)]
    for fed in (first, *others):
        fed.connection.data_received(JSON_CHUNKED + chunk(b"x" * 100) * 300)
    assert [fed.got > 0 for fed in (first, *others)] == [True] + [False] * 20
    turns = 0
    while not all(fed.transport.reading for fed in (first, *others)):
        loop.serve()
        assert len(loop.soon) <= 1
        turns += 1
    assert {fed.got for fed in (first, *others)} == {30_000}
    assert turns > 20


def test_a_full_read_of_one_body_waits_for_its_turn() -> None:
    """A body of a known length needs no slices; behind each read that filled its buffer others are read first."""
    fed = Fed()
    fed.connection.data_received(head("content-type: application/json", "content-length: 1000000"))
    for _ in range(3):
        before = fed.got
        fed.connection.data_received(b"x" * TURN_BYTES)
        assert fed.got == before + TURN_BYTES
        assert not fed.transport.reading
        fed.loop.serve()
        assert fed.transport.reading


def test_what_a_client_does_not_read_is_not_parsed() -> None:
    """The rest of a read waits until the client reads again, and then for its turn."""
    fed = Fed()
    fed.connection.data_received(JSON_CHUNKED + chunk(b"x" * 100) * 500)
    fed.answer.pause()
    for _ in range(3):
        got = fed.got
        fed.loop.serve()
        assert (fed.got, fed.transport.reading) == (got, False)
    fed.answer.resume()
    assert not fed.transport.reading
    while not fed.transport.reading:
        fed.loop.serve()
    assert fed.got == 50_000


def test_a_connection_that_is_lost_has_all_that_came() -> None:
    """What was read and not parsed when the engine closed is a part of its answer."""
    fed = Fed()
    fed.connection.data_received(JSON_CHUNKED + chunk(b"x" * 100) * 500 + b"0\r\n\r\n")
    assert fed.got < 50_000
    fed.connection.connection_lost(None)
    assert (fed.got, fed.answer.complete) == (50_000, True)
    fed.loop.serve()


@pytest.mark.parametrize("framing", ["chunks", "length"])
def test_more_than_was_asked_for_in_a_later_slice(framing: str) -> None:
    """A connection on which more came is not given back, though the answer had ended a slice before that."""
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    whole = {
        "chunks": JSON_CHUNKED + chunk(b"x" * (SLICE_BYTES - len(JSON_CHUNKED) - 15)) + b"0\r\n\r\n",
        "length": head("content-type: application/json", "content-length: 20000") + b"x" * 20_000,
    }[framing]
    fed = Fed()
    fed.connection.data_received(whole + forged * 600)
    while fed.loop.soon:
        fed.loop.serve()
    assert fed.answer.complete
    assert fed.free == [] or not fed.connection.usable


@pytest.mark.parametrize(
    "way", [Way(), Way(OPENAI, judged=True), Way(OPENAI, judged=True, stripped=True), Way(chunked=False)]
)
def test_slices_change_nothing(way: Way) -> None:
    """However little of a read is parsed in one turn, the client gets the same."""
    said = words(*("word " * 20 for _ in range(400)))
    for raw in (chunked(said), chunked([b"".join(said)]), chunked(said, trailers=b"x-a: b\r\n"), chunked(said)[:-700]):
        for pieces in ([raw], [raw[:20_000], raw[20_000:]], [raw[:300], raw[300:]]):
            hurried, whole = (relayed(pieces, way, hurried=hurried) for hurried in (True, False))
            assert (hurried.body, hurried.how, hurried.events, hurried.ending) == (
                whole.body,
                whole.how,
                whole.events,
                whole.ending,
            )


ENDLESS = {
    "trailers": b"0\r\n" + b"x-a: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n" * 1_000,
    "one trailer": b"0\r\nx-a: " + b"b" * 100_000,
    "an extension": b"5;" + b"a" * 100_000,
    "extensions of chunks": chunk(b"x", b";" + b"a" * 4_000) * 10,
    "sizes": chunk(b"x", b";a=0123456789012345678901234567890123456789") * 2_000,
}


@pytest.mark.promise("An answer with endless trailers or chunk extensions is its engine's failure.", "engines")
@pytest.mark.finding("2026-11-28/17")
@pytest.mark.inside
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("streams", [True, False])
@on_uvloop
async def test_what_belongs_to_no_body_ends(name: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer whose trailers or extensions of chunks do not end is its engine's failure: an error event, or 502."""

    async def play(wire: Wire) -> None:
        if streams:
            await wire.send(CHUNKED, chunk(WORDS[0]))
        else:
            await wire.send(head("content-type: application/json", "transfer-encoding: chunked"))
        while not wire.lost.is_set():
            await wire.pour(ENDLESS[name], 1)
            await asyncio.sleep(0)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=STREAM if streams else ASKED))
        if streams:
            answer = await client.answer()
            assert answer.status == 200
            assert json.loads(answer.body.rpartition(b"data: ")[2])["error"]["code"] == "stream_broken"
        else:  # what has no length passes as it comes, and breaks off
            await client.until(lambda: client.lost.is_set() or bool(client.answers and client.answers[0].whole))
            assert client.lost.is_set() or client.answers[0].status == 502
        client.transport.close()


@pytest.mark.inside
@on_uvloop
async def test_honest_chunks_and_trailers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one byte, with an extension, and a few trailers are no excess, however long the answer is."""
    body = b"".join(words(*("word " * 40 for _ in range(200))))
    raw = CHUNKED + b"".join(chunk(body[at : at + 1]) for at in range(len(body)))
    raw += b"0\r\n" + b"x-checksum: 0123456789abcdef\r\n" * 8 + b"\r\n"
    assert len(raw) - len(body) > 4 * EXCESS_BYTES_MAX

    async def play(wire: Wire) -> None:
        await wire.pour(raw, 1)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=STREAM))
        answer = await client.answer()
        assert (answer.status, bytes(answer.body)) == (200, body)
        client.transport.close()


@on_uvloop
async def test_many_long_answers_arrive_whole() -> None:
    """Answers of megabytes at a time, with a length or in chunks, each to a client that reads at its own pace."""
    body = b'{"data":[' + b"0.123456789," * 1_000_000 + b"0]}"
    framed = JSON_CHUNKED + b"".join(chunk(body[at : at + 70_000]) for at in range(0, len(body), 70_000)) + b"0\r\n\r\n"
    raws = (head("content-type: application/json", f"content-length: {len(body)}") + body, framed)

    async def play(wire: Wire) -> None:
        raw = raws[len(engine.seen) % 2]
        for at in range(0, len(raw), 1 << 20):
            await wire.pour(raw[at : at + (1 << 20)], 1)

    async with RawEngine(play) as engine, running(engine.url) as app:
        clients = [await connect(app.url) for _ in range(8)]
        for client in clients:
            client.ask(post("/v1/embeddings", b'{"model":"m","input":"a"}'))
        for client in clients:
            answer = await client.answer()
            assert (answer.status, bytes(answer.body) == body) == (200, True)
            client.transport.close()


@pytest.mark.inside
@on_uvloop
async def test_an_event_without_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is too long to be held passes in parts, up to a limit; then the client is told that it broke."""
    monkeypatch.setattr(router.proxy.relay, "EVENT_BYTES_MAX", 1 << 20)

    async def play(wire: Wire) -> None:
        await wire.send(CHUNKED, chunk(WORDS[0] + b'data: {"choices":[{"delta":{"content":"'))
        while not wire.lost.is_set():
            await wire.pour(chunk(b"x" * 65_536), 1)
            await asyncio.sleep(0)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=STREAM))
        answer = await client.answer()
        assert json.loads(answer.body.rpartition(b"data: ")[2])["error"]["code"] == "stream_broken"
        assert 1 << 20 < len(answer.body) < 2 << 20
        client.transport.close()
