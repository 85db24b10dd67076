"""A store into which others write: with a secret, nothing counts that no router of the fleet has written."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest
from redis.asyncio import Redis

from router.config.api_keys import Tenant
from router.peering.frames import PeerFrame, TenantUsage, pack_frame
from router.peering.message_auth import FRESH_S, MESSAGE, STATE, Seals
from router.peering.message_receiver import REFUSED_EVERY_S
from router.peering.peers import PeerRegistry
from router.peering.snapshot_transfer import SnapshotTransfer
from tests.peering.links import OneRouter, linked, receiver
from tests.peering.stores import StoreServer
from tests.support.waiting import until

STREAM, SECRET, OTHER = "warmroute:{f}:messages", b"s" * 32, b"o" * 32


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    """Fields of the lines of one event."""
    return [each.__dict__["fields"] for each in caplog.records if getattr(each, "event", "") == name]


async def recorded(server: StoreServer) -> list[bytes]:
    """All messages in the stream, as anybody can read them who may."""
    async with Redis(port=server.port) as redis:
        return [fields[b"m"] for _, fields in await redis.xrange(STREAM)]


async def say(server: StoreServer, message: bytes) -> None:
    """Add a message to the stream, as anybody can who may write."""
    await server.ask("XADD", STREAM, "*", "m", message)


@pytest.mark.promise("No message or entry in the shared store counts without a mark by the fleet's secret.", "store")
@pytest.mark.finding("2026-11-28/4")
async def test_nothing_forged_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Messages and entries without a mark: no owner is learned, no rate spent, no router counted; all are counted, and
    the log says so once a minute."""
    async with StoreServer() as server:
        for words in (
            ("i", "resp_0", "r", "http://r", "t", "evil"),
            ("i", "resp_0", "r", "u", "t", "evil", "m", b"x" * 16),
        ):
            await server.ask("XADD", "warmroute:{f}:responses", "*", *words)
        tenants = {"acme": Tenant("acme", requests_per_min=60)}
        async with (
            linked(server.url, "a", secrets=[SECRET], tenants=tenants) as a,
            linked(server.url, "b", secrets=[SECRET]) as b,
        ):
            await until(lambda: a.link.routers == 2 and b.link.routers == 2)
            forger = Seals("f", [OTHER], time.monotonic)
            for n in range(2):
                spent = [TenantUsage("acme", 1e9 * n, 0.0)]
                frame = PeerFrame(name="x", spent=spent, dead=["http://r"])
                message = pack_frame(frame, 7, n + 1, float(n))
                await say(server, message)
                await say(server, forger.seal(MESSAGE, message, time.time()))
                state = pack_frame(frame, 8, n + 1, float(n))
                await server.ask("SADD", "warmroute:{f}:routers", "y")
                await server.ask("SET", "warmroute:{f}:state:y", forger.seal(STATE, state, time.time()))
            await until(lambda: a.link.counts["unauthenticated"] >= 6 and b.link.counts["unauthenticated"] >= 6)
            b.link.publish_response_owner("resp_2", "http://r", "acme")
            await until(lambda: a.owners)
            assert a.owners == {"resp_2": ("http://r", "acme")}
            assert a.quotas.get_remaining("acme", time.monotonic())[0] == 60
            assert a.link.routers == 2
            async with linked(server.url, "c", secrets=[SECRET]) as c:  # which reads what a and b have written
                await until(lambda: c.owners)
                assert c.owners == a.owners
    assert len(events(caplog, "peering_unauthenticated")) == 3  # one of each router


async def test_what_was_said_once_does_not_count_again() -> None:
    """Everything that a router has said is said again by somebody, while it is there and when it has left: that is
    counted as replayed, and the router is not back."""
    async with StoreServer() as server, linked(server.url, "a", secrets=[SECRET]) as a:
        async with linked(server.url, "b", secrets=[SECRET]) as b:
            await until(lambda: a.link.routers == 2)
            b.core.to_say = [b"hello"]
            b.link.changed()
            await until(lambda: a.core.heard == [b"hello"])
            await again(server, a, await recorded(server))
            assert a.core.heard == [b"hello"]
        await until(lambda: a.link.routers == 1)
        await again(server, a, await recorded(server))
        assert a.link.routers == 1
        assert a.link.connected


async def again(server: StoreServer, one: OneRouter, messages: list[bytes]) -> None:
    """Say all of this again, until it was read."""
    before = one.link.counts["replayed"] + one.link.counts["ignored"]
    for message in messages:
        await say(server, message)
    await until(lambda: one.link.counts["replayed"] + one.link.counts["ignored"] >= before + len(messages))


async def test_a_secret_is_exchanged_router_by_router() -> None:
    """A router with the new secret and that of before hears and is heard by those of either; owners that it wrote are
    read by a router that has the new one only."""
    async with StoreServer() as server:
        async with (
            linked(server.url, "old", secrets=[OTHER]) as old,
            linked(server.url, "both", secrets=[SECRET, OTHER]) as both,
        ):
            await until(lambda: old.link.routers == both.link.routers == 2)
            both.link.publish_response_owner("resp_1", "http://r", "acme")
            await until(lambda: old.owners and both.link.counts["written"])
        async with linked(server.url, "new", secrets=[SECRET]) as new:
            await until(lambda: new.owners)


async def test_other_keys_are_taken_while_it_runs() -> None:
    """Secrets made of keys change when the keys do: those that have the new ones and those that do not yet hear each
    other, and what was written is written again."""
    async with StoreServer() as server:
        async with linked(server.url, "a", secrets=[OTHER]) as a, linked(server.url, "b", secrets=[OTHER]) as b:
            await until(lambda: a.link.routers == b.link.routers == 2)
            a.link.publish_response_owner("resp_1", "http://r", "acme")
            await until(lambda: a.link.counts["written"] == 1)
            assert a.seals.renew([SECRET])
            a.link.on_secrets_changed()
            heard = (a.link.counts["heard"], b.link.counts["heard"])
            await until(lambda: a.link.counts["heard"] > heard[0] + 3 and b.link.counts["heard"] > heard[1] + 3)
            assert (a.link.routers, b.link.routers) == (2, 2)
            await until(lambda: a.link.counts["written"] == 2)
        async with linked(server.url, "c", secrets=[SECRET]) as c:
            await until(lambda: c.owners)


@pytest.mark.parametrize("late_s", [5.0, FRESH_S + 30])
async def test_clocks_may_differ_by_seconds(late_s: float, caplog: pytest.LogCaptureFixture) -> None:
    """Five seconds are nothing; routers whose clocks are minutes apart do not hear each other, and say why."""
    async with StoreServer() as server, linked(server.url, "a", secrets=[SECRET]) as a:
        async with linked(server.url, "b", secrets=[SECRET], before=lambda b: setattr(b, "wall_s", late_s)) as b:
            await until(lambda: b.link.connected)
            if late_s < FRESH_S:
                await until(lambda: a.link.routers == b.link.routers == 2)
                return
            await until(lambda: a.link.counts["replayed"] > 2 and b.link.counts["replayed"] > 2)
            assert (a.link.routers, b.link.routers) == (1, 1)
    assert all("apart" in str(each["why"]) for each in events(caplog, "peering_unauthenticated"))


async def test_a_router_without_the_secret_is_told_and_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Neither hears the other, and both say what to do."""
    async with StoreServer() as server, linked(server.url, "a", secrets=[SECRET]) as a, linked(server.url, "b") as b:
        await until(lambda: a.link.counts["unauthenticated"] and b.link.counts["unauthenticated"])
        assert (a.link.routers, b.link.routers) == (1, 1)
    assert {each["why"] for each in events(caplog, "peering_unauthenticated")} == {
        "it has no signature",
        "it is signed, but this router has no secret or API keys",
    }


def test_what_is_refused_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """With how much of it there was since the last line."""
    caplog.set_level(logging.WARNING)
    seals, counts = Seals("f", [SECRET], time.monotonic), Counter[str]()
    one = receiver(seals, counts)
    for n in range(1, 1_001):
        assert one.hear((n, 0), pack_frame(PeerFrame(name="x"), 7, n, 1.0), REFUSED_EVERY_S * (n - 1) / 500) is None
    lines = events(caplog, "peering_unauthenticated")
    assert [each["unauthenticated"] for each in lines] == [1, 500]
    assert counts["unauthenticated"] == 1_000


def test_an_own_message_that_is_repeated_proves_nothing() -> None:
    """A store that says again what this router said does not make it whole."""
    seals = Seals("f", [SECRET], time.monotonic)
    one = receiver(seals, Counter())
    first, later = (
        seals.seal(MESSAGE, pack_frame(PeerFrame(name="a"), 1, seq, float(seq)), time.time()) for seq in (1, 2)
    )
    heard = [one.hear((n, 0), each, 3.0) for n, each in enumerate((first, first, later, first, later), 1)]
    assert heard == [1.0, None, 2.0, None, None]
    assert one.hear((9, 0), pack_frame(PeerFrame(name="a"), 1, 3, 2.5), 3.0) is None


def test_a_parcel_counts_for_its_reader_and_in_its_place() -> None:
    """Of what is handed over, no parcel is taken that another one has made, that was for another one, or another of
    the same one."""
    made, other, none = (
        SnapshotTransfer(
            None,  # type: ignore[arg-type]  # not asked
            PeerRegistry("a", 1, 8),
            name="a",
            origin=1,
            seals=Seals("f", secrets, time.monotonic),
            whole=lambda: True,
            ask=lambda _: None,
            clock=time.monotonic,
        )
        for secrets in ([SECRET], [OTHER], [])
    )
    parcel = b"\x91\xc4\x01x"
    sealed = made._seal_parcel("snapshot:2:1:0", parcel)
    assert made._open_parcel("snapshot:2:1:0", sealed) == [b"x"]
    for key, bad in [
        ("snapshot:2:1:1", sealed),
        ("snapshot:3:1:0", sealed),
        ("snapshot:2:1:0", parcel),
        ("snapshot:2:1:0", sealed[:-1]),
    ]:
        assert made._open_parcel(key, bad) is None
    assert other._open_parcel("snapshot:2:1:0", sealed) is None
    assert none._open_parcel("k", none._seal_parcel("k", parcel)) == [b"x"]
