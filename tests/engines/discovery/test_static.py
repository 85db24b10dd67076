"""Replicas of the settings, which are read again: those that leave, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.registry import Fleet
from router.core.types.replicas import Replica, ServedModel
from router.engines.discovery import static
from router.engines.discovery.static import StaticDiscovery

A, B, C, D = (f"http://{name}:1" for name in "abcd")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that leave are looked at again at once."""
    monkeypatch.setattr(static, "LOOK_S", 0.001)


class World:
    """A list, and what its replicas serve alone."""

    def __init__(self, *urls: str) -> None:
        self.alone: set[str] = set(urls)
        self.now_s = 0.0
        self.listed = StaticDiscovery(urls, alone=self._alone, kept_s=10.0, clock=lambda: self.now_s)
        self.sets: Any = self.listed.watch()

    def _alone(self, urls: Collection[str]) -> set[str]:
        return self.alone & set(urls)

    async def next(self) -> set[str]:
        """URLs of the next set."""
        async with asyncio.timeout(20):
            return {replica.id for replica in await anext(self.sets)}


async def test_those_that_leave_stay_until_others_serve_what_they_do() -> None:
    """Each for itself; one that comes back is as before, and without newcomers all are gone at once."""
    world = World(A, B)
    assert await world.next() == {A, B}
    world.listed.replace([C, D])
    assert await world.next() == {A, B, C, D}
    world.alone.discard(A)
    assert await world.next() == {B, C, D}
    world.alone = {C, D}
    assert await world.next() == {C, D}
    world.listed.replace([A])
    assert await world.next() == {A, C, D}
    world.listed.replace([A, C])
    world.alone = set()
    assert await world.next() == {A, C}
    world.alone = {A, C}
    world.listed.replace([A])
    assert await world.next() == {A}
    world.listed.replace([])
    assert await world.next() == set()
    assert world.listed.status().replicas == 0


async def test_there_is_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    """Newcomers that do not become ready keep nobody for longer, however often the settings are read; and the log says
    so."""
    world = World(A)
    assert await world.next() == {A}
    world.listed.replace([B])
    assert await world.next() == {A, B}
    world.now_s = 9.0
    world.listed.replace([B, C])
    assert await world.next() == {A, B, C}
    world.now_s = 10.0
    assert await world.next() == {B, C}
    (line,) = [each for each in caplog.records if getattr(each, "event", "") == "left_unreplaced"]
    assert getattr(line, "fields", {})["replicas"] == [A]


MODELS = st.frozensets(st.sampled_from("xyz"), max_size=3)


@given(st.lists(st.tuples(MODELS, st.booleans(), st.booleans()), max_size=5))
def test_what_is_served_alone(members: list[tuple[frozenset[str], bool, bool]]) -> None:
    """Of replicas with models, ready or not, leaving or not: those without which a model has fewer than one."""
    fleet = Fleet()
    urls = [f"http://{number}:1" for number in range(len(members))]
    fleet.replace(map(Replica, urls))
    for url, (models, ready, _) in zip(urls, members, strict=True):
        fleet.observe_models(fleet.members[url], [ServedModel(name) for name in models])
        if ready:
            fleet.observe_health(url, ok=True)
    leaving = {url for url, (_, _, leaves) in zip(urls, members, strict=True) if leaves}
    stay = [models for models, ready, leaves in members if ready and not leaves]
    served = frozenset().union(*stay)
    expected = {
        url
        for url, (models, ready, leaves) in zip(urls, members, strict=True)
        if ready and leaves and (not stay or models - served)
    }
    assert fleet.serving_alone(leaving) == expected
