"""Two fleets with one store and one name do not take each other for one; a fleet that is exchanged stays one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.api_keys import Tenant
from router.peering import shared_state
from router.peering.peers import PeerRegistry, numbers_of
from tests.peering.links import OneRouter, linked
from tests.peering.routers import routers_of
from tests.peering.stores import StoreServer
from tests.peering.test_forged import events
from tests.support.fakes import FakeEngine, running
from tests.support.waiting import until

SECRET = b"s" * 32


def serving(*replicas: str) -> Callable[[OneRouter], None]:
    """Of a router with these replicas, each with a model `m`."""
    return lambda one: setattr(one, "served", [(each, "m") for each in replicas])


@pytest.mark.promise("Two fleets with one store and one name are noticed, and share no rate or state.", "store")
@pytest.mark.finding("2026-11-28/13")
async def test_a_router_without_a_replica_in_common_is_a_stranger(caplog: pytest.LogCaptureFixture) -> None:
    """Neither hears the other, takes its rates or counts it; both say so once, with its name."""
    tenants = {"acme": Tenant("acme", requests_per_min=60)}
    async with (
        StoreServer() as server,
        linked(server.url, "a", tenants=tenants, secrets=[SECRET], before=serving("u1", "u2")) as a,
        linked(server.url, "b", tenants=tenants, secrets=[SECRET], before=serving("u3")) as b,
    ):
        await until(lambda: a.link.strangers() == ["b"] and b.link.strangers() == ["a"])
        before = b.quotas.get_remaining("acme", time.monotonic())
        a.quotas.take("acme", 10, time.monotonic())
        a.core.to_say = [b"hello"]
        a.link.changed()
        counts = b.link.counts["strangers"]
        await until(lambda: not a.core.to_say and b.link.counts["strangers"] > counts + 3)
        assert (b.core.heard, b.link.routers) == ([], 1)
        assert b.quotas.get_remaining("acme", time.monotonic()) == before
        assert b.quotas.part("acme") == 1.0
        assert a.link.connected
    assert sorted(str(each["router"]) for each in events(caplog, "peering_unknown_router")) == ["a", "b"]


async def test_routers_of_one_fleet_stay_together_while_it_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica in common is enough; and where all are exchanged, router by router, they have had one."""
    monkeypatch.setattr(shared_state, "REPLICAS_LOOK_S", 0.0)
    async with (
        StoreServer() as server,
        linked(server.url, "a", before=serving("u1", "u2")) as a,
        linked(server.url, "b", before=serving("u2", "u3")) as b,
    ):
        await until(lambda: a.link.routers == b.link.routers == 2)
        peers = a.link._peers._peers
        await until(lambda: all(peer.sibling for peer in peers.values()))
        b.served = [("u8", "m"), ("u9", "m")]
        await until(lambda: len(peers[b.link.origin].replicas & _numbers(b)) == 2)
        heard = a.link.counts["heard"]
        await until(lambda: a.link.counts["heard"] > heard + 4)
        assert a.link.strangers() == b.link.strangers() == []
        await until(lambda: a.link.routers == b.link.routers == 2)  # on a busy machine one may be silent for a moment


def _numbers(one: OneRouter) -> frozenset[int]:
    return one.things.replicas()


async def test_a_stranger_becomes_a_sibling_with_a_replica_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of one were wrong, or are reloaded: no restart is needed."""
    monkeypatch.setattr(shared_state, "REPLICAS_LOOK_S", 0.0)
    async with (
        StoreServer() as server,
        linked(server.url, "a", before=serving("u1")) as a,
        linked(server.url, "b", before=serving("u2")) as b,
    ):
        await until(lambda: a.link.strangers() and b.link.strangers())
        b.served = [("u1", "m")]
        await until(lambda: a.link.routers == b.link.routers == 2)


async def test_the_same_address_with_other_models_is_another_replica(engine: FakeEngine) -> None:
    """Two clusters have the same names of services. A router that asks for no replica in common hears all."""
    async with (
        StoreServer() as server,
        running(engine, peering__redis_url=server.url) as app,
        running(engine, peering__redis_url=server.url, peering__replicas_in_common=False) as second,
        linked(server.url, "c", fleet="fleet", before=serving(engine.url, "u")) as c,
    ):
        c.served = [(engine.url, "another")]
        await until(lambda: routers_of(app) == 2 and routers_of(second) == 3 and len(c.link.strangers()) == 2)
        assert app.control.link is not None
        assert app.control.link.status()["strangers"] == ["c"]
        assert app.control.link.figures().strangers == 1


@given(st.lists(st.tuples(st.sampled_from("apl"), st.sets(st.integers(0, 5), max_size=3)), max_size=12))
def test_who_is_a_stranger(steps: list[tuple[str, set[int]]]) -> None:
    """A model: strangers are those that have replicas, as this router has, and have had none in common."""
    peers, own, theirs, sibling, stranger = PeerRegistry("a", 1, 8), set[int](), set[int](), False, False
    found = 0
    peers.note_message(2, "b", 1, 0.0)
    for what, numbers in steps:
        if what == "l":
            peers.remove_peer(2)
            peers._past.clear()
            peers.note_message(2, "b", 1, 0.0)
            theirs, sibling, stranger = set(), False, False
        elif what == "a":
            own = numbers
            peers.serve(frozenset(own))
        elif numbers:
            theirs = numbers
            peers.set_replicas(2, numbers_of(frozenset(theirs)))
        if own and theirs and not sibling:
            sibling, stranger = bool(own & theirs), not own & theirs
        assert peers.is_stranger(2) == stranger
        assert peers.heard == (not stranger)
        assert (peers.oldest_peer(()) is None) == stranger
        found += len(peers.take_lost())
    assert found >= stranger


def test_who_starts_asks_a_router_with_a_replica_in_common_first() -> None:
    """However long others have run whose replicas are not known."""
    peers = PeerRegistry("a", 100, 8)
    peers.serve(frozenset((1, 2)))
    for origin, replicas in ((10, b""), (20, numbers_of(frozenset((3,)))), (40, numbers_of(frozenset((2, 9))))):
        peers.note_message(origin, str(origin), 1, 0.0)
        if replicas:
            peers.set_replicas(origin, replicas)
    assert peers.oldest_peer(()) == (40, "40")
    assert peers.oldest_peer((40,)) == (10, "10")
    assert peers.oldest_peer((40, 10)) is None
