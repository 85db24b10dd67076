"""Links of several routers through a real store: what one says the others hear, whatever becomes of the store."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trustme

from router.peering import publisher
from router.peering.clients import TlsFiles
from router.peering.publisher import HEARTBEAT_S, URGENT_GAP_S
from router.peering.redis_store import RedisSession, open_session
from router.peering.session import ZERO_ID, Page, StreamId
from router.peering.store_url import parse_address
from tests.peering.links import OneRouter, linked
from tests.peering.stores import PROGRAMS, Network, StoreServer, replica_of
from tests.support.waiting import until


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_one_says_all_others_hear(program: str) -> None:
    """With every server that is on this machine: messages of the core and owners of responses reach all other routers
    and not oneself; routers of another name hear nothing."""
    async with StoreServer(program=program) as server, AsyncExitStack() as stack:
        a, b, c = [await stack.enter_async_context(linked(server.url, name)) for name in "abc"]
        stranger = await stack.enter_async_context(linked(server.url, "d", fleet="g"))
        await until(lambda: all(each.link.routers == 3 for each in (a, b, c)))
        a.core.to_say.append(b"hello")
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await until(lambda: b.core.heard and c.core.heard and b.owners and c.owners)
        assert (b.core.heard, c.owners) == ([b"hello"], {"resp_1": ("http://r", "acme")})
        assert not a.core.heard
        await until(lambda: stranger.link.connected)
        assert stranger.link.routers == 1
        assert [name for name, _ in b.link.peers()] == ["a", "c"]
        assert not stranger.core.heard
        assert not stranger.owners


async def test_a_core_that_has_nothing_to_say_yet_is_not_asked_without_a_pause() -> None:
    """Something is urgent, and the core would have it wait: until the next message it is asked every few milliseconds
    at most, and others have their turn. What has changed it is asked for before another message is due."""
    async with StoreServer() as server, linked(server.url, "a") as a:
        await until(lambda: a.link.connected)
        said, asked = a.link.counts["said"], a.core.asked
        a.link.urgent()
        await until(lambda: a.link.counts["said"] >= said + 1)
        assert a.core.asked - asked <= HEARTBEAT_S / (URGENT_GAP_S / 2) + 2
        said, a.core.to_say = a.link.counts["said"], [b"hello"]
        a.link.changed()
        await until(lambda: not a.core.to_say)
        assert a.link.counts["said"] <= said + 1


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("told", ["urgent", "changed"])
async def test_what_the_core_has_left_to_say_is_not_forgotten(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core has its message wait, or says that there is more: it is asked again though no message is due."""
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "b") as b:
        await until(lambda: a.link.routers == 2 and b.link.connected)
        monkeypatch.setattr(publisher, "HEARTBEAT_S", 60.0)
        a.core.left = getattr(a.link, told)
        a.core.to_say = [None, b"first", b"second", b"third"]
        getattr(a.link, told)()
        await until(lambda: b.core.heard == [b"first", b"second", b"third"])


async def test_who_leaves_says_nothing_behind_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much its core has to say: others would take the router for one that is new."""
    monkeypatch.setattr(publisher, "URGENT_GAP_S", 0.0)
    monkeypatch.setattr(publisher, "URGENT_GAP_PER_ROUTER_S", 0.0)
    async with StoreServer() as server, linked(server.url, "a") as a:
        a.core.to_say, a.core.left = [b"x"] * 100_000, a.link.urgent
        await until(lambda: a.link.connected and a.core.asked > 10)
        asked = a.core.asked
        await a.link.close()
        assert a.core.asked == asked


async def test_messages_have_an_order_and_are_read_again_from_any_place() -> None:
    """The store's stream has what was added, under ascending ids, for a reader that comes later too."""
    async with StoreServer() as server, open_session(parse_address(server.url), "f", 5.0, TlsFiles()) as store:
        ids = [await store.add(b"%d" % n) for n in range(3)]
        assert ids == sorted(ids)
        page = await store.read(ZERO_ID, ZERO_ID)
        assert page.messages == [(id_, b"%d" % n) for n, id_ in enumerate(ids)]
        assert page.messages_at == ids[-1]
        assert (await store.read(ids[1], ZERO_ID)).messages == [(ids[2], b"2")]
        waiting = asyncio.create_task(store.read(ids[2], ZERO_ID))
        last = await store.add(b"3")
        assert (await waiting).messages == [(last, b"3")]


async def test_a_router_that_comes_later_reads_the_state_of_those_before_it() -> None:
    """The state first, and then each message after it, once; and those before it know it from its first message."""
    async with StoreServer() as server, linked(server.url, "a") as a:
        a.core.own_state = b"of a"
        await until(lambda: a.link.connected)
        a.core.to_say = [b"before"]
        a.link.changed()
        await until(lambda: not a.core.to_say)
        states = (await server.ask("INFO", "commandstats")).partition(b"cmdstat_set:calls=")[2].partition(b",")[0]
        while (await server.ask("INFO", "commandstats")).partition(b"cmdstat_set:calls=")[2].startswith(states + b","):
            await asyncio.sleep(0.01)  # the next state includes that message
        async with linked(server.url, "b") as b:
            await until(lambda: a.link.routers == b.link.routers == 2)
            a.core.to_say = [b"after"]
            a.link.changed()
            await until(lambda: bool(b.core.heard))
            assert (b.core.restored, b.core.heard, a.core.begun) == ([b"of a"], [b"after"], ["b"])
            assert not a.core.restored


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("what", ["trimmed", "emptied"])
async def test_a_router_that_has_missed_messages_reads_the_state(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream no longer has a message that it has not read: the numbers of messages show it, and the state of their
    router takes their place."""
    reads, reading, may_read = RedisSession.read, [0], asyncio.Event()

    async def read(self: RedisSession, messages_at: StreamId, owners_at: StreamId) -> Page:
        await may_read.wait()
        reading[0] += 1
        try:
            return await reads(self, messages_at, owners_at)
        finally:
            reading[0] -= 1

    monkeypatch.setattr(RedisSession, "read", read)
    may_read.set()
    lost = ["XTRIM", "warmroute:{f}:messages", "MAXLEN", "0"] if what == "trimmed" else ["FLUSHALL"]
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "b") as b:
        await until(lambda: a.link.routers == b.link.routers == 2)
        may_read.clear()
        await until(lambda: not reading[0])
        restored, said, a.core.to_say = len(b.core.restored), a.link.counts["said"], [b"lost"]
        a.link.changed()
        await until(lambda: not a.core.to_say and a.link.counts["said"] > said + 1)  # it is in the store
        await server.ask(*lost)
        may_read.set()
        await until(lambda: len(b.core.restored) > restored)
        await until(lambda: a.link.routers == b.link.routers == 2)
        assert not b.core.heard
        assert not a.link.counts["interruptions"]


async def test_a_message_that_the_store_has_not_confirmed_is_added_again() -> None:
    """Whoever read the first copy ignores the second one by its number; whoever did not reads that."""
    async with AsyncExitStack() as stack:
        _, network, a, b = await two_routers(stack)
        network.cut(there=False, back=True)
        a.core.to_say = [b"once"]
        a.link.changed()
        await until(lambda: bool(a.link.failures))  # its session is over
        network.mend()
        await until(lambda: b.link.counts["ignored"] and a.link.connected and b.link.routers == 2)
        heard = b.link.counts["heard"]
        await until(lambda: b.link.counts["heard"] > heard + 4)
        assert b.core.heard == [b"once"]


async def test_who_leaves_is_gone_at_once_and_who_dies_within_a_second() -> None:
    """A router that ends says so; one that is silent is forgotten."""
    async with StoreServer() as server, linked(server.url, "a") as a:
        async with linked(server.url, "b") as b:
            await until(lambda: a.link.routers == 2 and b.link.routers == 2)
        await until(lambda: a.link.routers == 1 and a.link.connected)
        async with linked(server.url, "c") as c:
            await until(lambda: a.link.routers == 2 and c.link.connected)
            for task in c.link._tasks:
                task.cancel()
            await until(lambda: a.link.routers == 1)


async def test_a_router_that_comes_later_knows_all_owners() -> None:
    """Owners of stored responses are kept in the store: who starts afterwards reads them, more than a page of them."""
    async with StoreServer() as server:
        async with linked(server.url, "a") as a:
            for n in range(1_300):
                a.link.publish_response_owner(f"resp_{n}", "http://r", "acme")
            await until(lambda: a.link.counts["written"] >= 1_000)
        async with linked(server.url, "b") as b:
            await until(lambda: len(b.owners) >= 1_000)
            assert b.owners["resp_1299"] == ("http://r", "acme")


async def two_routers(stack: AsyncExitStack) -> tuple[StoreServer, Network, OneRouter, OneRouter]:
    """A store, and two routers that hear each other: the first one's way there is a network that can be cut."""
    server = await stack.enter_async_context(StoreServer())
    network = await stack.enter_async_context(Network(server.port))
    a = await stack.enter_async_context(linked(f"redis://127.0.0.1:{network.port}", "a", timeout_s=0.5))
    b = await stack.enter_async_context(linked(server.url, "b"))
    await until(lambda: a.link.routers == 2 and b.link.routers == 2 and a.link.connected and b.link.connected)
    return server, network, a, b


@pytest.mark.promise("No request waits for the shared store or fails with it.", "store")
@pytest.mark.parametrize("how", ["frozen", "killed", "cut", "cut there", "cut back", "paused"])
async def test_alone_without_the_store_and_whole_with_it(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A store that is frozen, killed, cut off in both directions or in one, or told to answer nobody: the router is
    alone, says so once, and hears the others again without a restart once it is back. What it had to tell meanwhile
    arrives."""
    caplog.set_level(logging.INFO)
    async with AsyncExitStack() as stack:
        server, network, a, b = await two_routers(stack)
        caplog.clear()
        if how == "frozen":
            server.freeze()
        elif how == "killed":
            await server.kill()
        elif how == "paused":
            assert (await server.ask("CLIENT", "PAUSE", "2500", "ALL")).startswith(b"+OK")
        else:
            network.cut(there=how != "cut back", back=how != "cut there")
        await until(lambda: not a.link.connected)
        assert a.core.was_alone >= 1
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await asyncio.sleep(0.5)
        if how == "frozen":
            server.thaw()
        elif how == "killed":
            await server.start()
        network.mend()
        await until(lambda: a.link.connected and b.link.connected)
        await until(lambda: a.link.routers == 2 and b.link.routers == 2 and b.owners)
        mine = [r for r in caplog.records if getattr(r, "event", "") == "peering_disconnected"]
        assert len(mine) == a.link.counts["interruptions"] + b.link.counts["interruptions"]
        assert a.link.counts["interruptions"] >= 1  # once, and again where the store's process is not given a turn


async def test_what_was_said_into_a_cut_network_is_said_again() -> None:
    """A response that was made before its router noticed that nobody hears it: another router, whose own way to the
    store was never cut and which reads nothing there, hears of it afterwards."""
    async with AsyncExitStack() as stack:
        _, network, a, b = await two_routers(stack)
        await asyncio.sleep(1.5)  # b has read the store for the last time
        network.cut(there=True, back=False)
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await until(lambda: not a.link.connected)
        await network.lose()
        network.mend()
        await until(lambda: bool(b.owners))


@pytest.mark.usefixtures("patience")
async def test_an_emptied_store_is_filled_again() -> None:
    """After FLUSHALL routers go on hearing each other, and one that comes later still learns of every response."""
    async with StoreServer() as server:
        async with linked(server.url, "a") as a:
            await until(lambda: a.link.connected)
            a.link.publish_response_owner("resp_1", "http://r", "acme")
            await until(lambda: a.link.counts["written"])
            await server.ask("FLUSHALL")
            await until(lambda: a.link.counts["written"] == 2)
            assert not a.link.counts["interruptions"]
            async with linked(server.url, "b") as b:
                await until(lambda: b.owners)


@pytest.mark.parametrize("why", ["full", "read-only", "denied"])
async def test_a_store_that_takes_no_writes_leaves_routers_alone(why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Full, read-only, or without the right to write: routers are alone, say so once with the store's reason, and hear
    each other again when it takes writes."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        url = server.url
        if why == "read-only":
            replica = await stack.enter_async_context(replica_of(server))
            await replica.ask("REPLICAOF", "NO", "ONE")
            url = replica.url
        await server.ask("ACL", "SETUSER", "w", "on", ">pw", "&*", "~*", "+@all")
        if why == "denied":
            url = server.url.replace("//", "//w:pw@")
        a, b = [await stack.enter_async_context(linked(url, name)) for name in "ab"]
        await until(lambda: a.link.routers == 2 and b.link.routers == 2 and a.link.connected)
        if why == "full":
            await server.ask("CONFIG", "SET", "maxmemory", "1")
        elif why == "read-only":
            await replica.ask("REPLICAOF", "127.0.0.1", str(server.port))
        else:
            await server.ask("ACL", "SETUSER", "w", "-xadd")
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await until(lambda: not a.link.connected and not b.link.connected and a.link.refusal)
        assert a.link.refusal == a.link.why
        await until(lambda: sum(a.link.failures.values()) > 5)
        assert sum(getattr(r, "event", "") == "peering_disconnected" for r in caplog.records) == 2  # a and b
        if why == "full":
            await server.ask("CONFIG", "SET", "maxmemory", "0")
        elif why == "read-only":
            await replica.ask("REPLICAOF", "NO", "ONE")
        else:
            await server.ask("ACL", "SETUSER", "w", "+xadd")
        await until(lambda: a.link.connected and a.link.routers == 2 and b.owners)
        assert not a.link.refusal


@pytest.mark.promise("No request waits for the shared store or fails with it.", "store")
@pytest.mark.usefixtures("patience")
async def test_a_store_that_lies_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Garbage, huge values, messages of another release, and entries that nobody of us wrote: counted, logged once, and
    everything else goes on."""
    async with StoreServer() as server:
        for words in (("x", "y"), ("i", b"\xff", "r", "b", "t", "c"), ("i", "a")):
            await server.ask("XADD", "warmroute:{f}:responses", "*", *words)
        async with linked(server.url, "a") as a, linked(server.url, "b") as b:
            await until(lambda: a.link.routers == 2 and b.link.routers == 2)
            stream = "warmroute:{f}:messages"
            garbage = [b"", b"\x03", b"\x03" * 25, b"\x03" * 64, b"\x03" + b"\0" * 24 + b"\x91\xa1a" * 9]
            for words in [*garbage, b"\x03" * (6 << 20), b"\x7f of another release"]:
                await server.ask("XADD", stream, "*", "m", words)
            await server.ask("XADD", stream, "*", "of another field", "x")
            await until(lambda: a.link.counts["bad"] + a.link.counts["other_release"] >= len(garbage) + 3)
            assert a.link.counts["other_release"]
            b.core.to_say += [b"bad", b"good"]
            await until(lambda: a.core.heard == [b"good"])
            assert a.link.counts["bad"] >= len(garbage) + 2
        assert sum(getattr(r, "event", "") == "peering_invalid_message" for r in caplog.records) == 2


async def test_a_name_that_is_taken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Two routers of one name do not hear each other, and the log says what to do."""
    async with StoreServer() as server, linked(server.url, "a") as a, linked(server.url, "a"):
        await until(lambda: any(getattr(r, "event", "") == "peering_duplicate_name" for r in caplog.records))
        assert a.link.routers == 1


async def test_no_more_routers_than_may_be(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond the limit a router is not listened to, and the log says so once."""
    async with StoreServer() as server, AsyncExitStack() as stack:
        a = await stack.enter_async_context(linked(server.url, "a", peers_max=2))
        for name in "bcd":
            await stack.enter_async_context(linked(server.url, name))
        await until(lambda: any(getattr(r, "event", "") == "peering_too_many_routers" for r in caplog.records))
        assert a.link.routers == 3


async def test_tls_and_a_password(tmp_path: Path) -> None:
    """`rediss://` speaks TLS, with a certificate of ours if the store wants one, and checks the store's; a wrong
    password or a strange certificate leaves the router alone, and says why without the password."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own = authority.issue_cert("router")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    files = TlsFiles(str(tmp_path / "ca.pem"), str(tmp_path / "own.pem"))
    async with StoreServer("--requirepass", "s3cret") as server, Network(server.port, context) as network:
        url = f"rediss://:s3cret@127.0.0.1:{network.port}"
        async with linked(url, "a", tls=files) as a, linked(server.url.replace("//", "//:s3cret@"), "b") as b:
            await until(lambda: a.link.routers == 2 and b.link.routers == 2)
        async with linked(url.replace("s3cret", "wr0ng"), "a", tls=files) as a, linked(url, "b") as b:
            await until(lambda: a.link.failures["denied"] and b.link.failures["unreachable"])
            assert not a.link.connected
            assert "wr0ng" not in a.link.why
