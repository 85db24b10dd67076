"""A server that speaks Redis' protocol to harm: it takes no memory, and the link fails and comes back more rarely."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

from router.peering import peer_link
from router.peering.clients import TlsFiles
from router.peering.message_auth import Seals
from router.peering.peer_link import LinkLimits, PeerChannel
from router.peering.redis_store import READ_MAX, open_session
from router.peering.session import StoreFailed
from router.peering.store_url import parse_address
from tests.peering.links import OneRouter, linked
from tests.support.waiting import until

MANY = b"*1000000000\r\n"
ID = b"$3\r\n1-1\r\n"
ENTRY = b"*2\r\n" + ID + b"*6\r\n$1\r\ni\r\n$1\r\nx\r\n$1\r\nr\r\n$1\r\nu\r\n$1\r\nt\r\n$1\r\nt\r\n"
OWNERS = b"*1\r\n*2\r\n$23\r\nwarmroute:{f}:responses\r\n"


class Hostile:
    """Answers as a Redis that has nothing, but for what `says` gives for a command by its name."""

    def __init__(self, says: dict[bytes, bytes]) -> None:
        self.says = {
            b"PING": b"+PONG\r\n",
            b"XADD": ID,
            b"SET": b"+OK\r\n",
            b"SADD": b":1\r\n",
            b"SMEMBERS": b"*0\r\n",
            b"XREAD": b"*-1\r\n",
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


@pytest.mark.promise("A reply of the shared store takes memory only as its bytes arrive, until its timeout.", "store")
@pytest.mark.finding("2026-11-28/3")
@pytest.mark.parametrize(
    "answer", [MANY, b"$4000000000\r\n", b"*1\r\n" * 100_000, b"%1000000000\r\n", b"+" + b"x" * 100_000]
)
@pytest.mark.parametrize("command", ["PING", "XADD", "XREAD"])
async def test_an_announced_size_takes_no_memory(answer: bytes, command: str) -> None:
    """On every connection, from the first answer on: the session ends, and the link says why."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with hostile(**{command: answer}) as server:
        async with linked(f"redis://127.0.0.1:{server.port}", "a", timeout_s=0.2) as a:
            await until(lambda: a.link.failures)
            assert not a.link.connected
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


@pytest.mark.parametrize("answer", [b"%1\r\n", b"*1\r\n" * 100, b":7\r\n", b"$2\r\nxy\r\n", b"*2\r\n$1\r\na\r\n:1\r\n"])
@pytest.mark.parametrize("command", ["PING", "XADD", "SET", "SADD", "SMEMBERS", "XREAD"])
async def test_no_answer_that_no_redis_gives_is_a_bug(
    answer: bytes, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On every connection, from the first answer on: nothing of it is taken, and the link is not whole."""
    async with hostile(**{command: answer}) as server:
        async with linked(f"redis://127.0.0.1:{server.port}", "a", timeout_s=0.5) as a:
            await until(lambda: a.link.failures)
            assert not a.link.connected
            assert not a.owners
    assert not [each for each in caplog.records if getattr(each, "event", "") == "bug"]


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


async def test_pages_without_an_end_have_one() -> None:
    """A stream of owners that has the same page for ever is read once."""
    async with hostile(XREAD=OWNERS + b"*3\r\n" + ENTRY * 3) as server:
        async with open_session(parse_address(f"redis://127.0.0.1:{server.port}"), "f", 5.0, TlsFiles()) as store:
            page = await store.read_owners((0, 0))
            assert [owner for owner, _ in page.owners] == [("x", "u", "t")] * 3
            assert page.owners_at == (1, 1)


@pytest.mark.promise(
    "A flood of messages from the shared store is read 64 at a time, with a pause after each.", "store"
)
async def test_a_flood_leaves_the_loop_to_others() -> None:
    """A store that returns as many messages as it is asked for, at once and for ever: they are read with pauses, and
    other work has its turn between two messages."""
    entry = b"*2\r\n" + ID + b"*2\r\n$1\r\nm\r\n$3\r\nodd\r\n"
    messages = b"*1\r\n*2\r\n$22\r\nwarmroute:{f}:messages\r\n*%d\r\n" % READ_MAX + entry * READ_MAX
    async with hostile(XREAD=messages) as server:
        async with linked(f"redis://127.0.0.1:{server.port}", "a", timeout_s=0.5) as a:
            await until(lambda: a.link.counts["heard"])
            begun_s, before = time.monotonic(), a.link.counts["heard"]
            await until(lambda: a.link.counts["heard"] >= before + 20 * READ_MAX)
            reads = (a.link.counts["heard"] - before) / READ_MAX
            assert time.monotonic() - begun_s >= (reads - 2) * peer_link.READ_GAP_S
