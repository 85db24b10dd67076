"""What a client may send or leave unread, in bytes and connections."""

from __future__ import annotations

import asyncio
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

from router.http.acceptor import ConnectionSlots
from router.http.client_timeouts import count_acked_bytes
from router.http.receiver import JOINED_BYTES_MAX, Receiver
from router.http.request import Connection, Refusal, Request
from router.router_server import RouterServer
from tests.control.test_pressure import EVENT, asks_and_does_not_read, chunk
from tests.http.clients import LIMITS, LINE, play
from tests.http.looks import Looks
from tests.http.wire import STREAM, RawEngine, Wire, connect, on_uvloop, post, proxied, settled
from tests.support.fakes import running
from tests.support.recorded import SSE, head


class Taken:
    """Takes requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def on_request(self, request: Request) -> None:
        """See request.Connection."""
        self.requests.append(request)

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """Every body is wanted."""
        return True

    def grows(self, request: Request, body_bytes: int) -> None:
        """There is room."""


def refusal(receiver: Receiver, pieces: Iterable[bytes]) -> int:
    """The status with which these are refused, 0 if they are not."""
    try:
        for piece in pieces:
            receiver.feed(piece)
    except Refusal as error:
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


@pytest.mark.promise("A body that arrives takes at most 1.5 times its size in memory.", "clients")
@pytest.mark.parametrize("chunk_bytes", [1, 2, 100, 5_000, 100_000])
@pytest.mark.parametrize("read_bytes", [1_000, 65_536])
def test_bodies_in_small_pieces(chunk_bytes: int, read_bytes: int) -> None:
    """A body in however small chunks and reads is whole, and takes no more than half as much again as its size."""
    body = bytes(range(256)) * (1_000 if chunk_bytes > 2 else 60)  # short chunks may not be very many
    raw = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(chunk(body[at : at + chunk_bytes]) for at in range(0, len(body), chunk_bytes)) + b"0\r\n\r\n"
    refused, most_bytes, came = least_of_three(raw, read_bytes)
    assert not refused
    assert came == body
    assert most_bytes < len(body) * 1.5 + 2 * JOINED_BYTES_MAX + 4 * read_bytes


@pytest.mark.promise("A body over the limit takes no more memory than the limit.", "clients")
def test_a_body_over_the_limit_takes_no_more_than_it() -> None:
    """Chunks without end are refused with 413 before more is held than the limit, and a read."""
    limit = 256_000
    raw = LINE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 20) * 100_000
    refused, most_bytes, came = least_of_three(raw, 8_192, limit)
    assert refused == 413
    assert not came
    assert most_bytes < limit * 1.5 + 2 * JOINED_BYTES_MAX


@pytest.mark.promise("A body that arrives takes at most 1.5 times its size in memory.", "clients")
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
    with pytest.raises(Refusal) as refused:
        receiver.feed(LINE + b"a:\r\n" * 300 + b"\r\n")
    assert refused.value.status == 431


@pytest.mark.promise("No compressed body is decompressed.", "clients")
@pytest.mark.inside
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


@pytest.mark.promise("Connections are limited in all and per address, unfinished TLS handshakes included.", "clients")
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=100), st.integers(1, 6), st.integers(1, 4))
def test_connection_slots(steps: list[tuple[bool, str]], in_all: int, of_one: int) -> None:
    """Exactly so many at once, in all and from one address, and nothing is kept of who left."""
    limits = replace(LIMITS, connections_max=in_all, connections_per_client_max=of_one)
    slots, there = ConnectionSlots(limits), Counter[str]()
    for comes, address in steps:
        if comes:
            room = there.total() < in_all and there[address] < of_one
            assert (slots.refuses(address) == "") == room
            there[address] += room
        elif there[address]:
            slots.leave(address)
            there[address] -= 1
        assert slots.taken == there.total()
    assert slots._of_address == +there


@pytest.mark.promise("Connections are limited in all and per address, unfinished TLS handshakes included.", "clients")
@pytest.mark.inside
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
        assert app.http._server.closed[setting] == 5
        within[0].transport.close()
        while len(app.http._server.clients) > 2:
            await asyncio.sleep(0)
        client = await connect(app.url)
        client.ask(post())
        assert (await client.answer()).status == 200
        assert app.http._server.connections == 3
        for each in (*within, client):
            each.transport.close()


async def flood(wire: Wire) -> None:
    """A stream without end."""
    wire.transport.write(head(SSE, "transfer-encoding: chunked"))
    while not wire.lost.is_set():
        await wire.pour(chunk(EVENT), 1)
        await asyncio.sleep(0)


@pytest.mark.promise(
    "A client that does not read costs at most 1 MiB and is ended after `listen.send_timeout_s`.", "clients"
)
@pytest.mark.inside
@on_uvloop
async def test_clients_that_do_not_read_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty clients read nothing while their engine floods them: little is kept for each, others are served, and
    after `send_timeout_s` all are reset, their engine's work is ended and their leases are given back."""
    count = 20

    async def either(wire: Wire) -> None:
        await (flood(wire) if b'"stream":true' in engine.seen[-1][1] else play(wire))

    async with RawEngine(either) as engine, proxied(engine, monkeypatch) as app:
        looks = Looks(app.http._server)
        clients = [await asks_and_does_not_read(app, post(body=STREAM)) for _ in range(count)]
        kept_max = ended = 0
        while app.http._server.closed["send_timeout"] < count:
            good = await connect(app.url)
            good.ask(post(body=b'{"model":"m","messages":[]}'))
            ended += (await good.answer()).status == 200
            good.transport.close()
            await good.lost.wait()
            kept_max = max([kept_max, *(each.unread_bytes for each in app.http._server.clients)])
            await looks.look(LIMITS.send_timeout_s + 1)
        assert ended
        assert 0 < kept_max <= 1 << 20
        await settled(app)
        assert app.http._server.closed["send_timeout"] == count
        for client in clients:
            client.transport.resume_reading()
            await client.lost.wait()
            assert not any(answer.whole for answer in client.answers)
            client.transport.abort()


@pytest.mark.promise("A slow engine or a slow steady reader is not taken for a client that does not read.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_a_slow_engine_is_not_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has read all there is waits for its engine as long as that takes, and one that reads little by
    little is not ended, though what is kept for it never becomes less."""
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        wire.transport.write(head(SSE, "transfer-encoding: chunked") + chunk(b"data: {}\n\n"))
        await go_on.wait()
        wire.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with RawEngine(slow) as engine, proxied(engine, monkeypatch) as app:
        looks = Looks(app.http._server)
        client = await connect(app.url)
        client.ask(post(body=STREAM))
        await client.until(lambda: b"data: {}" in client.raw)
        for _ in range(3):
            await looks.look(LIMITS.send_timeout_s)
        go_on.set()
        assert (await client.answer()).whole
        client.transport.close()
    async with RawEngine(flood) as engine, proxied(engine, monkeypatch) as app:
        looks = Looks(app.http._server)
        client = await asks_and_does_not_read(app, post(body=STREAM))
        while not any(each.unread_bytes for each in app.http._server.clients):
            await asyncio.sleep(0)
        (server_side,) = app.http._server.clients

        def taken_bytes() -> int:
            assert server_side._transport is not None
            return count_acked_bytes(server_side._transport.get_extra_info("socket"), -1)

        assert taken_bytes() > 0, "the kernel does not say"
        for _ in range(10):  # five times the limit
            before = taken_bytes()
            client.transport.resume_reading()
            while taken_bytes() == before:
                await asyncio.sleep(0)
            client.transport.pause_reading()
            await looks.look(LIMITS.send_timeout_s / 2)
        assert not client.lost.is_set()
        assert app.http._server.closed["send_timeout"] == 0
        client.transport.abort()
        await engine.wires[-1].lost.wait()


async def test_limits_from_settings() -> None:
    """What the settings say is what the listener does."""
    async with RawEngine(play) as engine:
        async with running(engine.url, listen__connections_max=7, listen__body_bytes_per_s_min=5) as app:
            assert isinstance(app, RouterServer)
            limits = app.http._server.limits
            assert (limits.connections_max, limits.body_bytes_per_s_min, limits.head_timeout_s) == (7, 5, 10.0)
            assert socket.SOCK_STREAM in {sock.type for sock in app.http._server._listener.sockets}  # type: ignore[union-attr]
