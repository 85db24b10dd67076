"""Answers that come in pieces of every kind reach the client byte by byte, event by event, and well framed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from router.proxy.relay import PARTIAL_BYTES_MAX, Relay
from router.router_server import RouterServer
from tests.http.wire import Client, RawEngine, Wire, connect, on_uvloop, post, proxied
from tests.support.examples import examples, some
from tests.support.recorded import LONG, RECORDED, SSE, Recorded, chunked, words

pytestmark = pytest.mark.inside

ALL = [*RECORDED.values(), *LONG.values()]
SETTINGS = {"limits__buffered_response_bytes_max": 400}  # "long JSON" is longer


class Player:
    """Sends a recorded answer in the pieces it is told, and checks what the router makes of it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.pieces: list[bytes] = []
        self.engine = RawEngine(self.play)

    async def play(self, wire: Wire) -> None:
        """The engine's part."""
        await wire.send(*self.pieces)
        if self.recorded.closes:
            wire.transport.close()

    def judge(self, body: bytes) -> None:
        """What a client has of a stream ends on an event's boundary, unless that would hold back too much."""
        long = len(body) - max(body.rfind(b"\n\n"), body.rfind(b"\n\r\n")) > PARTIAL_BYTES_MAX
        assert not self.recorded.events or long or body.endswith((b"\n\n", b"\n\r\n")) or body == self.recorded.body

    @asynccontextmanager
    async def playing(
        self, monkeypatch: pytest.MonkeyPatch, **settings: Any
    ) -> AsyncIterator[Callable[[list[bytes]], Awaitable[None]]]:
        """A router before the engine, and one client of it, for which `check` is given."""
        async with self.engine as engine, proxied(engine, monkeypatch, **settings) as app:
            client = await connect(app.url, self.judge)
            yield partial(self.check, app, client)
            assert not client.lost.is_set()
            client.transport.close()

    async def check(self, app: RouterServer, client: Client, pieces: list[bytes]) -> None:
        """The answer in these pieces, on a connection that may have had others."""
        assert b"".join(pieces) == self.recorded.raw
        self.pieces, n = pieces, len(client.answers)
        client.ask(post(self.recorded.path, self.recorded.request))
        answer = await client.answer(n)
        assert (client.error, answer.whole, bytes(answer.body)) == (None, True, self.recorded.body), pieces
        while not app.control.pages.decisions or app.http.in_flight:
            await asyncio.sleep(0)
        record = app.control.pages.decisions.pop()
        used = record.usage and (record.usage.prompt_tokens, record.usage.cached_tokens, record.usage.completion_tokens)
        assert (used, record.times.events, record.ending) == (self.recorded.used, self.recorded.events, "ok"), pieces


def cut(raw: bytes, *at: int) -> list[bytes]:
    """Pieces between these places."""
    places = [0, *sorted(at), len(raw)]
    return [raw[begin:end] for begin, end in itertools.pairwise(places) if begin < end]


def framed_bytes(piece: bytes) -> int:
    """Bytes of a chunk with its size line and end."""
    return len(b"%x\r\n\r\n" % len(piece)) + len(piece)


@pytest.mark.parametrize("name", RECORDED)
@on_uvloop
async def test_every_split_in_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However an answer's bytes fall into two reads, the client gets the same bytes, whole events at any time, and the
    router the same counts; one connection to either side serves for all."""
    player = Player(RECORDED[name])
    raw = player.recorded.raw
    async with player.playing(monkeypatch, **SETTINGS) as check:
        for place in some(range(1, len(raw))):
            await check(cut(raw, place))
        assert player.recorded.closes or sum(wire.asked > 0 for wire in player.engine.wires) == 1


@on_uvloop
async def test_random_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in three and more pieces, and byte by byte."""
    rng, player = random.Random(1), Player(RECORDED["chat"])
    async with player.playing(monkeypatch, **SETTINGS) as check:
        for player.recorded in ALL:
            raw = player.recorded.raw
            for count in some([2] * 30 + [3, 4, 6, 9, 20, 50] * 3):
                await check(cut(raw, *rng.sample(range(1, len(raw)), count)))
            if len(raw) < 2_000:
                await check(cut(raw, *range(1, len(raw))))


@on_uvloop
async def test_random_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However an engine cuts its body into chunks, and the network the chunks, nothing changes."""
    rng, player = random.Random(2), Player(RECORDED["chat"])
    async with player.playing(monkeypatch, **SETTINGS) as check:
        for recorded in ALL:
            kind = SSE if recorded.events else "content-type: application/json"
            for count in some([1, 2, 3, 5, 8, 13] * 5):
                pieces = cut(recorded.body, *rng.sample(range(1, len(recorded.body)), count))
                raw = chunked(pieces, kind=kind)
                player.recorded = dataclasses.replace(recorded, raw=raw, closes=False)
                ends = itertools.accumulate(map(framed_bytes, pieces), initial=raw.index(b"\r\n\r\n") + 4)
                await check(cut(raw, *ends))  # a read for each chunk
                await check(cut(raw, *rng.sample(range(1, len(raw)), count)))


@on_uvloop
async def test_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that comes as engines send it, a chunk and an event at a time, now and then two or a part of one, is
    the same stream, however long it is and whatever the sizes."""
    rng, player = random.Random(3), Player(RECORDED["chat"])
    async with player.playing(monkeypatch) as check:
        for odd in some([0.0, 0.1, 0.4] * 30):
            events = words(*("x" * rng.choice((0, 1, 7, 200, 5_000)) for _ in range(rng.randint(1, 30))))
            raw = chunked(events)
            player.recorded = Recorded(raw, b"".join(events), used=(9, 8, 2), events=len(events))
            ends = list(itertools.accumulate(map(framed_bytes, events), initial=raw.index(b"\r\n\r\n") + 4))
            places = [place + (rng.randint(1, 9) if rng.random() < odd else 0) for place in ends]
            kept = [each for each in places if rng.random() >= odd / 2]
            await check(cut(raw, *kept))


@on_uvloop
async def test_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose chunks come many in one read, as from an engine that was waited for, is the same stream, whatever
    part of a chunk the reads end with; what is whole is passed at once."""
    rng, player = random.Random(4), Player(RECORDED["chat"])
    looked: list[bytes] = []
    seen = Relay.body

    def counted(relay: Relay, data: bytes) -> None:
        looked.append(data)
        seen(relay, data)

    monkeypatch.setattr(Relay, "body", counted)
    async with player.playing(monkeypatch) as check:
        for odd in [0.0] * 20 + [0.2, 0.6] * 20:
            events = words(*("x" * rng.choice((9, 10, 200)) for _ in range(rng.randint(60, 120))))
            raw = chunked(events)
            player.recorded = Recorded(raw, b"".join(events), used=(9, 8, 2), events=len(events))
            ends = list(itertools.accumulate(map(framed_bytes, events), initial=raw.index(b"\r\n\r\n") + 4))
            places = [place + (rng.randint(1, 99) if rng.random() < odd else 0) for place in ends[:-1]]
            looked.clear()
            await check(cut(raw, *places[:3], *sorted(rng.sample(places[3:], 5))))
            assert odd or len(looked) < 50


@on_uvloop
async def test_content_that_looks_like_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event whose text looks like chunks is text, wherever the network cuts it."""
    ordinary, inner = b'data: {"x":"%b"}\n\n' % (b"y" * 60), b'4c\r\ndata: {"x":"%b"}\n\n\r\n' % (b"y" * 60)
    events = [*words("a")[:1], ordinary, ordinary, b": \r\n" + inner + b"\n\n", ordinary, *words()]
    raw = chunked(events)
    player = Player(Recorded(raw, b"".join(events), used=(9, 8, 2), events=sum(each.count(b"\n\n") for each in events)))
    ends = list(itertools.accumulate(map(framed_bytes, events), initial=raw.index(b"\r\n\r\n") + 4))
    async with player.playing(monkeypatch) as check:
        for places in some([*itertools.combinations(range(ends[3], ends[4], 2), 2)]):
            await check(cut(raw, *ends, *places))


@on_uvloop
async def test_old_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of HTTP/1.0 gets the same bytes without chunks, and the end of the connection behind them."""
    rng, player = random.Random(4), Player(RECORDED["chat"])
    async with player.engine as engine, proxied(engine, monkeypatch, **SETTINGS) as app:
        for player.recorded in ALL * examples(10):
            raw = player.recorded.raw
            player.pieces = cut(raw, *rng.sample(range(1, len(raw)), 3))
            # Without chunks, what the client reads is the router's writes only as long as they are short.
            client = await connect(app.url, player.judge if len(raw) < 10_000 else None)
            client.ask(post(player.recorded.path, player.recorded.request, version="1.0"))
            await client.lost.wait()
            assert (client.error, client.reset) == (None, False)
            assert bytes(client.answers[0].body) == player.recorded.body
            assert b"chunked" not in client.raw.partition(b"\r\n\r\n")[0]


@on_uvloop
async def test_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests sent in one write, streams and others and pages of our own, are answered one by one in their order,
    however many they are."""
    count = 40

    async def play(wire: Wire) -> None:
        n = len(wire.engine.seen)
        await wire.send(*cut(chunked(words(str(n))), 200, 300))

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        page = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        client.ask((post() + page) * count, *["POST", "GET"] * count)
        await client.answer(2 * count - 1)
        for n in range(count):
            assert bytes(client.answers[2 * n].body) == b"".join(words(str(n + 1)))
            assert client.answers[2 * n + 1].status == 200
        assert client.error is None
        assert sum(wire.asked > 0 for wire in engine.wires) == 1
        client.transport.close()


@on_uvloop
async def test_requests_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However requests fall into reads, by length or in chunks, engines get the same bodies."""
    body = b'{"model":"m","messages":[{"role":"user","content":"h\xc3\xa9llo\\r\\n0\\r\\n\\r\\n"}]}'
    lines = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    by_length = lines + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    in_chunks = lines + b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\n%b\r\n0%X\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (
        body[:5],
        len(body) - 5,
        body[5:],
    )
    upgrade = (
        lines
        + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        + by_length[len(lines) :]
    )
    player = Player(RECORDED["held JSON"])
    player.pieces = [player.recorded.raw]
    async with player.engine as engine, proxied(engine, monkeypatch) as app:
        client, asked = await connect(app.url), 0
        server_side = next(iter(app.http._server.clients))
        for raw in (by_length, in_chunks, upgrade):
            twice = raw + raw
            for place in some(range(1, len(twice))):
                for piece in cut(twice, place):
                    server_side.data_received(piece)
                client._methods += [b"POST", b"POST"]
                asked += 2
                answer = await client.answer(asked - 1)
                assert (client.error, answer.status) == (None, 200), cut(twice, place)
                assert [each[1] for each in engine.seen] == [body, body], cut(twice, place)
                assert b"upgrade" not in engine.seen[0][0].lower()
                assert b"http2" not in engine.seen[0][0].lower()
                engine.seen.clear()
        client.transport.close()
