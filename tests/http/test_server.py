"""What clients send: nothing that could be read in two ways reaches an engine, and every limit holds."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from router.http.client_connection import WAITING_BYTES_MAX, WAITING_MAX
from router.http.request import Refusal, Request
from router.http.server import Server
from tests.http.clients import LIMITS
from tests.http.wire import Client, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.support.recorded import RECORDED, SSE, head

PATH = "/v1/messages"
LINE = f"POST {PATH} HTTP/1.1\r\n".encode()
HOST = LINE + b"Host: x\r\n"
BODY = b'{"model":"m","messages":[],"max_tokens":1}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def length(value: object) -> bytes:
    """A Content-Length line."""
    return f"Content-Length: {value}\r\n".encode()


def coding(value: str) -> bytes:
    """A Transfer-Encoding line."""
    return b"Transfer-Encoding: %b\r\n" % value.encode("latin-1")


REFUSED: dict[str, tuple[bytes, int]] = {
    "length and coding": (HOST + length(4) + coding("chunked") + b"\r\n" + CHUNKED, 400),
    "coding and length": (HOST + coding("chunked") + length(4) + b"\r\n" + CHUNKED, 400),
    "two lengths": (HOST + length(42) + length(4) + b"\r\n" + BODY, 400),
    "the same length twice": (HOST + length(42) * 2 + b"\r\n" + BODY, 400),
    "a list of lengths": (HOST + length("42, 42") + b"\r\n" + BODY, 400),
    "signed length": (HOST + length("+42") + b"\r\n" + BODY, 400),
    "negative length": (HOST + length(-42) + b"\r\n" + BODY, 400),
    "hexadecimal length": (HOST + length("0x2a") + b"\r\n" + BODY, 400),
    "spaced length": (HOST + length("4 2") + b"\r\n" + BODY, 400),
    "empty length": (HOST + length("") + b"\r\n" + BODY, 400),
    "length beyond numbers": (HOST + length("9" * 30) + b"\r\n" + BODY, 400),
    "length beyond reason": (HOST + length("9" * 19) + b"\r\n" + BODY, 413),
    "unknown coding": (HOST + coding("xchunked") + b"\r\n" + CHUNKED, 501),
    "compressed": (HOST + coding("gzip") + b"\r\n" + CHUNKED, 501),
    "compressed and chunked": (HOST + coding("gzip, chunked") + b"\r\n" + CHUNKED, 501),
    "chunked, then not": (HOST + coding("chunked, identity") + b"\r\n" + CHUNKED, 400),
    "chunked in one line, not in the next": (HOST + coding("chunked") + coding("identity") + b"\r\n" + CHUNKED, 400),
    "not, then chunked": (HOST + coding("identity") + coding("chunked") + b"\r\n" + CHUNKED, 501),
    "chunked twice": (HOST + coding("chunked") * 2 + b"\r\n" + CHUNKED, 400),
    "coding behind a tab": (HOST + coding("\x0bchunked") + b"\r\n" + CHUNKED, 400),
    "chunked by HTTP/1.0": (LINE.replace(b"1.1", b"1.0") + coding("chunked") + b"\r\n" + CHUNKED, 501),
    "bare line feeds": (HOST.replace(b"\r\n", b"\n") + b"\n", 400),
    "bare line feed in the head": (HOST + b"A: b\n" + length(42) + b"\r\n" + BODY, 400),
    "bare line feed at its end": (HOST + length(42) + b"\n" + BODY, 400),
    "folded header": (HOST + b"A: b\r\n c\r\n" + length(42) + b"\r\n" + BODY, 400),
    "folded coding": (HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKED, 400),
    "space before the colon": (HOST + b"Content-Length : 42\r\n\r\n" + BODY, 400),
    "space before the first header": (LINE + b" Host: x\r\n\r\n", 400),
    "header without a name": (HOST + b": b\r\n\r\n", 400),
    "header without a colon": (HOST + b"abc\r\n\r\n", 400),
    "NUL in a value": (HOST + b"A: b\0c\r\n\r\n", 400),
    "NUL in a name": (HOST + b"A\0: b\r\n\r\n", 400),
    "carriage return in a value": (HOST + b"A: b\rContent-Length: 4\r\n\r\n", 400),
    "no Host": (LINE + length(42) + b"\r\n" + BODY, 400),
    "two Hosts": (HOST + b"host: y\r\n" + length(42) + b"\r\n" + BODY, 400),
    "HTTP/0.9": (f"POST {PATH}\r\n\r\n".encode(), 505),
    "HTTP/2.0": (HOST.replace(b"1.1", b"2.0") + b"\r\n", 505),
    "HTTP/1.2": (HOST.replace(b"1.1", b"1.2") + b"\r\n", 400),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50, 400),
    "small letters": (HOST.lower() + b"\r\n", 400),
    "tunnel": (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "target beyond ASCII": (b"POST /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "two targets": (b"POST /a /b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "long target": (b"POST /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "long header": (HOST + b"A: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "long head": (HOST + b"".join(b"A%d: %b\r\n" % (n, b"a" * 1_000) for n in range(100)) + b"\r\n", 431),
    "endless header": (HOST + b"A: " + b"a" * 100_000, 431),
    "long name": (HOST + b"A" * 100_000 + b": b\r\n\r\n", 431),
    "chunk size beyond numbers": (HOST + coding("chunked") + b"\r\n" + b"f" * 20 + b"\r\n", 400),
    "chunk size with a prefix": (HOST + coding("chunked") + b"\r\n0x5\r\nabcde\r\n0\r\n\r\n", 400),
    "chunk size and a space": (HOST + coding("chunked") + b"\r\n5 \r\nabcde\r\n0\r\n\r\n", 400),
    "chunk longer than its size": (HOST + coding("chunked") + b"\r\n5\r\nabcdefg\r\n0\r\n\r\n", 400),
    "chunk without a size": (HOST + coding("chunked") + b"\r\n\r\nabcde\r\n0\r\n\r\n", 400),
    "chunk's line feed": (HOST + coding("chunked") + b"\r\n5\nabcde\r\n0\r\n\r\n", 400),
    "length as a trailer": (HOST + coding("chunked") + b"\r\n2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n", 400),
    "body beyond the limit": (HOST + length(100_001) + b"\r\n", 413),
    "chunks beyond the limit": (HOST + coding("chunked") + b"\r\n" + (b"c350\r\n" + b"a" * 50_000 + b"\r\n") * 3, 413),
    "refused before it is sent": (HOST + length(100_001) + b"Expect: 100-continue\r\n\r\n", 413),
}


async def play(wire: Wire) -> None:
    """A healthy answer."""
    wire.transport.write(RECORDED["held JSON"].raw)


def limited() -> dict[str, Any]:
    """Settings."""
    return {"limits__body_bytes_max": 100_000}


@pytest.mark.promise(
    "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
)
@pytest.mark.inside
@pytest.mark.parametrize("how", ["at once", "behind another", "in pieces"])
@on_uvloop
async def test_what_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not clearly one request of HTTP/1.1, or over a limit, is refused in the words of its dialect and never
    reaches an engine; nor does what follows. The connection ends, and what was asked before is answered first."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **limited()) as app:
        for name, (raw, status) in REFUSED.items():
            client, before = await connect(app.url), how == "behind another"
            if before:
                client.ask(post())
            client.ask(raw[:1], "POST")
            pieces = [raw[1:] + SMUGGLED] if how != "in pieces" else [raw[n : n + 499] for n in range(1, len(raw), 499)]
            for piece in pieces:
                if not client.lost.is_set():
                    client.transport.write(piece)
                await asyncio.sleep(0)
            await client.lost.wait()
            assert not client.reset, name
            assert client.error is None, name
            assert len(client.answers) == 1 + before, name
            answer = client.answers[-1]
            assert (answer.status, answer.headers[b"connection"]) == (status, b"close"), name
            said = json.loads(answer.body)
            if raw.startswith(LINE):
                assert said["type"] == "error", name  # Messages has it so
            assert said["error"]["message"], name
            assert len(engine.seen) == before, name
            engine.seen.clear()
            assert b"100 Continue" not in client.raw, name


ACCEPTED: dict[str, bytes] = {
    "blank lines before": b"\r\n\r\n" + HOST + length(42) + b"\r\n" + BODY,
    "empty header": HOST + b"A:\r\nB: \r\n" + length(42) + b"\r\n" + BODY,
    "any bytes in a value": HOST + b"A: \x80\xff\t!\r\n" + length(42) + b"\r\n" + BODY,
    "the same header twice": HOST + b"A: b\r\nA: c\r\n" + length(42) + b"\r\n" + BODY,
    "capitals": HOST + coding("Chunked").upper() + b"\r\n" + CHUNKED,
    "leading zeros": HOST + length("00042") + b"\r\n" + BODY,
    "chunk extension": HOST + coding("chunked") + b'\r\n2a;a="b c"\r\n' + CHUNKED[4:],
    "trailers": HOST + coding("chunked") + b"\r\n" + CHUNKED[:-2] + b"Host: evil\r\nA: b\r\n\r\n",
    "h2c": HOST + b"Connection: Upgrade, A\r\nUpgrade: h2c\r\nA: b\r\n" + length(42) + b"\r\n" + BODY,
    "h2c in chunks": HOST + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + coding("chunked") + b"\r\n" + CHUNKED,
    "whole URL": HOST.replace(b" /", b" http://elsewhere/") + length(42) + b"\r\n" + BODY,
}


@pytest.mark.inside
@on_uvloop
async def test_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is odd and yet clear reaches the engine as one plain request, and the connection goes on."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **limited()) as app:
        client = await connect(app.url)
        for n, (name, raw) in enumerate(ACCEPTED.items()):
            client.ask(raw + raw, "POST", "POST")
            await client.answer(2 * n + 1)
            assert (client.error, client.answers[-1].status) == (None, 200), name
            for head, body in engine.seen:
                assert body == BODY, name
                assert head.startswith(LINE), name
                assert head.count(b"\r\nhost: 127.0.0.1:") == 1, name
                low = head.lower()
                assert not any(word in low for word in (b"evil", b"upgrade", b"transfer-encoding", b"elsewhere")), name
                assert low.count(b"content-length") == 1, name
                if name == "h2c":
                    assert b"\r\na:" not in low
            assert len(engine.seen) == 2, name
            engine.seen.clear()
        client.transport.close()


@pytest.mark.inside
@on_uvloop
async def test_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for it is told once to go on, and one whose request is refused is not."""
    asking = HOST + length(42) + b"Expect: 100-continue\r\n"
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **limited()) as app:
        client = await connect(app.url)
        for n, lines in enumerate((b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n")):
            client.raw.clear()
            client.ask(asking + lines + b"\r\n", "POST")
            await client.until(lambda: b"\r\n\r\n" in client.raw)
            assert client.raw == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert len(engine.seen) == n
            client.transport.write(BODY)
            assert (await client.answer(n)).status == 200
            assert b"expect" not in engine.seen[-1][0].lower()
        client.transport.close()
        for raw in (asking.replace(b" 42", b" 100001"), asking.replace(b"HTTP/1.1", b"HTTP/1.0")):
            client = await connect(app.url)
            client.ask(raw + b"\r\n", "POST")
            client.transport.write(BODY)
            await client.answer()
            assert b" 100 " not in client.raw


@pytest.mark.inside
@on_uvloop
async def test_no_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish for WebSocket is refused, one for another protocol is left aside (RFC 9110 section 7.8), and HEAD is
    answered without a body."""
    asks = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n"
    heads = b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\nHEAD /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        wished = asks % (b"/healthz", b"h2c") + asks % (PATH.encode(), b"TLS/1.0")
        client.ask(wished + heads, "GET", "GET", "HEAD", "HEAD")
        await client.answer(3)
        assert client.error is None
        assert [each.status for each in client.answers] == [200, 404, 200, 404]
        assert int(client.answers[2].headers[b"content-length"]) > 0
        client.transport.close()
        client = await connect(app.url)
        client.ask(asks % (b"/healthz", b"websocket"), "GET")
        await client.answer()
        assert client.answers[0].status == 501
        assert engine.seen == []
        client.transport.close()


@pytest.mark.inside
@pytest.mark.parametrize("ends", ["close", "half-close", "RST"])
@on_uvloop
async def test_clients_that_leave(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in its request a client leaves, nothing stays open; a request that was not whole reaches no engine, and
    the work for one that was is ended."""
    raw = post()

    async def hold(wire: Wire) -> None:
        await wire.lost.wait()

    async with RawEngine(hold) as engine, proxied(engine, monkeypatch) as app:
        for place in range(len(raw) + 1):
            client = await connect(app.url)
            client.ask(raw[:place])
            if place == len(raw):
                await engine.asked(1)
            _leave(client, ends)
            while app.http._server.clients:
                await asyncio.sleep(0)
            await settled(app)
            client.transport.abort()
            assert len(engine.seen) == (place == len(raw))
        await engine.wires[-1].lost.wait()


@pytest.mark.inside
@on_uvloop
async def test_clients_that_leave_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves after any number of events ends the engine's work."""
    pieces = [b"%x\r\n%b\r\n" % (len(event), event) for event in (b"data: {}\n\n",) * 6]

    async def stream(wire: Wire) -> None:
        wire.transport.write(head(SSE, "transfer-encoding: chunked"))
        for piece in pieces:
            wire.transport.write(piece)
            await asyncio.sleep(0)
        await wire.lost.wait()

    async with RawEngine(stream) as engine, proxied(engine, monkeypatch) as app:
        for count in range(1, len(pieces) + 1):
            for ends in ("close", "RST"):
                client = await connect(app.url)
                client.ask(post())
                await client.until(lambda n=count, c=client: c.raw.count(b"data") >= n)  # type: ignore[misc]
                _leave(client, ends)
                await engine.wires[-1].lost.wait()
                await settled(app)
        assert {record.status for record in app.control.pages.decisions} == {499}


def _leave(client: Client, ends: str) -> None:
    if ends == "half-close":
        client.transport.write_eof()
        return
    if ends == "RST":
        sock = client.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.transport.close()


@pytest.mark.promise("A connection has a bounded number of pipelined requests waiting.", "clients")
@pytest.mark.inside
@pytest.mark.parametrize("body_bytes", [100, 200_000])
@on_uvloop
async def test_requests_sent_ahead(body_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests sent ahead few are read, and none reaches an engine before its turn; when the client has left, what
    it sent ahead is forgotten."""
    go_on = asyncio.Event()

    async def hold(wire: Wire) -> None:
        await go_on.wait()
        await play(wire)

    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * body_bytes + b'"}]}'
    async with RawEngine(hold) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(body=body) * 100, *["POST"] * 100)
        await engine.asked(1)
        (server_side,) = app.http._server.clients
        while not server_side._intake.waits:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        if body_bytes > 1_000:
            assert sum(each.body_bytes for each in server_side._waiting) <= WAITING_BYTES_MAX + 2 * len(body)
        else:
            assert len(server_side._waiting) <= WAITING_MAX + 1  # though all came in one read
            client.ask(post(body=body) * 100, *["POST"] * 100)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(server_side._waiting) <= WAITING_MAX + 1
        assert len(engine.seen) == 1
        client.transport.abort()
        await client.lost.wait()
        go_on.set()
        while app.http._server.clients:
            await asyncio.sleep(0)
        await settled(app)
        # Two more may be on their way when the first cannot be written: answers are written at the end of the turn.
        assert len(engine.seen) <= 3


@pytest.mark.inside
@on_uvloop
async def test_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has had an answer is kept for `keepalive_s`, and one that is being answered for as long as that
    takes; blank lines do not make it less idle."""

    async def hold(wire: Wire) -> None:
        await wire.lost.wait()

    async with RawEngine(hold) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "GET")
        await client.answer()
        (server_side,) = app.http._server.clients
        now_s = asyncio.get_running_loop().time()
        assert not server_side.overdue(now_s)
        server_side.data_received(b"\r\n")
        assert not server_side.overdue(now_s + 74)
        assert server_side.overdue(now_s + 76) == "idle"
        client.ask(post())
        await engine.asked(1)
        assert not server_side.overdue(now_s + 77)
        assert not server_side.overdue(now_s + 10_000)
        client.transport.abort()


@on_uvloop
async def test_a_bug_is_heard_of() -> None:
    """When the code behind it fails, the client's connection breaks and the loop's handler hears why at once."""
    loop, heard_of = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: heard_of.append(context))

    async def fails(request: Request) -> None:
        raise ZeroDivisionError(request.path)

    def refuse(_: Request, error: Refusal) -> None:
        raise error

    server = Server(fails, refuse, LIMITS)
    host, port = await server.listen("127.0.0.1", 0)
    client = await connect(f"http://{host}:{port}")
    client.ask(post("/x"))
    await client.lost.wait()
    assert [type(each["exception"]) for each in heard_of] == [ZeroDivisionError]
    await server.close()
    assert not server.clients
