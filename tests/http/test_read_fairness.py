"""Whoever sends much is read in turns, and whoever is refused slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from router.eventloop import TURNS
from router.http.read_fairness import DROPPED_BYTES_MAX, READS_A_TURN, TURN_BYTES, ReadFairness
from tests.http.clients import play
from tests.http.test_read_flow import LINE, Side
from tests.http.wire import CHAT, RawEngine, connect, on_uvloop, post
from tests.support.fakes import running

HEAD = LINE + b"Content-Length: 1000000\r\n\r\n"


class Loop:
    """Keeps what is to be called. Each turn takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[Callable[[], None]] = []
        self.timed: list[Callable[[], None]] = []

    def call_soon(self, work: Callable[[], None]) -> None:
        """In the next turn."""
        self.soon.append(work)

    def call_later(self, _: float, work: Callable[[], None]) -> None:
        """When the time has come."""
        self.timed.append(work)

    def turn(self) -> None:
        """The next turn."""
        self.now_s += 0.001
        soon, self.soon = self.soon, []
        for work in soon:
            work()

    def serve(self) -> None:
        """All turns up to the one in which those that wait go on."""
        for _ in range(TURNS):
            self.turn()


class Transport:
    """A connection that is read or not."""

    reading, closing = True, False

    def is_closing(self) -> bool:
        """Whether it ends."""
        return self.closing

    def pause_reading(self) -> None:
        """Read no more."""
        self.reading = False

    def resume_reading(self) -> None:
        """Read again."""
        assert not self.closing
        self.reading = True


def sides(count: int, loop: Loop) -> list[Side]:
    """So many connections of one server, each in the middle of a long body."""
    pace = ReadFairness(cast("asyncio.AbstractEventLoop", loop), clock=lambda: loop.now_s)
    made = [Side() for _ in range(count)]
    for side in made:
        side.pace = pace
        side.intake.feed(HEAD)
    return made


@pytest.mark.promise("A client that sends megabytes is read in turns with all others, a refused one slowly.", "clients")
def test_full_reads_take_turns() -> None:
    """Connections that fill the buffer of each read are read a few in a turn, in their order, and none twice before
    all others that wait."""
    loop = Loop()
    some = sides(3 * READS_A_TURN, loop)
    for side in some:
        side.intake.feed(b"x" * TURN_BYTES)
    assert not any(side.reading for side in some)
    for number in range(0, len(some), READS_A_TURN):
        loop.serve()
        again = [side for side in some if side.reading]
        assert again == some[number : number + READS_A_TURN]
        for side in again:
            side.intake.feed(b"x" * TURN_BYTES)
    loop.serve()
    assert [side for side in some if side.reading] == some[:READS_A_TURN]


def test_short_reads_wait_for_nobody() -> None:
    """A connection is read on until it has brought as much as is read in one turn, in however many reads."""
    loop = Loop()
    (side,) = sides(1, loop)
    for size in (1, TURN_BYTES // 2, TURN_BYTES - TURN_BYTES // 2 - 2 - len(HEAD)):
        side.intake.feed(b"x" * size)
        assert side.reading
        assert loop.soon == []
    side.intake.feed(b"x")
    assert not side.reading


def test_a_connection_that_waits_for_its_turn_may_be_gone() -> None:
    """Closing, and refusing, while a read is due changes nothing for the others."""
    loop = Loop()
    one, other = sides(2, loop)
    for side in (one, other):
        side.intake.feed(b"x" * TURN_BYTES)
    one.intake.close()
    loop.serve()
    assert (one.reading, other.reading) == (False, True)


@pytest.mark.promise("A client that sends megabytes is read in turns with all others, a refused one slowly.", "clients")
def test_refused_clients_are_read_slowly() -> None:
    """Of all refused clients together so much is dropped before they are not read for a moment; then all are."""
    loop = Loop()
    pace, some = ReadFairness(cast("asyncio.AbstractEventLoop", loop)), [Transport() for _ in range(3)]
    for transport in some:
        pace.note_dropped(cast("asyncio.Transport", transport), DROPPED_BYTES_MAX // 2)
    assert [transport.reading for transport in some] == [True, True, False]
    pace.note_dropped(cast("asyncio.Transport", some[0]), 1)
    some[2].closing = True
    assert len(loop.timed) == 1
    loop.timed.pop()()
    assert [transport.reading for transport in some] == [True, True, False]
    pace.note_dropped(cast("asyncio.Transport", some[0]), 1)
    assert some[0].reading
    assert len(loop.timed) == 1


@on_uvloop
async def test_long_bodies_arrive_whole() -> None:
    """Several bodies of megabytes at a time, as fast as they come, are each read to their end."""
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"word " * 800_000)
    async with RawEngine(play) as engine, running(engine.url) as app:
        clients = [await connect(app.url) for _ in range(2 * READS_A_TURN)]
        for client in clients:
            client.ask(post(CHAT, body))
        for client in clients:
            await client.answer()
        assert [client.answers[0].status for client in clients] == [200] * len(clients)
        assert [len(sent) for _, sent in engine.seen] == [len(body)] * len(clients)
        for client in clients:
            client.transport.close()


@pytest.mark.promise("A client that sends megabytes is read in turns with all others, a refused one slowly.", "clients")
@on_uvloop
async def test_who_sends_all_before_reading_is_told_why() -> None:
    """A client that reads only when its whole body is sent gets its refusal, though the body is not wanted."""
    async with RawEngine(play) as engine, running(engine.url, limits__body_bytes_max=1 << 20) as app:
        host, port = app.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n")
        for _ in range(80):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        assert engine.seen == []
