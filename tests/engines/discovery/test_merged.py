"""All discoveries as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.core.types.replicas import Replica
from router.engines.discovery import Status, combined_source
from router.engines.discovery.combined_source import MergedDiscovery
from router.engines.discovery.static import StaticDiscovery
from tests.support.discovered import Told

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class World:
    """A list, a source, and both."""

    def __init__(self, *listed: str, replicas_max: int = 10) -> None:
        self.listed, self.told = StaticDiscovery(listed), Told()
        self.both = MergedDiscovery(self.listed, self.told, replicas_max=replicas_max)
        self.sets: Any = self.both.watch()

    async def next(self) -> set[str]:
        """Ids of the next set."""
        return {replica.id for replica in await anext(self.sets)}

    async def nothing(self) -> None:
        """No set comes, however often everybody has had a turn."""
        coming = asyncio.ensure_future(anext(self.sets))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not coming.done()
        self.coming = coming


@pytest.fixture(autouse=True)
async def soon(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A source with a bug is watched again at once."""
    monkeypatch.setattr(combined_source, "AGAIN_S", 0.001)
    async with asyncio.timeout(60):
        yield


async def test_what_is_listed_waits_for_nobody() -> None:
    """With replicas in the settings there is a set at once, while the source has not said anything."""
    world = World(A)
    assert await world.next() == {A}
    world.told.say(Replica(B), Replica(C))
    assert await world.next() == {A, B, C}
    world.listed.replace([])
    assert await world.next() == {B, C}
    world.told.say()
    assert await world.next() == set()
    await world.sets.aclose()


async def test_nothing_listed_waits_for_the_source() -> None:
    """An empty list is no complete set as long as the source has not spoken; what is added at run time is one."""
    world = World()
    await world.nothing()
    world.listed.add(A)
    assert {replica.id for replica in await world.coming} == {A}
    world.listed.remove(A)
    assert await world.next() == set()
    await world.sets.aclose()
    world = World()
    await world.nothing()
    world.told.say()
    assert await world.coming == frozenset(), "a source that finds nothing has spoken"
    await world.sets.aclose()


async def test_the_source_knows_more() -> None:
    """A replica that both know is one, with the source's facts; it stays when the source has lost it."""
    world = World(A)
    await world.next()
    known = Replica(A, "uid-1", "ns/pod", "node")
    world.told.say(known)
    assert await anext(world.sets) == {known}
    world.told.say(known)
    await world.nothing()
    world.told.say()
    assert await world.coming == {Replica(A)}
    await world.sets.aclose()


@pytest.mark.promise("No content of a pod stops discovery, and its findings are bounded.", "discovery")
async def test_there_is_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond it none is taken, those that are in stay in, and the log says so once; what is listed does not count."""
    caplog.set_level(logging.INFO)
    world = World(A, replicas_max=2)
    await world.next()
    world.told.say(Replica("http://m:1"), Replica("http://n:1"))
    assert await world.next() == {A, "http://m:1", "http://n:1"}
    world.told.say(*(Replica(f"http://{name}:1") for name in "bcmn"))
    await world.nothing()
    world.told.say(*(Replica(f"http://{name}:1") for name in "bcm"))
    assert {replica.id for replica in await world.coming} == {A, B, "http://m:1"}
    world.told.say(*(Replica(f"http://{name}:1") for name in "bm"))
    await world.nothing()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    world.coming.cancel()
    await asyncio.gather(world.coming, return_exceptions=True)
    assert world.told.closed == 1, "whoever is cancelled leaves nobody watching"


async def test_a_bug_in_a_source(caplog: pytest.LogCaptureFixture) -> None:
    """A source that raises is watched again, its last set stays, and its status says what happened until it speaks."""
    world = World(A)
    await world.next()
    world.told.say(Replica(B))
    await world.next()
    world.told.said.put_nowait(KeyError("metadata"))
    await world.nothing()
    while world.told.watches < 2:
        await asyncio.sleep(0.001)
    assert world.told.closed == 1
    status = world.both.statuses()["told"]
    assert (status.fresh, status.errors) == (False, 1)
    assert "KeyError" in status.why
    assert world.both.statuses()["static"] == Status(fresh=True, replicas=1)
    assert "bug" in caplog.text
    world.told.say(Replica(C))
    assert {replica.id for replica in await world.coming} == {A, C}
    status = world.both.statuses()["told"]
    assert (status.fresh, status.errors) == (True, 1)
    await world.sets.aclose()
    assert world.told.closed == 2
