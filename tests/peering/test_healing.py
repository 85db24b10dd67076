"""Whatever somebody writes to the store, it is over when they stop: routers hear each other again by themselves."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.peering import persistence
from router.peering.frames import BadFrame, PeerFrame, head_of, pack_frame
from router.peering.message_auth import Seals
from router.peering.message_receiver import PeerSubscriber
from router.peering.peers import SILENT_S, PeerRegistry
from tests.peering.links import CoreStandIn, linked
from tests.peering.stores import StoreServer, free_port
from tests.support.waiting import until

pytestmark = pytest.mark.promise("No request waits for the shared store or fails with it.", "store")

CHANNEL = "warmroute:{f}:said"


def events(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often each event was logged."""
    return Counter(getattr(record, "event", "") for record in caplog.records)


def test_a_message_from_the_future_mutes_its_router_for_a_second_at_most() -> None:
    """Until then older messages are late ones; once the newer one is silent they count, as after a clock that was set
    back."""
    peers = PeerRegistry("a", 1, 8)
    assert peers.note_message(2, "b", 10.0, 0.0) == 0
    assert peers.note_message(2, "b", 1e12, 0.1) == 0
    assert peers.note_message(2, "b", 10.2, 0.2) is None
    assert peers.expire_silent(0.1 + SILENT_S) == [2]
    assert peers.note_message(2, "b", 11.2, 1.2) == 0
    assert peers.note_message(2, "b", 11.1, 1.2) is None
    assert peers.heard == 1


def test_the_higher_number_has_a_name_for_as_long_as_it_is_heard() -> None:
    """A process whose number is lower is one that was replaced, until the other one is silent: a second router of that
    name has been killed, or the clock that numbers are made of was set back."""
    peers = PeerRegistry("a", 1, 8)
    assert peers.note_message(20, "b", 1.0, 0.0) == 0
    assert peers.note_message(30, "b", 1.0, 0.1) == 20
    assert peers.note_message(20, "b", 1.1, 0.2) is None
    assert peers.expire_silent(0.1 + SILENT_S) == [30]
    assert peers.note_message(20, "b", 2.3, 1.3) == 30
    assert (peers.is_alive(20), peers.is_known(30), peers.heard) == (True, False, 1)


def test_the_younger_of_two_namesakes_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    """Not at the last words of a process that it has replaced, but where these go on; once."""
    peers = PeerRegistry("a", 10, 8)
    for now_s in (0.0, SILENT_S / 2):
        assert peers.note_message(5, "a", now_s, now_s) is None
    assert not events(caplog)["peering_duplicate_name"]
    for now_s in (SILENT_S, 2 * SILENT_S):
        peers.note_message(5, "a", now_s, now_s)
    assert events(caplog)["peering_duplicate_name"] == 1


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf, 5.1])
def test_a_time_that_cannot_be_is_nobodys(at_s: float) -> None:
    """Neither another router's nor this one's own, from the future."""
    own = 7
    seals = Seals("f", (), time.monotonic)
    peers, counts = PeerRegistry("a", own, 8), Counter[str]()
    hearing = PeerSubscriber(peers, CoreStandIn(), None, counts, own, seals, time.time)  # type: ignore[arg-type]  # not asked
    with pytest.raises(BadFrame):
        hearing.hear(pack_frame(PeerFrame(name="a"), own, at_s), 5.0)
    if not math.isfinite(at_s):
        with pytest.raises(BadFrame):
            head_of(pack_frame(PeerFrame(name="b"), 8, at_s))


@pytest.mark.parametrize("what", ["its clock", "its process"])
async def test_a_damaged_message_mutes_nobody_for_ever(what: str) -> None:
    """One bit of a router's message is another: of its clock, or of its process's number. The router is heard again
    within seconds, and nobody was restarted."""
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "b") as b:
        await until(lambda: a.link.routers == 2 and b.link.connected)
        origin, at_s = (b.link.origin, 1e12) if what == "its clock" else (b.link.origin | 1 << 60, 1.0)
        await server.ask("PUBLISH", CHANNEL, pack_frame(PeerFrame(name="b"), origin, at_s))
        async with asyncio.timeout(60):
            while not a.core.heard:  # the store has passed on the damaged message before all of these
                b.core.to_say = [b"hello"]
                b.link.changed()
                await asyncio.sleep(0.05)
        assert a.link._peers.is_alive(b.link.origin)
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
        await server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: sum(a.link.failures.values()))
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
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_server_that_is_no_store_is_a_failure_and_no_bug(
    answer: bytes, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it answers: the link says why it is not whole, and no stack trace is logged."""
    async with saying(answer) as port, linked(f"{scheme}://127.0.0.1:{port}", "a", timeout_s=0.2) as a:
        await until(lambda: sum(a.link.failures.values()) >= 2 and a.link.why != "not connected yet")
        assert not a.link.connected
        assert not events(caplog)["bug"]


# redis-py 8.1 now and then leaves the connection to a cluster's lost node to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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


async def test_what_a_store_gets_back_late_is_learned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that lost everything twice is filled again only after a while: a router that started meanwhile, and has
    read what there was, reads again."""
    monkeypatch.setattr(persistence, "SECOND_READ_S", 0.05)
    monkeypatch.setattr(persistence, "READ_EVERY_S", 0.2)
    async with StoreServer() as server, linked(server.url, "b") as b:
        async with asyncio.timeout(60):
            while await _reads(server) < 2:
                await asyncio.sleep(0.01)
        await server.ask("XADD", "warmroute:{f}:responses", "*", "i", "resp_1", "r", "http://r", "t", "acme")
        await until(lambda: b.owners)


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


async def _reads(server: StoreServer) -> int:
    """How often the owners that are kept were read."""
    found = re.search(rb"cmdstat_xrange:calls=(\d+)", await server.ask("INFO", "commandstats"))
    return int(found[1]) if found else 0
