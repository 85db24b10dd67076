"""A router without a file that starts warm, from a sibling and through a real store
(router/peering/snapshot_transfer.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from router.config.runtime import resolve
from router.core.types.placements import Confidence
from router.peering.frames import PeerFrame, pack_frame
from router.peering.snapshot_transfer import RECEIVERS_MAX
from router.router_server import RouterServer
from tests.control.test_snapshot import ready, state
from tests.control.warm_fleet import Conversations, fleet, share
from tests.peering.routers import routers_of, whole
from tests.peering.stores import StoreServer
from tests.support import fakes
from tests.support.waiting import until

NUMBERS = range(24)


@asynccontextmanager
async def routing(url: str, *engines: str, name: str, **more: Any) -> AsyncIterator[RouterServer]:
    """A router that shares through this store."""
    base = {
        "peering__redis_url": url,
        "peering__router_id": name,
        "snapshot__readiness_wait_s": 30.0,
        "probe__interval_s": 0.2,
    }
    async with RouterServer(resolve(fakes.settings(*engines, **(base | more)))) as app:
        yield app


async def keys(server: StoreServer) -> bytes:
    """What of a snapshot is in the store."""
    return await server.ask("KEYS", "*snapshot*")


@pytest.mark.parametrize("events", [False, True], ids=["estimated", "exact"])
async def test_a_fresh_router_is_warm_from_its_sibling(events: bool) -> None:
    """It is ready once it has what the other one knows, sends conversations where they were, and leaves nothing of it
    in the store; the other one goes on."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        client = await stack.enter_async_context(ClientSession())
        engines = await stack.enter_async_context(fleet(events=events))
        old = await stack.enter_async_context(routing(server.url, *engines.urls, name="old"))
        await ready(client, old)
        if events:
            await until(lambda: all(m.grade is Confidence.EXACT for m in old.router.members))
        talk = Conversations(client, old.url)
        for _ in range(2):
            before = await talk.round(NUMBERS, 1)
        new = await stack.enter_async_context(routing(server.url, *engines.urls, name="new"))
        await ready(client, new)
        said = await state(client, new)
        assert said["source"] == "old"
        assert not any(each["why"] for each in said["restored"])  # blocks of the last second came with messages
        assert (len(said["restored"]), said["replicas"]["waiting"]) == (4, 0)
        for id_ in engines.urls:
            assert new.router.index.blocks(id_) == old.router.index.blocks(id_)
        assert len(new.router.answers) == len(old.router.answers)
        talk.url, at = new.url, dict(talk.at)
        assert share(await talk.round(NUMBERS, 1)) >= 0.95 * share(before)
        assert talk.at == at
        await until_gone(server)
        await until(lambda: routers_of(old) == routers_of(new) == 2)


async def until_gone(server: StoreServer) -> None:
    """Return when the store has no snapshot."""
    async with asyncio.timeout(60):
        while not (await keys(server)).startswith(b"*0"):
            await asyncio.sleep(0.01)


async def test_alone_nobody_is_waited_for() -> None:
    """The first router of a fleet is ready as soon as it knows that it is the first, whatever it may wait for."""
    async with (
        StoreServer() as server,
        fakes.FakeEngine() as engine,
        ClientSession() as client,
        routing(server.url, engine.url, name="first") as app,
    ):
        await ready(client, app)
        assert whole(app)
        assert (await state(client, app))["source"] == ""


async def test_without_a_store_it_is_ready_within_the_budget() -> None:
    """A store that is not there holds nobody back for longer than the setting says."""
    async with fakes.FakeEngine() as engine, ClientSession() as client:
        async with routing("redis://127.0.0.1:1", engine.url, name="one", snapshot__readiness_wait_s=0.3) as app:
            await ready(client, app)


async def test_a_full_store_is_no_trouble() -> None:
    """Both routers are alone, and ready within the budget."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer("--maxmemory", "1", "--maxmemory-policy", "noeviction"))
        client = await stack.enter_async_context(ClientSession())
        engine = await stack.enter_async_context(fakes.FakeEngine())
        for name in ("old", "new"):
            app = await stack.enter_async_context(
                routing(server.url, engine.url, name=name, snapshot__readiness_wait_s=0.3)
            )
            await ready(client, app)
            assert not whole(app)
            assert (await state(client, app))["source"] == ""


async def test_a_sibling_that_dies_in_the_middle_is_given_up() -> None:
    """Another one is asked, or nobody: the fresh router is ready in the end, and nothing half is taken over."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        client = await stack.enter_async_context(ClientSession())
        engines = await stack.enter_async_context(fleet(2, events=False))
        old = await stack.enter_async_context(routing(server.url, *engines.urls, name="old"))
        other = await stack.enter_async_context(routing(server.url, *engines.urls, name="other"))
        for app in (old, other):
            await ready(client, app)
        await until(lambda: routers_of(old) == routers_of(other) == 2)
        talk = Conversations(client, other.url)
        await talk.round(range(6), 1)
        assert old.control.state is not None

        async def half(*_: object) -> AsyncIterator[bytes]:
            yield b"half"
            await asyncio.sleep(3600)

        old.control.state.pieces = half  # type: ignore[method-assign, assignment]  # a process that stands still
        new = await stack.enter_async_context(routing(server.url, *engines.urls, name="new"))
        await ready(client, new)
        assert (await state(client, new))["source"] == "other"
        assert sum(new.router.index.blocks(id_) for id_ in engines.urls) > 0


@pytest.mark.promise("Routers that die while they ask for state keep no new router from it.", "store")
@pytest.mark.finding("2026-11-28/14")
async def test_askers_that_die_make_room(caplog: pytest.LogCaptureFixture) -> None:
    """As many routers as may ask at once die while they ask: one that starts later is handed what this one knows."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        client = await stack.enter_async_context(ClientSession())
        engines = await stack.enter_async_context(fleet(events=False))
        old = await stack.enter_async_context(routing(server.url, *engines.urls, name="old"))
        await ready(client, old)
        await Conversations(client, old.url).round(NUMBERS, 1)
        assert old.control.link is not None
        handing = old.control.link.link._handing
        assert handing is not None
        for n in range(RECEIVERS_MAX):
            dead = pack_frame(PeerFrame(name=f"dead{n}", asks="old"), 1_000 + n, 1, 1.0)
            await server.ask("XADD", "warmroute:{fleet}:messages", "*", "m", dead)
        await until(lambda: len(handing._askers) > RECEIVERS_MAX // 2)
        await until(lambda: not handing._askers)
        new = await stack.enter_async_context(routing(server.url, *engines.urls, name="new"))
        await ready(client, new)
        assert (await state(client, new))["source"] == "old"
    assert not [each for each in caplog.records if getattr(each, "event", "") == "bug"]
