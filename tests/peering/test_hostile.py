"""A server that speaks Redis' protocol to harm: it takes no memory, and the link fails and comes back more rarely."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

from router.peering import peer_link
from router.peering.clients import TlsFiles
from router.peering.message_auth import Seals
from router.peering.peer_link import LinkLimits, PeerChannel
from router.peering.redis_store import EARLY_BYTES_MAX, PAGE, PAGES_MORE, open_session
from router.peering.session import StoreFailed
from router.peering.store_url import parse_address
from tests.peering.links import OneRouter, linked
from tests.support.waiting import until

MANY = b"*1000000000\r\n"
SUBSCRIBED = b"*3\r\n$9\r\nsubscribe\r\n$18\r\nwarmroute:{f}:said\r\n:1\r\n"
ENTRY = b"*2\r\n$3\r\n1-1\r\n*6\r\n$1\r\ni\r\n$1\r\nx\r\n$1\r\nr\r\n$1\r\nu\r\n$1\r\nt\r\n$1\r\nt\r\n"


def message(data: bytes) -> bytes:
    """A message as a subscriber gets it."""
    return b"*3\r\n$7\r\nmessage\r\n$18\r\nwarmroute:{f}:said\r\n$%d\r\n%s\r\n" % (len(data), data)


class Hostile:
    """Answers as a Redis that has nothing, but for what `says` gives for a command by its name."""

    def __init__(self, says: dict[bytes, bytes]) -> None:
        self.says = {
            b"PING": b"+PONG\r\n",
            b"SUBSCRIBE": SUBSCRIBED,
            b"PUBLISH": b":1\r\n",
            b"XRANGE": b"*0\r\n",
            b"TIME": b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
        } | says
        self.asked: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                self.asked.append(words[0])
                writer.write(self.says.get(words[0], b"$-1\r\n"))
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def hostile(**says: bytes) -> AsyncIterator[Hostile]:
    """Such a server on loopback."""
    one = Hostile({name.encode(): answer for name, answer in says.items()})
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    async with server:
        yield one


@pytest.mark.promise(
    "Replies of the shared store have limits of size, elements and depth before they are read.", "store"
)
@pytest.mark.finding("2026-11-28/3")
@pytest.mark.parametrize(
    "answer", [MANY, b"$4000000000\r\n", b"*1\r\n" * 100, b"%1000000000\r\n", b"+" + b"x" * 10_000]
)
@pytest.mark.parametrize("command", ["PING", "SUBSCRIBE", "PUBLISH", "SET", "XRANGE", "TIME"])
async def test_no_answer_is_read_that_no_redis_gives(answer: bytes, command: str) -> None:
    """On every connection, from the first answer on: the session ends, and the link says why."""
    async with hostile(**{command: answer}) as server:
        async with linked(f"redis://127.0.0.1:{server.port}", "a", before=_was_whole) as a:
            await until(lambda: a.link.failures["protocol"])
            assert not a.link.connected
            assert not a.owners


def _was_whole(one: OneRouter) -> None:
    one.link._whole_s = time.monotonic()  # so that the store is asked for its clock


async def test_a_store_that_lies_is_asked_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer that no Redis gives doubles the time until the next session, up to a limit; another failure, or a
    session, ends that."""
    monkeypatch.setattr(peer_link, "RETRY_S", 0.01)
    monkeypatch.setattr(peer_link, "RETRY_ODD_S", 0.08)
    kinds, opens = ["protocol"] * 5 + ["unreachable"] * 2, list[float]()

    @asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        opens.append(time.monotonic())
        raise StoreFailed(kinds[min(len(opens), len(kinds)) - 1], "as it is told")
        yield

    one = OneRouter("redis://127.0.0.1:1", "a", **_limits())
    many = PeerChannel(
        fails,  # type: ignore[arg-type]  # there is no session
        one.core,
        one.things,
        name="a",
        origin=1,
        limits=LinkLimits(8),
        seals=Seals("f", [], time.monotonic),
    )
    many.start()
    try:
        await until(lambda: len(opens) > len(kinds))
    finally:
        await many.close()
    gaps = [later - before for before, later in pairwise(opens)]
    for gap_s, least_s in zip(gaps, [0.02, 0.04, 0.08, 0.08, 0.08, 0.01], strict=False):
        assert gap_s >= least_s * 0.9


def _limits() -> dict[str, object]:
    return {"fleet": "f", "timeout_s": 0.5, "tls": TlsFiles(), "owners_max": 8, "peers_max": 8, "secrets": ()}


async def test_messages_before_anybody_listens_are_bounded() -> None:
    """None counts that comes before the subscription, and of those behind it a few megabytes do."""
    flood = message(b"x" * 100_000)
    async with hostile(SUBSCRIBE=flood * 20 + SUBSCRIBED + flood * 200) as server:
        async with open_session(parse_address(f"redis://127.0.0.1:{server.port}"), "f", 5.0, TlsFiles()) as store:
            await until(lambda: store._early_bytes > EARLY_BYTES_MAX - 100_064)
            store.publish(b"x")  # its answer comes on another connection
            await until(lambda: not store._unanswered)
            assert sum(map(len, store._early)) <= EARLY_BYTES_MAX
            heard = list[bytes]()
            task = asyncio.create_task(store.listen(heard.append))
            await until(lambda: len(heard) >= EARLY_BYTES_MAX // 100_064)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pages_without_an_end_have_one() -> None:
    """A stream of owners that is always a full page is read for as many as there may be."""
    async with hostile(XRANGE=b"*%d\r\n" % PAGE + ENTRY * PAGE) as server:
        async with open_session(parse_address(f"redis://127.0.0.1:{server.port}"), "f", 5.0, TlsFiles()) as store:
            pages = [len(page) async for page in store.read(0, 10 * PAGE)]
    assert pages == [PAGE] * (10 + PAGES_MORE)
    assert server.asked.count(b"XRANGE") == len(pages)


@pytest.mark.parametrize("ends", [MANY, b""], ids=["by an odd answer", "by the link"])
async def test_a_session_that_is_over_is_freed_without_the_collector(ends: bytes) -> None:
    """Its buffers may be megabytes, and the collector of cycles seldom runs."""
    buffers: Callable[[], object] = lambda: None  # noqa: E731
    async with hostile(PUBLISH=ends or b":1\r\n") as server:
        gc.collect()
        gc.disable()
        try:
            async with open_session(parse_address(f"redis://127.0.0.1:{server.port}"), "f", 5.0, TlsFiles()) as store:
                buffers = weakref.ref(store._said._reader)
                store.publish(b"x")
                await until(lambda store=store: store._error if ends else not store._unanswered)
                store.abort()
            assert buffers() is None
        finally:
            gc.enable()
