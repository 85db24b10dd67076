"""Engines that answer badly, too early, too late or not to the end."""

from __future__ import annotations

import asyncio
import json

import pytest

import router.http.upstream
from router.router_server import RouterServer
from tests.http.wire import Answered, Client, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.support.examples import some
from tests.support.fakes import outwaited
from tests.support.recorded import RECORDED, SSE, Recorded, chunked, head, words

pytestmark = pytest.mark.inside

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
ASKED = b'{"model":"m","messages":[]}'
NOT_ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}",
    "folded header": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-a: b\r\n c\r\n\r\n{}",
    "no status": b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\n{}",
    "short status": b"HTTP/1.1 20 OK\r\ncontent-length: 2\r\n\r\n{}",
    "upgrade": b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n{}",
    "huge head": b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 70_000,
    "endless interim answers": b"HTTP/1.1 102 Processing\r\nx-a: b\r\n\r\n" * 2_000,
    "bad size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2x\r\n{}\r\n0\r\n\r\n",
    "huge size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
}


class Script:
    """Plays one answer after the other."""

    def __init__(self, *answers: bytes, ends: str = "") -> None:
        self.answers = list(answers)
        self.ends = ends
        self.go_on = asyncio.Event()
        self.engine = RawEngine(self.play)

    async def play(self, wire: Wire) -> None:
        """The engine's part."""
        await wire.send(self.answers.pop(0))
        if self.ends == "RST":
            wire.reset()
        elif self.ends == "FIN":
            wire.transport.close()


async def asked(app: RouterServer, raw: bytes | None = None) -> Client:
    """A client that has sent a request."""
    client = await connect(app.url)
    client.ask(raw or post())
    return client


def free(app: RouterServer) -> int:
    """Connections that wait for requests."""
    return sum(each.usable for pool in app.http.upstream._pools.values() for each in pool._free)


def generating(engine: RawEngine) -> list[Wire]:
    """Connections that were asked for an answer."""
    return [wire for wire in engine.wires if wire.asked]


@pytest.mark.promise("A partial answer never passes for a complete one: official clients raise.", "faults")
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("ends", ["FIN", "RST"])
@pytest.mark.parametrize("name", ["chat", "length", "held JSON", "CRLF"])
@on_uvloop
async def test_every_prefix(name: str, ends: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an answer breaks off, the client gets an error if it had nothing yet, and else whole events and an error
    event: never a part that looks whole. Nothing stays open."""
    recorded = RECORDED[name]
    script = Script(ends=ends)
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        for length in some(range(0, len(recorded.raw) + 1, 1 if version == "1.1" else 3)):
            script.answers.append(recorded.raw[:length])
            client = await asked(app, post(recorded.path, recorded.request, version=version))
            answer = await client.answer() if version == "1.1" else await _old(client)
            if answer.status == 502:
                assert answer.whole
                assert client.error is None
                assert json.loads(answer.body)["error"]["code"] == "engine_failed"
            elif length == len(recorded.raw):
                assert (answer.status, answer.whole, bytes(answer.body)) == (200, True, recorded.body)
            else:
                _broke(client, recorded, length, version)
            client.transport.close()
            await settled(app)
            while free(app):
                await asyncio.sleep(0)


async def _old(client: Client) -> Answered:
    await client.lost.wait()
    return client.answers[0]


def _broke(client: Client, recorded: Recorded, length: int, version: str) -> None:
    answer = client.answers[0]
    assert answer.whole, length
    assert (client.error, client.reset) == (None, False), length
    assert client.lost.is_set() is (version == "1.0"), length
    body = bytes(answer.body)
    if body == recorded.body:  # all that is missing is the framing's end
        assert b"[DONE]" in recorded.raw[:length]
        return
    events, _, error = body.rpartition(b"data: ")
    assert json.loads(error)["error"]["code"] == "stream_broken"
    assert recorded.body.startswith(events)
    assert events.endswith((b"\n\n", b"\n\r\n")), length
    assert b"[DONE]" not in events, length


@pytest.mark.parametrize("name", NOT_ANSWERS)
@on_uvloop
async def test_what_is_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not HTTP, or could be read in two ways, is a failed replica; its connection is not used again."""
    script = Script(NOT_ANSWERS[name], OK)
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app, post(body=ASKED))
        assert (await client.answer()).status == 502
        assert free(app) == 0
        client.ask(post(body=ASKED))
        assert (await client.answer(1)).status == 200
        assert len(generating(engine)) == 2
        client.transport.close()


@pytest.mark.parametrize("name", ["chat", "held JSON"])
@pytest.mark.parametrize("more", [OK, b"x", b"\r\nHTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
@on_uvloop
async def test_more_than_was_asked_for(name: str, more: bytes, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine sends behind its answer is nobody's: that connection is given up, and the next answer is the next
    request's own."""
    recorded = RECORDED[name]

    async def play(wire: Wire) -> None:
        if len(engine.seen) > 1:
            await wire.send(OK)
        elif together:
            await wire.send(recorded.raw + more)
        else:
            await wire.send(recorded.raw, more)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch, upstream__keepalive_s=3600.0) as app:
        client = await asked(app, post(recorded.path, recorded.request))
        assert (await client.answer()).body == recorded.body
        await generating(engine)[0].lost.wait()
        client.ask(post(body=ASKED))
        assert (await client.answer(1)).body == b"{}"
        assert client.error is None
        assert len(generating(engine)) == 2
        client.transport.close()


@on_uvloop
async def test_interim_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interim answers are for the router; the client gets the one that counts, and its headers only."""
    interim = (
        b"HTTP/1.1 100 Continue\r\nx-a: b\r\n\r\nHTTP/1.1 103 Early Hints\r\ncontent-type: text/event-stream\r\n\r\n"
    )
    script = Script(interim + OK)

    async def play(wire: Wire) -> None:
        await wire.send(*script.answers)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        for place in some(range(1, len(interim))):
            client = await asked(app, post(body=ASKED))
            answer = await client.answer()
            assert (answer.status, bytes(answer.body), client.error) == (200, b"{}", None)
            assert b"x-a" not in answer.headers
            assert answer.headers[b"content-type"] == b"application/json"
            client.transport.close()
            script.answers = [interim[:place], interim[place:] + OK]
        assert len(generating(engine)) == 1


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("line", ["x-a: b", "content-length: 0", "content-length: 5", "transfer-encoding: chunked"])
@on_uvloop
async def test_answers_without_a_body(status: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """204 and 304 have no body and no length of one, whatever the engine says of it (RFC 9112 section 6.3)."""
    script = Script(f"HTTP/1.1 {status} X\r\n{line}\r\n\r\n".encode(), OK)
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app, post(body=ASKED))
        answer = await client.answer()
        assert (answer.status, bytes(answer.body)) == (status, b"")
        assert not {b"content-length", b"transfer-encoding"} & set(answer.headers)
        client.ask(post(body=ASKED))
        assert (await client.answer(1)).body == b"{}"
        assert client.error is None
        client.transport.close()


@pytest.mark.parametrize("closes", [True, False])
@on_uvloop
async def test_an_answer_before_the_request_is_whole(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that refuses a long body without reading it is heard, and its connection given up: whether it closes or
    waits for us to."""

    async def play(wire: Wire) -> None:
        wire.transport.pause_reading()
        wire.transport.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
        if closes:
            wire.transport.close()

    long = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * (16 << 20) + b'"}]}'
    async with RawEngine(play, hasty=True) as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app, post(body=long))
        answer = await client.answer()
        assert answer.status in ((413, 502) if closes else (413,))  # with a reset the answer may be lost
        await settled(app)
        assert free(app) == 0
        wire = generating(engine)[0]
        while not wire.lost.is_set():
            wire.transport.write(b"x")  # not reading, it learns of the end by writing
            await asyncio.sleep(0)
        client.transport.close()


@on_uvloop
async def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten clients one after the other share one connection; at once they have one each, and none is lost."""
    waiting = asyncio.Event()
    waiting.set()

    async def play(wire: Wire) -> None:
        await waiting.wait()
        wire.transport.write(RECORDED["chat"].raw)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        for _ in range(10):
            client = await asked(app)
            await client.answer()
            client.transport.close()
        assert [wire.asked for wire in generating(engine)] == [10]
        waiting.clear()
        clients = [await asked(app) for _ in range(10)]
        await engine.asked(20)
        waiting.set()
        for client in clients:
            assert (await client.answer()).body == RECORDED["chat"].body
            client.transport.close()
        await settled(app)
        assert len(generating(engine)) == free(app) == 10


@on_uvloop
async def test_a_connection_that_the_engine_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free connection that the engine has closed is not used; the next request has a new one."""
    script = Script(OK, OK)
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app, post(body=ASKED))
        await client.answer()
        generating(engine)[0].transport.close()
        while free(app):
            await asyncio.sleep(0)
        client.ask(post(body=ASKED))
        assert (await client.answer(1)).status == 200
        assert len(generating(engine)) == 2
        client.transport.close()


@on_uvloop
async def test_free_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free connections are closed after their time and when their replica leaves, those in use when they come free."""
    go_on = asyncio.Event()

    async def play(wire: Wire) -> None:
        if len(engine.seen) == 3:
            await go_on.wait()
        wire.transport.write(OK)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        upstream = app.http.upstream
        client = await asked(app, post(body=ASKED))
        await client.answer()
        (pool,) = upstream._pools.values()
        pool.close_idle(pool._free[0].idle_since_s)
        assert free(app) == 1
        pool.close_idle(pool._free[0].idle_since_s + 0.001)
        assert free(app) == 0
        await generating(engine)[0].lost.wait()
        client.ask(post(body=ASKED))
        await client.answer(1)
        assert free(app) == 1
        client.ask(post(body=ASKED))
        await engine.asked(3)
        upstream.forget(engine.url)
        go_on.set()
        assert (await client.answer(2)).status == 200
        await generating(engine)[1].lost.wait()
        client.transport.close()


BEGINNING = {"nothing": b"", "a head": head(SSE, "transfer-encoding: chunked"), "half a head": head(SSE)[:20]}
BEGUN = words("a", "b")[:2]
TWO_EVENTS = chunked(BEGUN)[:-5]


@pytest.mark.parametrize("name", BEGINNING)
@on_uvloop
async def test_silence_before_the_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of which no body comes in time is a timeout, also if it has sent a head."""
    monkeypatch.setattr(router.http.upstream, "WATCH_INTERVAL_S", 0.001)
    script = Script(BEGINNING[name])
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app)
        await engine.asked(1)
        answer = await outwaited(app, asyncio.ensure_future(client.answer()), engine.url)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "timed_out")
        await generating(engine)[0].lost.wait()
        client.transport.close()


@on_uvloop
async def test_silence_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that falls silent midway is given up after its time: the client is told so."""
    monkeypatch.setattr(router.http.upstream, "WATCH_INTERVAL_S", 0.001)
    script = Script(TWO_EVENTS)
    async with script.engine as engine, proxied(engine, monkeypatch) as app:
        client = await asked(app)
        await client.until(lambda: bool(client.answers) and client.answers[0].body == b"".join(BEGUN))
        answer = await outwaited(app, asyncio.ensure_future(client.answer()), engine.url)
        assert answer.whole
        events, _, error = bytes(answer.body).rpartition(b"data: ")
        assert events == b"".join(BEGUN)
        assert json.loads(error)["error"]["code"] == "stream_stalled"
        await generating(engine)[0].lost.wait()


@on_uvloop
async def test_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replica that is lost, answers that have not begun fail, and begun ones when they have been silent for long;
    what still moves goes on, however often the loss is noticed."""
    wires: list[Wire] = []

    async def play(wire: Wire) -> None:
        wires.append(wire)
        if len(wires) > 1:
            await wire.send(TWO_EVENTS)

    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        clients = [await asked(app)]
        while not wires:
            await asyncio.sleep(0)
        for _ in range(2):
            clients.append(await asked(app))
            await clients[-1].until(lambda: bool(clients[-1].answers and clients[-1].answers[0].body))
        now_s = asyncio.get_running_loop().time()
        for each in app.http.upstream._answers:
            each.silent_since(now_s - 100)  # as if the watchdog had looked long ago
        await wires[2].send(chunked([b'data: {"choices":[]}\n\n']).partition(b"\r\n\r\n")[2][:-5])
        for _ in range(3):
            app.http.on_replica_unreachable(engine.url)
        assert (await clients[0].answer()).status == 502
        assert b"stream_broken" in (await clients[1].answer()).body
        await wires[2].send(chunked(words()).partition(b"\r\n\r\n")[2])
        assert b"stream_broken" not in (await clients[2].answer()).body
        for client in clients:
            client.transport.close()
