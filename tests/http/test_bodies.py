"""Bodies of requests: who may send one, how much of all of them is held, and how long one may take."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.config.api_keys import Keys, Tenant
from router.http.body_budget import SHARE, BodyBudget
from router.http.client_connection import ClientConnection
from router.http.client_timeouts import BODY_TIMEOUT, ClientTimer
from router.http.receiver import BODY
from router.http.request import BodyReservation
from router.router_server import RouterServer
from tests.http.clients import LIMITS, play
from tests.http.wire import CHAT, Client, RawEngine, Wire, connect, on_uvloop, post, proxied
from tests.support.keyring import Keyring
from tests.support.recorded import SSE, head

MIB = 1 << 20
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def body_of(size: int) -> bytes:
    """A body that is a request of so many bytes."""
    start, end = b'{"model":"m","messages":[],"user":"', b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


def started(size: int, *lines: str, path: str = CHAT) -> bytes:
    """A head that promises a body of this size."""
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {size}", *lines, "", "")).encode()


def connections(app: RouterServer) -> list[ClientConnection]:
    """The router's ends of all connections."""
    return list(app.http._server.clients)


def kept_bytes(app: RouterServer) -> int:
    """Bytes of bodies that are kept while they come."""
    return sum(len(piece) for each in connections(app) for piece in each._receiver._pieces)


async def all_came(app: RouterServer, size: int) -> None:
    """Wait until the router has read so many bytes of bodies that are under way."""
    while sum(each._receiver.reading_bytes for each in connections(app)) < size:
        await asyncio.sleep(0)


# -- the key comes first ---------------------------------------------------------------------------------------------


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
@pytest.mark.inside
@pytest.mark.parametrize("lines", [(), ("Expect: 100-continue",), ("Authorization: Bearer wr-no",)])
@on_uvloop
async def test_a_head_without_a_key(lines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who shows no key hears so at the end of the head, without having sent a byte of the body or been told to: 401 in
    the words of the dialect. Who shows one is told to go on."""
    ring = Keyring(tmp_path, acme={})
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **ring.settings) as app:
        client = await connect(app.url)
        client.ask(started(MIB, *lines, path="/v1/messages"))
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (401, b"close")
        assert json.loads(answer.body)["type"] == "error"
        assert b" 100 " not in client.raw
        client = await connect(app.url)
        client.ask(started(MIB, f"x-api-key: {ring.keys['acme']}", "Expect: 100-continue"))
        await client.until(lambda: bool(client.raw))
        assert client.raw == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.transport.write(body_of(MIB))
        assert (await client.answer()).status == 200
        assert len(engine.seen) == 1
        client.transport.close()


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
@pytest.mark.inside
@on_uvloop
async def test_bodies_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sixteen clients without a key, each with a body of 32 MiB under way: nothing of it is kept while they send."""
    ring = Keyring(tmp_path, acme={})
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **ring.settings) as app:
        clients = [await connect(app.url) for _ in range(16)]
        for client in clients:
            client.ask(started(32 * MIB))
        for _ in range(2):
            for client in clients:
                if not client.lost.is_set():
                    client.transport.write(bytes(MIB))
            await asyncio.sleep(0)
            assert kept_bytes(app) == app.http._server.bodies.held_bytes == 0
        for client in clients:
            assert (await client.answer()).status == 401
            client.transport.abort()
        assert not engine.seen


@pytest.mark.inside
@pytest.mark.parametrize("raw", [b"POST / HTTP/1.1\r\nHost: x\r\n\r\nG\r\n", started(MIB) + bytes(200_000)])
@on_uvloop
async def test_a_refusal_keeps_nothing(raw: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a refusal waits to be read, nothing holds what was read before it: no piece of a body, and no frame of the
    code that met it."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **Keyring(tmp_path, acme={}).settings) as app:
        client = await connect(app.url)
        client.ask(raw, "POST", "POST")
        await client.until(lambda: bool(client.answers and client.answers[-1].headers[b"connection"] == b"close"))
        (connection,) = connections(app)
        error = connection._refusal
        assert error is not None
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
        assert kept_bytes(app) == 0
        client.transport.close()


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
@pytest.mark.inside
@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/nowhere"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
@on_uvloop
async def test_pages_keep_no_body(path: str, framing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that anybody may see take no body: what is sent with one is dropped as it comes, and the page is answered
    behind it."""
    chunk = b"3d09\r\n" + bytes(15_625) + b"\r\n" if "chunked" in framing else bytes(15_625)
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode(), "GET")
        for n in range(64):
            client.transport.write(chunk)
            if n < 63:
                await all_came(app, (n + 1) * 15_625)
                assert kept_bytes(app) == app.http._server.bodies.held_bytes == 0
        if "chunked" in framing:
            client.transport.write(b"0\r\n\r\n")
        assert (await client.answer()).status == (404 if path == "/nowhere" else 200)
        client.ask(post())
        assert (await client.answer(1)).status == 200
        assert len(engine.seen) == 1
        client.transport.close()


@pytest.mark.inside
@on_uvloop
async def test_a_key_that_is_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key that is no more when the body is there opens nothing, though it was there when the body began; one that is
    another tenant's by then opens, and its body counts once."""
    ring = Keyring(tmp_path, acme={})
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **ring.settings) as app:
        client = await connect(app.url)
        client.ask(started(1_000, f"x-api-key: {ring.keys['acme']}"))
        client.transport.write(body_of(1_000)[:500])
        await all_came(app, 500)
        app.http._callers.keys = Keys({}, {})
        client.transport.write(body_of(1_000)[500:])
        assert (await client.answer()).status == 401
        assert not engine.seen
        client.transport.close()
        for name in ("acme", "moved"):
            tenant = Tenant(name)
            app.http._callers.keys = Keys({hashlib.sha256(ring.keys["acme"].encode()).hexdigest(): tenant}, {})
            if name == "acme":
                client = await connect(app.url)
                client.ask(started(1_000, f"x-api-key: {ring.keys['acme']}"))
                client.transport.write(body_of(1_000)[:500])
                await all_came(app, 500)
        client.transport.write(body_of(1_000)[500:])
        assert (await client.answer()).status == 200
        assert app.control.pages.decisions[-1].client.tenant == "moved"
        client.transport.close()


@pytest.mark.promise("Before a key is known no body is awaited, kept or parsed, and no engine is contacted.", "tenants")
@pytest.mark.inside
@on_uvloop
async def test_requests_sent_ahead_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind a request with a key, one without gets no place among those that wait."""
    ring, go_on = Keyring(tmp_path, acme={}), asyncio.Event()

    async def held(wire: Wire) -> None:
        await go_on.wait()
        await play(wire)

    async with RawEngine(held) as engine, proxied(engine, monkeypatch, **ring.settings) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, body_of(100), f"x-api-key: {ring.keys['acme']}"))
        await engine.asked(1)
        client.ask(post(CHAT, body_of(100_000)) * 8, *["POST"] * 8)
        while connections(app)[0]._refusal is None:
            await asyncio.sleep(0)
        assert not connections(app)[0]._waiting
        go_on.set()
        assert [(await client.answer(n)).status for n in range(2)] == [200, 401]
        await client.lost.wait()
        assert len(engine.seen) == 1


# -- one budget ------------------------------------------------------------------------------------------------------


class Budgets(RuleBasedStateMachine):
    """A budget, and a plain account of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.budget = BodyBudget(self.loop, 1_000)
        self.held: dict[BodyReservation, int] = {}

    def teardown(self) -> None:
        """Give everything back."""
        for share in list(self.held):
            self.budget.give_back(share)
        assert self.budget.held_bytes == 0
        assert not self.budget._of_holder
        self.loop.close()

    @rule(holder=st.sampled_from("abc"), size=st.integers(1, 600))
    def comes(self, holder: str, size: int) -> None:
        """A body comes: it is held if there is room, and its holder has no more with it than four times what was
        free."""
        share, free = BodyReservation(holder), 1_000 - sum(self.held.values())
        own = sum(bytes_ for each, bytes_ in self.held.items() if each.budget_owner == holder)
        assert self.budget.take(share, size) == (size <= free and own + size <= SHARE * free)
        if share.held_bytes:
            self.held[share] = size

    @rule(holder=st.sampled_from("abc"), size=st.integers(1, 600))
    def is_here(self, holder: str, size: int) -> None:
        """Bytes that were read count, room or not."""
        share = BodyReservation(holder)
        self.budget.overdraw(share, size)
        self.held[share] = size

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        """One is let go."""
        if self.held:
            share = data.draw(st.sampled_from(list(self.held)))
            self.budget.give_back(share)
            self.budget.give_back(share)
            del self.held[share]

    @invariant()
    def adds_up(self) -> None:
        """All together, and by holder."""
        assert self.budget.held_bytes == sum(self.held.values())
        assert all(share.held_bytes == size for share, size in self.held.items())
        assert self.budget.overdrawn == (self.budget.held_bytes > 1_000)


TestBudgets = pytest.mark.promise("No tenant uses up another's part of the budget for bodies.", "tenants")(
    pytest.mark.promise(
        "All request bodies together stay within `limits.total_body_bytes_max` and one read.", "clients"
    )(Budgets.TestCase)
)
TestBudgets.settings = hypothesis_settings(max_examples=50, deadline=None)

ROOM: dict[str, Any] = {
    "limits__body_bytes_max": MIB,
    "limits__total_body_bytes_max": MIB,
    "limits__body_budget_timeout_s": 0.3,
}
SIZE = 600_000  # of two of one tenant only the first has room, and another tenant has some beside it


async def half_sent(app: RouterServer, key: str) -> Client:
    """A client of whose body half is sent, or as much as is read of it."""
    client = await connect(app.url)
    client.ask(started(SIZE, f"x-api-key: {key}"))
    client.transport.write(body_of(SIZE)[: SIZE // 2])
    return client


@pytest.mark.promise("All request bodies together stay within `limits.total_body_bytes_max` and one read.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_bodies_wait_for_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A body for which there is no room is not read, and 503 with `Retry-After` after `bodies_wait_s`; another tenant's
    is read meanwhile. When there is room again, who waits is served."""
    ring = Keyring(tmp_path, acme={}, umbra={})
    key = ring.keys["acme"]
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **ROOM, **ring.settings) as app:
        bodies = app.http._server.bodies
        first = await half_sent(app, key)
        await all_came(app, SIZE // 2)
        assert bodies.held_bytes == SIZE
        second = await half_sent(app, key)
        while not bodies._waiting:
            await asyncio.sleep(0)
        other = await connect(app.url)
        other.ask(post(CHAT, body_of(100_000), f"x-api-key: {ring.keys['umbra']}"))
        assert (await other.answer()).status == 200
        answer = await second.answer()
        assert (answer.status, answer.headers[b"retry-after"]) == (503, b"2")
        assert json.loads(answer.body)["error"]["code"] == "bodies_full"
        assert app.http._server.closed["bodies_bytes_max"] == 1
        third = await half_sent(app, key)
        while not bodies._waiting:
            await asyncio.sleep(0)
        first.transport.write(body_of(SIZE)[SIZE // 2 :])
        third.transport.write(body_of(SIZE)[SIZE // 2 :])
        assert [(await client.answer()).status for client in (first, third)] == [200, 200]
        assert [body for _, body in engine.seen[1:]] == [body_of(SIZE)] * 2
        for client in (first, other, third):
            client.transport.close()


@pytest.mark.promise("All request bodies together stay within `limits.total_body_bytes_max` and one read.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_the_budget_holds_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty clients, each with a body of nearly a megabyte by length or in chunks, or with one in a single read: no
    more is held than the budget and one read, and each is answered 200 or 503."""
    chunked = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    long, short = body_of(900_000), body_of(150_000)
    pieces = b"".join(
        b"%x\r\n%b\r\n" % (len(long[at : at + 9_000]), long[at : at + 9_000]) for at in range(0, 900_000, 9_000)
    )
    asked = (post(CHAT, long), chunked + pieces + b"0\r\n\r\n", post(CHAT, short), post(CHAT, short) * 3)
    most = 0
    async with RawEngine(play) as engine, proxied(engine, monkeypatch, **ROOM) as app:
        bodies, clients = app.http._server.bodies, [await connect(app.url) for _ in range(40)]
        for n, client in enumerate(clients):
            client.ask(asked[n % 4], *["POST"] * (3 if n % 4 == 3 else 1))
        while not all(client.answers and client.answers[-1].whole for client in clients):
            most = max(most, bodies.held_bytes)
            await asyncio.sleep(0)
        assert {answer.status for client in clients for answer in client.answers} == {200, 503}
        assert most <= MIB + (256 << 10)
        assert all(body in (long, short) for _, body in engine.seen)
        for client in clients:
            client.transport.abort()


@pytest.mark.promise("All request bodies together stay within `limits.total_body_bytes_max` and one read.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_a_body_counts_until_its_answer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is with an engine that has not answered, a body counts and is there for another attempt; behind the
    first event of its stream nobody keeps it."""
    go_on = asyncio.Event()

    async def slow(wire: Wire) -> None:
        await go_on.wait()
        await wire.send(head(SSE, "transfer-encoding: chunked") + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))

    body = body_of(100_000).replace(b"{", b'{"stream":true,', 1)
    async with RawEngine(slow) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, body))
        await engine.asked(1)
        assert app.http._server.bodies.held_bytes == len(body)
        go_on.set()
        await client.until(lambda: EVENT in client.raw)
        (connection,) = connections(app)
        assert connection._request is not None
        assert (connection._request.body, app.http._server.bodies.held_bytes) == (b"", 0)
        client.transport.abort()
        await engine.wires[-1].lost.wait()


@pytest.mark.promise("A body that arrives too slowly, or takes too long in all, is refused.", "clients")
def test_a_body_takes_so_long_at_most() -> None:
    """However fast it comes, a body that is not whole after `body_timeout_s` is ended, and not before."""
    limits = replace(LIMITS, body_timeout_s=20.0, body_bytes_per_s_min=1)
    patience, now_s = ClientTimer(), 0.0
    while not (why := patience.sends(now_s, limits, BODY, 1, int(now_s * 1_000_000))):
        now_s += limits.sweep_s
    assert why == BODY_TIMEOUT
    assert 20.0 < now_s <= 20.0 + limits.sweep_s
