"""What one read may hold: many requests, many chunks, and whatever cuts there are between reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.body_budget import BodyBudget
from router.http.client_connection import WAITING_MAX
from router.http.read_fairness import CHUNK_BYTES, TURN_BYTES, ReadFairness
from router.http.read_flow import PIECE_BYTES_MAX, ReadFlow
from router.http.receiver import TINY_PIECES_MAX
from router.http.request import Connection, Refusal, Request
from tests.http.clients import LIMITS, LINE, play
from tests.http.wire import CHAT, RawEngine, Wire, connect, on_uvloop, post, proxied

READ_BYTES = 256_000  # what uvloop reads at once
PAGE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
ASKED = b'{"model":"m","messages":[]}'
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"


class Side:
    """A connection, its transport and its loop, as far as an ReadFlow knows them: requests are taken three at a
    time."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.untaken = 0
        self.most_untaken = 0
        self.reading = True
        self.later: list[Callable[[], None]] = []
        self.limits = LIMITS
        self.loop = self  # calls of `call_soon` are kept for the next turn
        self.pace = ReadFairness(cast("asyncio.AbstractEventLoop", self))
        self.bodies = BodyBudget(cast("asyncio.AbstractEventLoop", self), 64 << 20)
        self.intake = ReadFlow(cast("Connection", self), self, self)  # type: ignore[arg-type]  # its own loop
        self.intake.open(cast("asyncio.Transport", self), "a")

    def call_soon(self, work: Callable[[], None]) -> None:
        """Keep work for the next turn."""
        self.later.append(work)

    def time(self) -> float:
        """No time passes."""
        return 0.0

    def pause_reading(self) -> None:
        """The transport's."""
        self.reading = False

    def resume_reading(self) -> None:
        """The transport's."""
        self.reading = True

    def admit(self, request: Request) -> bool:
        """Everybody is let in."""
        return bool(request.path)

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """The connection's."""
        return self.intake.on_head(request, length, expects=expects)

    def grows(self, request: Request, body_bytes: int) -> None:
        """The connection's."""
        self.intake.on_body_growth(request, body_bytes)

    def on_request(self, request: Request) -> None:
        """Three requests are too many to go on reading."""
        self.requests.append((request.method, request.target, request.body))
        self.untaken += 1
        self.most_untaken = max(self.most_untaken, self.untaken)
        request.release_body()
        if self.untaken >= 3:
            self.intake.wait()

    def release_body(self, request: Request) -> None:
        """The connection's."""
        self.intake.let_go(request)

    def may_read_body(self) -> None:
        """Nobody waits for it."""

    def refuse(self, error: Refusal) -> None:
        """Nothing is refused here."""
        raise AssertionError(error)

    def turn(self) -> None:
        """One turn of the loop, in which what was read is answered."""
        later, self.later = self.later, []
        for work in later:
            work()
        self.untaken = 0
        self.intake.go_on()


def raw_of(how: str, body: bytes) -> bytes:
    """A request on the wire."""
    if how == "page":
        return PAGE
    if how == "length":
        return post("/a?b", body)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7))
    return CHUNKED + chunks + b"0\r\nA: b\r\n\r\n"


BODIES = (b"", b"{}", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 300, b"\r" * 20_000, b"ab" * 40_000)
REQUESTS = st.lists(
    st.tuples(st.sampled_from(["page", "length", "chunks"]), st.integers(0, len(BODIES) - 1)), min_size=1, max_size=12
)


@pytest.mark.promise(
    "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
)
@given(requests=REQUESTS, sizes=st.lists(st.integers(1, 90_000), min_size=1, max_size=8))
def test_any_requests_in_any_reads(requests: list[tuple[str, int]], sizes: list[int]) -> None:
    """Whatever requests come, and wherever reads are cut: each is parsed as it was sent, no more than may wait are
    parsed ahead, nothing is read meanwhile, and nothing is left held."""
    side, raw, at, n = Side(), b"".join(raw_of(how, BODIES[n]) for how, n in requests), 0, 0
    turns = 0
    while at < len(raw) or side.later or not side.reading or side.untaken:
        if at < len(raw) and (side.reading or n % 3 == 0):  # a transport may bring some more when it is paused
            size = [*sizes, 9_000][n % (len(sizes) + 1)]
            side.intake.feed(raw[at : at + size])
            at, n = at + size, n + 1
        else:
            side.turn()
        turns += 1
        assert turns < 100_000
    wanted = [("GET", "/healthz", b"") if how == "page" else ("POST", "", BODIES[n]) for how, n in requests]
    assert [(method, target if method == "GET" else "", body) for method, target, body in side.requests] == wanted
    assert side.most_untaken <= 4
    side.intake.close()
    assert side.bodies.held_bytes == 0


@pytest.mark.promise("Short chunks hold no other client up, and a body of very many chunks is refused.", "clients")
def test_many_short_chunks_are_parsed_over_many_turns() -> None:
    """Of a read full of chunks of one byte so much is parsed in a turn of the loop that nobody else waits for it; the
    next read comes when it is all parsed."""
    side = Side()
    side.intake.feed(CHUNKED)
    side.intake.feed(b"1\r\nx\r\n" * 16_000)
    turns, before = 0, side.intake.receiver.reading_bytes
    while not side.reading:
        side.turn()
        now = side.intake.receiver.reading_bytes
        assert (now - before) * CHUNK_BYTES <= TURN_BYTES + PIECE_BYTES_MAX / 6 * CHUNK_BYTES
        turns, before = turns + 1, now
    assert before == 16_000
    assert turns >= 16_000 * CHUNK_BYTES // (TURN_BYTES + PIECE_BYTES_MAX / 6 * CHUNK_BYTES)


@pytest.mark.promise("Short chunks hold no other client up, and a body of very many chunks is refused.", "clients")
def test_very_many_short_chunks_are_refused() -> None:
    """Chunks that stay short on average end in 400; few of them, or long ones, do not."""
    for size, count, status in ((1, TINY_PIECES_MAX, 0), (1, TINY_PIECES_MAX + 1, 400), (16, 20_000, 0)):
        side, chunk, refused = Side(), b"%x\r\n%b\r\n" % (size, b"x" * size), 0
        side.intake.feed(CHUNKED)
        try:
            for _ in range(count):
                side.intake.feed(chunk)
                while not side.reading:
                    side.turn()
        except Refusal as error:
            refused = error.status
        assert refused == status


@pytest.mark.promise("A connection has a bounded number of pipelined requests waiting.", "clients")
@pytest.mark.inside
@on_uvloop
async def test_a_read_full_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read full of short requests behind one that hangs: no more of them are parsed than may wait, what is left of
    the read counts as held, and all are answered in their turn."""
    go_on = asyncio.Event()

    async def hold(wire: Wire) -> None:
        await go_on.wait()
        await play(wire)

    count = READ_BYTES // len(PAGE)
    async with RawEngine(hold) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        client.ask(post(CHAT, ASKED))
        await engine.asked(1)
        (server_side,) = app.http._server.clients
        client._methods += [b"GET"] * count
        server_side.data_received(PAGE * count)  # as one read
        assert len(server_side._waiting) == WAITING_MAX
        assert app.http._server.bodies.held_bytes >= READ_BYTES - len(PAGE)
        go_on.set()
        await client.answer(count)
        assert [answer.status for answer in client.answers] == [200] * (count + 1)
        assert app.http._server.bodies.held_bytes == 0
        client.transport.close()


@pytest.mark.promise(
    "Ambiguous requests reach no engine, and each request that does has one length and one Host.", "clients"
)
@pytest.mark.promise("Nothing pipelined after an ambiguous request reaches an engine.", "clients")
@pytest.mark.inside
@pytest.mark.parametrize("how", ["in one read", "in two reads"])
@on_uvloop
async def test_behind_the_last_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent behind a request that says `Connection: close` is not answered and reaches no engine, however it is
    cut: by then the client has said that there will be no more."""
    async with RawEngine(play) as engine, proxied(engine, monkeypatch) as app:
        client = await connect(app.url)
        last, more = post(CHAT, ASKED, "Connection: close"), post(CHAT, ASKED)
        client.ask(last + more if how == "in one read" else last)
        if how == "in two reads":
            while not app.http._server.clients or next(iter(app.http._server.clients)).new:
                await asyncio.sleep(0)
            client.transport.write(more)
        await client.lost.wait()
        assert [(answer.status, answer.headers[b"connection"]) for answer in client.answers] == [(200, b"close")]
        assert len(engine.seen) == 1
