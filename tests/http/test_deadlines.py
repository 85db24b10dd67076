"""Clients that are slow, many, or do not read: each is ended in time, and says to nobody else that it was there."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.app import App
from router.http.accepting import Places
from router.http.deadlines import BODY_TIMEOUT, HEAD_TIMEOUT, IDLE, ClientLimits, Patience, acknowledged
from router.http.receiver import BETWEEN, BODY, HEAD, JOINED_BYTES_MAX, Receiver
from router.http.request import BadRequest, Connection, Request
from tests.http.wire import STREAM, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.hub.test_pressure import EVENT, asks_and_does_not_read, chunk
from tests.support.fakes import running
from tests.support.recorded import RECORDED, SSE, head

LIMITS = ClientLimits(
    body_bytes_max=1 << 20,
    keepalive_s=75.0,
    head_timeout_s=10.0,
    body_bytes_per_s_min=1_024,
    send_timeout_s=60.0,
    connections_max=100,
    connections_per_client_max=100,
)
LINE = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT = {"listen__head_timeout_s": 0.3, "listen__send_timeout_s": 0.3}


async def play(wire: Wire) -> None:
    """A healthy answer."""
    wire.transport.write(RECORDED["held JSON"].raw)


async def page(url: str) -> str:
    """The router's metrics."""
    client = await connect(url)
    client.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "GET")
    answer = await client.answer()
    client.transport.close()
    return answer.body.decode()


# -- what Patience says, in simulated time ---------------------------------------------------------------------------


@given(began_s=st.floats(0, 1), stage=st.sampled_from([HEAD, BETWEEN]), drips=st.integers(0, 50))
def test_a_head_is_ended_by_its_limit(began_s: float, stage: int, drips: int) -> None:
    """Whenever between two looks a head begins, or a connection on which no byte ever comes: it is ended not after
    `head_timeout_s` and not before four fifths of it, however it drips."""
    patience, now_s = Patience(), 0.0
    requests = 1 if stage == HEAD else 0
    if requests:
        patience.sends(now_s, LIMITS, BETWEEN, 0, 0)
    while True:
        now_s += LIMITS.sweep_s
        if now_s < began_s:
            continue
        if why := patience.sends(now_s, LIMITS, stage, requests, drips):
            break
    assert why == (HEAD_TIMEOUT if stage == HEAD else IDLE)
    assert 0.8 * LIMITS.head_timeout_s - LIMITS.sweep_s <= now_s - began_s <= LIMITS.head_timeout_s + LIMITS.sweep_s


@given(
    st.lists(st.tuples(st.floats(0.5, 2), st.integers(0, 4_000)), min_size=1, max_size=200), st.sampled_from([0, 1_024])
)
def test_a_body_must_come_at_its_rate(looks: list[tuple[float, int]], rate: int) -> None:
    """By an exact account: ten seconds' credit, one more for 1,024 bytes, at most 75; ended when it is spent, and not
    before. At any rate, a body of which nothing comes for 75 s is ended, and one of which something does is not."""
    limits = replace(LIMITS, body_bytes_per_s_min=rate)
    patience, now_s, body_bytes, credit_s = Patience(), 0.0, 0, 10.0
    assert patience.sends(now_s, limits, BODY, 1, 0) == ""
    for took_s, came_bytes in looks:
        now_s, body_bytes = now_s + took_s, body_bytes + came_bytes
        credit_s = min(75.0, credit_s - took_s + (came_bytes / rate if rate else 75.0 * bool(came_bytes)))
        said = patience.sends(now_s, limits, BODY, 1, body_bytes)
        if abs(credit_s) > 1e-6:
            assert said == ("" if credit_s > 0 else BODY_TIMEOUT)
        if said:
            return


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=100))
def test_only_a_client_that_takes_nothing_is_ended(looks: list[tuple[int, int]]) -> None:
    """Bytes left, and none taken at any look, for longer than `send_timeout_s`: nothing else ends it."""
    patience, now_s, taken_bytes, since_s = Patience(), 0.0, 0, None
    for left_bytes, took_bytes in looks:
        now_s, taken_bytes = now_s + 10.0, taken_bytes + took_bytes
        if not left_bytes:
            since_s = None
        elif took_bytes or since_s is None:
            since_s = now_s
        wanted = since_s is None or now_s - since_s <= LIMITS.send_timeout_s
        assert patience.reads(now_s, LIMITS, left_bytes, taken_bytes) == wanted


# -- heads and bodies ------------------------------------------------------------------------------------------------


@on_uvloop
async def test_half_open_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of connections with half a head, dripping or silent, or without a byte: all are ended at the limit, with
    a 408 where something was said, while others are served; metrics say how many, and none is left."""
    count = int(os.environ.get("WARMROUTE_HALF_OPEN", "300"))
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, listen__head_timeout_s=count / 300) as app:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        clients = [await connect(app.url) for _ in range(count)]
        for n, client in enumerate(clients):
            if n % 3:
                client.ask(b"POST /v1/messages HTTP/1.1\r\nHos", "POST")
        served = 0
        while any(not client.lost.is_set() for client in clients):
            for client in clients[1::3]:
                if not client.lost.is_set() and not client.raw:
                    client.transport.write(b"t")
            good = await connect(app.url)
            good.ask(post())
            served += (await good.answer()).status == 200
            good.transport.close()
            assert loop.time() - began_s < 60
        assert served
        for n, client in enumerate(clients):
            assert [answer.status for answer in client.answers] == ([408] if n % 3 else [])
            if n % 3:
                assert json.loads(client.answers[0].body)["error"]["message"]
        text = await page(app.url)
        assert f'warmroute_connections_closed_total{{reason="head_timeout"}} {count - len(clients[::3])}.0' in text
        assert f'warmroute_connections_closed_total{{reason="idle"}} {len(clients[::3])}.0' in text
        while app.edge._server.clients:
            await asyncio.sleep(0.01)  # the lingering of those that were refused
        assert app.edge._server.connections == 0


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
@on_uvloop
async def test_slow_bodies(framing: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes too slowly is answered 408 in the dialect's words, one that comes slowly enough is served, and
    so is the request before it; extensions and trailers of chunks are no body."""
    chunked = b"chunked" in framing
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **SHORT) as app:
        client = await connect(app.url)
        client.ask(post(), "POST")
        client.ask(LINE + framing + b"\r\n\r\n" + (b"5;" if chunked else b"{"), "POST")
        while not client.lost.is_set() and len(client.answers) < 2:
            client.transport.write(b"x")
            await asyncio.sleep(0.01)
        await client.answer(1)
        assert client.error is None
        assert [answer.status for answer in client.answers] == [200, 408]
        assert json.loads(client.answers[1].body)["type"] == "error"
        assert len(engine.seen) == 1
        body = b'{"model":"m","x":"' + b"x" * 2_000 + b'"}'
        client = await connect(app.url)
        client.ask(post(body=body)[: -len(body)], "POST")
        for at in range(0, len(body), 50):  # some 5,000 bytes a second
            client.transport.write(body[at : at + 50])
            await asyncio.sleep(0.01)
        assert (await client.answer()).status == 200
        client.transport.close()


class Taken:
    """Takes requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def arrived(self, request: Request) -> None:
        """See request.Connection."""
        self.requests.append(request)

    def expected(self) -> None:
        """See request.Connection."""


def refusal(receiver: Receiver, pieces: Iterable[bytes]) -> int:
    """The status with which these are refused, 0 if they are not."""
    try:
        for piece in pieces:
            receiver.feed(piece)
    except BadRequest as error:
        return error.status
    return 0


def fed(raw: bytes, size: int, body_bytes_max: int) -> tuple[int, int, bytes]:
    """What a receiver makes of it, piece by piece: the status with which it refuses, 0 if it does not, the most bytes
    that this took, and the last request's body."""
    taken = Taken()
    receiver = Receiver(cast("Connection", taken), body_bytes_max)
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    tracemalloc.start()
    try:
        refused = refusal(receiver, (bytes(bytearray(piece)) for piece in pieces))  # as a socket's: its own object
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        receiver.close()
    return refused, most_bytes, taken.requests[-1].body if taken.requests else b""


def least_of_three(raw: bytes, size: int, body_bytes_max: int = 64 << 20) -> tuple[int, int, bytes]:
    """`fed`, where the rest of the process did least: whatever it makes meanwhile is counted, too."""
    return min((fed(raw, size, body_bytes_max) for _ in range(3)), key=itemgetter(1))


@pytest.mark.parametrize("chunk_bytes", [1, 2, 100, 5_000, 100_000])
@pytest.mark.parametrize("read_bytes", [1_000, 65_536])
def test_bodies_in_small_pieces(chunk_bytes: int, read_bytes: int) -> None:
    """A body in however small chunks and reads is whole, and takes no more than half as much again as its size."""
    body = bytes(range(256)) * 1_000
    raw = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(chunk(body[at : at + chunk_bytes]) for at in range(0, len(body), chunk_bytes)) + b"0\r\n\r\n"
    refused, most_bytes, came = least_of_three(raw, read_bytes)
    assert not refused
    assert came == body
    assert most_bytes < len(body) * 1.5 + 2 * JOINED_BYTES_MAX + 4 * read_bytes


def test_a_body_over_the_limit_takes_no_more_than_it() -> None:
    """Chunks without end are refused with 413 before more is held than the limit, and a read."""
    limit = 256_000
    raw = LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 10) * 200_000
    refused, most_bytes, came = least_of_three(raw, 8_192, limit)
    assert refused == 413
    assert not came
    assert most_bytes < limit * 1.5 + 2 * JOINED_BYTES_MAX


@pytest.mark.parametrize("tail", [b"0\r\nA: ", b"0\r\n", b"5;"])
def test_endless_trailers_and_extensions(tail: bytes) -> None:
    """What a chunked body has besides its body ends at the limit of a head."""
    receiver = Receiver(Taken(), 1_000)  # type: ignore[arg-type]
    receiver.feed(LINE + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    receiver.feed(tail)
    refused = refusal(receiver, (b"A%d: b\r\n" % n * 200 if tail == b"0\r\n" else b"x" * 2_000 for n in range(100)))
    assert refused == 431


def test_many_header_lines() -> None:
    """A head of few bytes in very many lines is refused."""
    receiver = Receiver(Taken(), 1_000)  # type: ignore[arg-type]
    with pytest.raises(BadRequest) as refused:
        receiver.feed(LINE + b"a:\r\n" * 300 + b"\r\n")
    assert refused.value.status == 431


@on_uvloop
async def test_compressed_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte that stands for a gigabyte is refused with 415 unread: nothing unpacks it, here or on the admin
    listener."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(64)) + packer.flush()
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        tracemalloc.start()
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
            client.ask(post(path, bomb, "Content-Encoding: gzip"), "POST")
            answer = await client.answer(len(client.answers))
            assert answer.status == 415
        admin = await connect(app.admin_url)
        admin.ask(post("/metrics", bomb, "Content-Encoding: gzip").replace(b"Host: x", b"Host: localhost", 1), "POST")
        assert (await admin.answer()).status == 415
        most_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most_bytes < 16 << 20
        assert not engine.seen
        client.transport.close()
        admin.transport.close()


# -- how many --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=100), st.integers(1, 6), st.integers(1, 4))
def test_places(steps: list[tuple[bool, str]], in_all: int, of_one: int) -> None:
    """Exactly so many at once, in all and from one address, and nothing is kept of who left."""
    limits = replace(LIMITS, connections_max=in_all, connections_per_client_max=of_one)
    places, there = Places(limits), Counter[str]()
    for comes, address in steps:
        if comes:
            room = there.total() < in_all and there[address] < of_one
            assert (places.refuses(address) == "") == room
            there[address] += room
        elif there[address]:
            places.leave(address)
            there[address] -= 1
        assert places.taken == there.total()
    assert places._of_address == +there


@pytest.mark.parametrize("setting", ["connections_max", "connections_per_client_max"])
@on_uvloop
async def test_too_many_connections(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes beyond the limit is reset and counted, those before are served, and who leaves makes room."""
    limit: dict[str, Any] = {f"listen__{setting}": 3}
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **limit) as app:
        within = [await connect(app.url) for _ in range(3)]
        for client in within:
            client.ask(post())
            assert (await client.answer()).status == 200
        for _ in range(5):
            with suppress(ConnectionResetError):  # or a moment later
                beyond = await connect(app.url)
                await beyond.lost.wait()
                assert not beyond.raw
        assert app.edge._server.closed[setting] == 5
        within[0].transport.close()
        while len(app.edge._server.clients) > 2:
            await asyncio.sleep(0)
        client = await connect(app.url)
        client.ask(post())
        assert (await client.answer()).status == 200
        assert app.edge._server.connections == 3
        for each in (*within, client):
            each.transport.close()


# -- clients that do not read ----------------------------------------------------------------------------------------


async def flood(wire: Wire) -> None:
    """A stream without end."""
    wire.transport.write(head(SSE, "transfer-encoding: chunked"))
    while not wire.lost.is_set():
        await wire.pour(chunk(EVENT), 1)
        await asyncio.sleep(0)


@on_uvloop
async def test_clients_that_do_not_read_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty clients read nothing while their engine floods them: little is kept for each, others are served, and
    after `send_timeout_s` all are reset, their engine's work is ended and their leases are given back."""
    count = 20

    async def either(wire: Wire) -> None:
        await (flood(wire) if b'"stream":true' in engine.seen[-1][1] else play(wire))

    async with RawEngine(either) as engine, proxied(engine, monkeypatch, listen__send_timeout_s=1.5) as app:
        clients = [await asks_and_does_not_read(app, post(body=STREAM)) for _ in range(count)]
        kept_max = ended = 0
        while app.edge._server.closed["send_timeout"] < count:
            good = await connect(app.url)
            good.ask(post(body=b'{"model":"m","messages":[]}'))
            ended += (await good.answer()).status == 200
            good.transport.close()
            kept_max = max([kept_max, *(each.unread_bytes for each in app.edge._server.clients)])
        assert ended
        assert 0 < kept_max <= 1 << 20
        await settled(app)
        assert app.edge._server.closed["send_timeout"] == count
        for client in clients:
            client.transport.resume_reading()
            await client.lost.wait()
            assert not any(answer.whole for answer in client.answers)
            client.transport.abort()


@on_uvloop
async def test_a_slow_engine_is_not_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has read all there is waits for its engine as long as that takes, and one that reads little by
    little is not ended, though what is kept for it never becomes less."""
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        wire.transport.write(head(SSE, "transfer-encoding: chunked") + chunk(b"data: {}\n\n"))
        await go_on.wait()
        wire.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with RawEngine(slow) as engine, proxied(engine, monkeypatch, **SHORT) as app:
        client = await connect(app.url)
        client.ask(post(body=STREAM))
        await asyncio.sleep(1.0)  # three times the limit
        go_on.set()
        assert (await client.answer()).whole
        client.transport.close()
    async with RawEngine(flood) as engine, proxied(engine, monkeypatch, listen__send_timeout_s=1.5) as app:
        client = await asks_and_does_not_read(app, post(body=STREAM))
        while not any(each.unread_bytes for each in app.edge._server.clients):
            await asyncio.sleep(0)
        (server_side,) = app.edge._server.clients
        assert acknowledged(server_side._transport.get_extra_info("socket"), -1) > 0, "the kernel does not say"
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 4.0
        while loop.time() < until_s:
            client.transport.resume_reading()
            await asyncio.sleep(0.05)
            client.transport.pause_reading()
            await asyncio.sleep(0.05)
        assert not client.lost.is_set()
        assert app.edge._server.closed["send_timeout"] == 0
        client.transport.abort()
        await engine.wires[-1].lost.wait()


async def test_limits_from_settings() -> None:
    """What the settings say is what the listener does."""
    async with RawEngine(play) as engine:
        async with running(engine.url, listen__connections_max=7, listen__body_bytes_per_s_min=5) as app:
            assert isinstance(app, App)
            limits = app.edge._server.limits
            assert (limits.connections_max, limits.body_bytes_per_s_min, limits.head_timeout_s) == (7, 5, 10.0)
            assert socket.SOCK_STREAM in {sock.type for sock in app.edge._server._listener.sockets}  # type: ignore[union-attr]
