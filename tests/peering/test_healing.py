"""Whatever somebody writes to the store, it is over when they stop: routers hear each other again by themselves."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.peering import persistence
from router.peering.clients import TlsFiles
from router.peering.frames import BadFrame, PeerFrame, head_of, pack_frame
from router.peering.message_auth import Seals
from router.peering.peers import SILENT_S, Arrival, PeerRegistry
from router.peering.redis_store import open_session
from router.peering.session import StoreFailed
from router.peering.store_url import parse_address
from tests.peering.links import linked, receiver
from tests.peering.stores import StoreServer, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.promise("No request waits for the shared store or fails with it.", "store")

STREAM = "warmroute:{f}:messages"
# redis-py 8.1 now and then leaves the connection to a cluster's lost node to the garbage collector.
LEFT_TO_COLLECTOR = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def events(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often each event was logged."""
    return Counter(getattr(record, "event", "") for record in caplog.records)


def test_a_message_from_the_future_mutes_its_router_for_a_second_at_most() -> None:
    """Until then earlier messages are old; once the newer one is silent they count, and their router's state is
    read."""
    peers = PeerRegistry("a", 1, 8)
    assert peers.note_message(2, "b", 1, 0.0) is Arrival.FIRST
    assert peers.note_message(2, "b", 10**12, 0.1) is Arrival.GAP
    assert peers.note_message(2, "b", 2, 0.2) is Arrival.IGNORED
    assert peers.expire_silent(0.1 + SILENT_S) == [2]
    assert peers.note_message(2, "b", 5, 1.2) is Arrival.GAP
    assert peers.note_message(2, "b", 4, 1.2) is Arrival.IGNORED
    assert peers.heard == 1
    assert peers.is_incomplete()


def test_the_higher_number_has_a_name_for_as_long_as_it_is_heard() -> None:
    """A process whose number is lower is one that was replaced, until the other one is silent: a second router of that
    name has been killed, or the clock that numbers are made of was set back."""
    peers = PeerRegistry("a", 1, 8)
    assert peers.note_message(20, "b", 1, 0.0) is Arrival.FIRST
    assert peers.note_message(30, "b", 1, 0.1) is Arrival.FIRST
    assert peers.take_lost() == [(20, "b")]
    assert peers.note_message(20, "b", 2, 0.2) is Arrival.IGNORED
    assert peers.expire_silent(0.1 + SILENT_S) == [30]
    assert peers.note_message(20, "b", 3, 1.3) is Arrival.GAP
    assert peers.take_lost() == [(30, "b")]
    assert (peers.is_active(20), peers.is_active(30), peers.heard) == (True, False, 1)


def test_a_silent_router_may_return() -> None:
    """A busy router that was silent for a moment may send its snapshot a moment later; one that has left may not, nor
    one that was asked already."""
    peers = PeerRegistry("a", 1, 8)
    peers.note_message(20, "b", 1, 0.0)
    assert (peers.oldest_peer(()), peers.may_return(())) == ((20, "b"), False)
    peers.expire_silent(SILENT_S)
    assert (peers.oldest_peer(()), peers.may_return(()), peers.may_return({20})) == (None, True, False)
    peers.remove_peer(20)
    assert not peers.may_return(())


def test_messages_are_missing_where_their_numbers_have_a_gap() -> None:
    """Then the state of their router is of use; it is not once it was read, nor that of a router that is silent and has
    said nothing since."""
    peers = PeerRegistry("a", 1, 8)
    assert peers.note_message(2, "b", 7, 0.0) is Arrival.GAP
    assert peers.needs_state(2, 5)
    assert peers.note_state(2, "b", 5, 0.1)
    assert [peers.note_message(2, "b", seq, 0.2) for seq in (5, 6, 7)] == [Arrival.IGNORED, Arrival.NEXT, Arrival.NEXT]
    assert not peers.is_incomplete()
    assert peers.note_message(2, "b", 9, 0.3) is Arrival.GAP
    assert peers.expire_silent(0.3 + SILENT_S) == [2]
    assert not peers.is_incomplete()
    assert [peers.needs_state(2, seq) for seq in (9, 10)] == [False, True]


def test_the_younger_of_two_namesakes_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    """Not at the last words of a process that it has replaced, but where these go on; once."""
    peers = PeerRegistry("a", 10, 8)
    for n, now_s in enumerate((0.0, SILENT_S / 2)):
        assert peers.note_message(5, "a", n, now_s) is Arrival.IGNORED
    assert not events(caplog)["peering_duplicate_name"]
    for n, now_s in enumerate((SILENT_S, 2 * SILENT_S)):
        peers.note_message(5, "a", n, now_s)
    assert events(caplog)["peering_duplicate_name"] == 1


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf, 5.1])
def test_a_time_that_cannot_be_is_nobodys(at_s: float) -> None:
    """Neither another router's nor this one's own, from the future."""
    hearing = receiver(Seals("f", (), time.monotonic), Counter(), origin=7)
    with pytest.raises(BadFrame):
        hearing.hear((1, 0), pack_frame(PeerFrame(name="a"), 7, 1, at_s), 5.0)
    if not math.isfinite(at_s):
        with pytest.raises(BadFrame):
            head_of(pack_frame(PeerFrame(name="b"), 8, 1, at_s))


@pytest.mark.parametrize("what", ["its number", "its process"])
async def test_a_damaged_message_mutes_nobody_for_ever(what: str) -> None:
    """One bit of a router's message is another: of its number, or of its process's number. The router is heard again
    within seconds, and nobody was restarted."""
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "b") as b:
        await until(lambda: a.link.routers == 2 and b.link.connected)
        origin, seq = (b.link.origin, 1 << 60) if what == "its number" else (b.link.origin | 1 << 60, 1)
        await server.ask("XADD", STREAM, "*", "m", pack_frame(PeerFrame(name="b"), origin, seq, 1.0))
        async with asyncio.timeout(60):
            while not a.core.heard:  # the store has passed on the damaged message before all of these
                b.core.to_say = [b"hello"]
                b.link.changed()
                await asyncio.sleep(0.05)
        assert a.link._peers.is_active(b.link.origin)
        assert a.link.routers == 2


async def test_a_store_that_cannot_be_used_from_the_start_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A router that starts without its store says that it is alone, and why, though it never was anything else; and
    that it is not, once there is a store."""
    caplog.set_level(logging.INFO)
    server = StoreServer()
    async with linked(server.url, "a") as a:
        await until(lambda: events(caplog)["peering_disconnected"])
        (said,) = [record for record in caplog.records if getattr(record, "event", "") == "peering_disconnected"]
        assert said.__dict__["fields"]["why"].startswith("unreachable")
        failures = a.link.failures["unreachable"]
        await until(lambda: a.link.failures["unreachable"] >= failures + 5)
        assert (events(caplog)["peering_disconnected"], a.link.counts["interruptions"]) == (1, 0)
        try:
            await server.start()
            await until(lambda: a.link.connected)
            assert events(caplog)["peering_connected"] == 1
        finally:
            await server.__aexit__()


async def test_why_is_empty_while_the_link_is_whole() -> None:
    """A connection that broke and was opened anew in time is no reason of anything any more."""
    async with StoreServer() as server, linked(server.url, "a") as a:
        await until(lambda: a.link.connected)
        async with asyncio.timeout(60):
            while not a.link.failures:  # a connection that is not in use is replaced without a failure
                await server.ask("CLIENT", "KILL", "TYPE", "normal")
                await asyncio.sleep(0.02)
        await until(lambda: a.link.connected and not a.link.why)


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[int]:
    """The port of a server that answers everything with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4_096):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":7\r\n", b"*0\r\n", b"*1\r\n*2\r\n$1\r\na\r\n:1\r\n"])
@pytest.mark.parametrize("scheme", ["redis", pytest.param("redis+cluster", marks=LEFT_TO_COLLECTOR)])
async def test_a_server_that_is_no_store_is_a_failure_and_no_bug(
    answer: bytes, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it answers: the link says why it is not whole, and no stack trace is logged."""
    async with saying(answer) as port, linked(f"{scheme}://127.0.0.1:{port}", "a", timeout_s=0.2) as a:
        await until(lambda: sum(a.link.failures.values()) >= 2 and a.link.why != "not connected yet")
        assert not a.link.connected
        assert not events(caplog)["bug"]
    gc.collect()  # here, and not while another test runs


async def test_a_parcel_that_is_a_number_allocates_nothing() -> None:
    """A server's reply has a large integer in the place of a router's state."""
    reply = b"*1\r\n*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nm\r\n:1000000000000\r\n"
    async with saying(reply) as port:
        async with open_session(parse_address(f"redis://127.0.0.1:{port}"), "f", 5.0, TlsFiles()) as store:
            with pytest.raises(StoreFailed, match="not a string"):
                await store.take("k", 0.1)


@LEFT_TO_COLLECTOR
@pytest.mark.long
async def test_a_cluster_that_is_none_or_dies_is_a_failure_and_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    """The URL names a server that is in no cluster, or all nodes of one are gone: likewise."""
    async with StoreServer() as plain, linked(f"redis+cluster://127.0.0.1:{plain.port}", "a", timeout_s=0.5) as a:
        await until(lambda: sum(a.link.failures.values()) >= 3)
        assert a.link.why != "not connected yet"
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    async with StoreServer(*options) as node:
        await node.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        while b"cluster_state:ok" not in await node.ask("CLUSTER", "INFO"):
            await asyncio.sleep(0.05)
        async with linked(f"redis+cluster://127.0.0.1:{node.port}", "a", timeout_s=0.5) as a:
            await until(lambda: a.link.connected)
            await node.kill()
            await until(lambda: not a.link.connected and sum(a.link.failures.values()) >= 3)
    assert not events(caplog)["bug"]
    gc.collect()  # here, and not while another test runs


async def test_what_a_store_gets_back_late_is_learned_too() -> None:
    """A store that lost everything is filled again only after a while: a router that has read what there was reads what
    is added."""
    async with StoreServer() as server, linked(server.url, "b") as b:
        await until(lambda: b.link.connected)
        await server.ask("FLUSHALL")
        await server.ask("XADD", "warmroute:{f}:responses", "*", "i", "resp_1", "r", "http://r", "t", "acme")
        await until(lambda: b.owners)


@pytest.mark.parametrize("key", ["messages", "responses"])
async def test_an_id_from_the_future_does_not_stop_the_stream(key: str) -> None:
    """Somebody adds the last entry that a stream can have: the store refuses any other, and routers begin it anew."""
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "b") as b:
        await until(lambda: a.link.routers == b.link.routers == 2)
        await server.ask("XADD", f"warmroute:{{f}}:{key}", f"{(1 << 64) - 1}-{(1 << 64) - 1}", "x", "y")
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await until(lambda: a.link.counts["written"] and b.owners)
        heard = b.link.counts["heard"]
        await until(lambda: b.link.counts["heard"] > heard + 8 and a.link.connected and b.link.connected)
        await until(lambda: a.link.routers == b.link.routers == 2)


async def test_what_a_router_made_that_is_gone_is_written_again_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router that made a response is killed, and the store loses all: who heard of it has it written again, with a
    mark that counts, so that a router which starts later knows it."""
    monkeypatch.setattr(persistence, "FILL_S", 0.05)
    monkeypatch.setattr(persistence, "FILL_TURNS", 1)
    async with StoreServer() as server, linked(server.url, "b", secrets=[b"s" * 32]) as b:
        async with linked(server.url, "a", secrets=[b"s" * 32]) as a:
            await until(lambda: a.link.routers == 2)
            a.link.publish_response_owner("resp_1", "http://r", "acme")
            await until(lambda: a.link.counts["written"] and b.owners)
        b.link.publish_response_owner("resp_2", "http://r", "acme")
        await until(lambda: b.link.counts["written"] == 1)
        await server.ask("FLUSHALL")
        await until(lambda: b.link.counts["written"] == 3)
        async with linked(server.url, "c", secrets=[b"s" * 32]) as c:
            await until(lambda: c.owners == {"resp_1": ("http://r", "acme"), "resp_2": ("http://r", "acme")})
