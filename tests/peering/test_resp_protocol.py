"""A connection that is read as its bytes come: whole replies are taken, and its end is told once, whatever is sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import Any

import hiredis
import pytest

from router.eventloop import SHARE_S, TURNS, Turns
from router.peering.reply_limits import BoundedReader
from router.peering.resp_protocol import RespProtocol
from tests.support.waiting import until

BYTES_MAX = 1_000


class Odd(Exception):
    """What the reader raises for bytes that are no reply."""


class Taken:
    """One end of a connection, and what it was told; the other end is `peer`."""

    def __init__(
        self,
        peer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        turns: Turns | None = None,
    ) -> None:
        self.replies, self.ends = list[Any](), list[Exception]()
        self.peer, self.writer, self.seen = peer, writer, reader
        self.take: Callable[[Any], None] = self.replies.append
        replies = BoundedReader(Odd, hiredis.ReplyError, bytes_max=BYTES_MAX, elements_max=8)
        self.wire = RespProtocol(writer.transport, replies, lambda reply: self.take(reply), self.ends.append, turns)


@asynccontextmanager
async def taken(turns: Turns | None = None) -> AsyncIterator[Taken]:
    """A connection of this machine, whose one end a Wire has taken over; both ends are closed with the block."""
    came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    server = await asyncio.start_server(lambda *ends: came.set_result(ends), "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        seen, peer = await came
        try:
            yield Taken(peer, seen, writer, turns)
        finally:
            for each in (writer, peer):
                each.close()
            await writer.wait_closed()  # by the streams that it was read by before


async def test_replies_are_taken_as_they_become_whole() -> None:
    """However the bytes are cut: each reply once, in order, errors of the other side among them; and what is written
    arrives."""
    async with taken() as one:
        for byte in b"+OK\r\n:7\r\n$2\r\nhi\r\n-ERR no\r\n":
            one.peer.write(bytes((byte,)))
            await asyncio.sleep(0)
        one.peer.write(b"*2\r\n:1\r\n:2\r\n:3\r\n")
        await until(lambda: len(one.replies) == 6)
        assert one.replies[:3] == [b"OK", 7, b"hi"]
        assert isinstance(one.replies[3], hiredis.ReplyError)
        assert one.replies[4:] == [[1, 2], 3]
        one.wire.write(b"PING\r\n")
        assert await one.seen.readline() == b"PING\r\n"
        assert not one.ends


async def test_the_end_is_told_once_and_by_its_reason() -> None:
    """The other side closes; it sends what is no reply; it sends one that never ends: nothing is taken from then on."""
    async with taken() as one:
        one.peer.close()
        await until(lambda: one.ends)
        one.writer.close()
    assert [type(each) for each in one.ends] == [ConnectionError]
    async with taken() as one:
        one.peer.write(b"+OK\r\nHTTP/1.1 400 Bad Request\r\n\r\n+OK\r\n")
        await until(lambda: one.ends)
        one.peer.write(b"+OK\r\n")
        await one.peer.drain()
    assert ([type(each) for each in one.ends], one.replies) == ([Odd], [b"OK"])
    async with taken() as one:
        one.peer.write(b"*1000000000\r\n")
        await until(lambda: one.ends)
        one.peer.write(5_000 * b"x" + b"\r\n+OK\r\n")
        await one.peer.drain()
    assert (str(one.ends[0]), len(one.ends), one.replies) == ("a list of 1000000000 replies, 0 deep", 1, [])


async def test_who_aborts_hears_nothing_any_more() -> None:
    """The other side sees the end, and what has come meanwhile is not taken."""
    async with taken() as one:
        one.wire.abort()
        one.wire.data_received(b"+OK\r\n")
        assert await one.seen.read() == b""
    assert (one.replies, one.ends) == ([], [])


@pytest.mark.promise("A flood of messages from the shared store takes at most one turn in eight.", "store")
async def test_who_sends_without_an_end_has_one_turn_in_eight() -> None:
    """Replies that take long are taken a few at a time, seven turns of the loop apart, and none is lost."""
    ticks = count()  # each look at the clock finds that the time is over
    loop = asyncio.get_running_loop()
    turn, seen = 0, list[int]()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    async with taken(Turns(loop, lambda: float(next(ticks)))) as one:

        def take(reply: Any) -> None:
            one.replies.append(reply)
            seen.append(turn)

        one.take = take
        next_turn()
        one.peer.write(b"".join(b":%d\r\n" % n for n in range(50)))
        one.peer.write(b"".join(b":%d\r\n" % n for n in range(50, 100)))
        await until(lambda: len(seen) == 100)
        next_turn = _nothing
    assert one.replies == list(range(100))
    assert all(after - before >= TURNS for before, after in pairwise(sorted(set(seen))))
    assert max(Counter(seen).values()) <= 2


async def test_short_messages_in_many_reads_are_as_many_as_in_one() -> None:
    """What was taken in the turns before counts, until the connection has waited for its turn."""
    now_s, turns = [0.0], 0
    loop = asyncio.get_running_loop()
    async with taken(Turns(loop, lambda: now_s[0])) as one:

        def take(reply: Any) -> None:
            one.replies.append(reply)
            now_s[0] += 0.6 * SHARE_S

        one.take = take
        for number in range(2):
            one.wire.data_received(b":%d\r\n" % number)
        assert one.replies == [0, 1]
        assert not one.writer.transport.is_reading()
        while not one.writer.transport.is_reading():
            turns += 1
            now_s[0] += SHARE_S
            await asyncio.sleep(0)
    assert turns >= TURNS


def _nothing() -> None:
    """The turns are counted no more."""
