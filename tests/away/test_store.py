"""The shared store away, before two routers that share: what each of them opens."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loadtest.common.networks import Network
from router.peering.frames import PeerFrame, TenantUsage, pack_frame
from tests.away.cells import Cell
from tests.away.rig import World, eventually, world
from tests.peering.stores import StoreServer

PART = "Shared store"
CELLS = {
    "killed": Cell("SIGKILL."),
    "frozen": Cell("SIGSTOP."),
    "slow": Cell("Each answer and message is a second late."),
    "lying": Cell(
        "It reports stored responses as another tenant's, rates as unused, and replicas as dead, "
        "without the fleet's secret. It also repeats every message."
    ),
    "emptied": Cell("`FLUSHALL`."),
    "old": Cell("`FLUSHALL`, and all keys from before the responses were stored."),
}
STREAM, OWNERS = "warmroute:{fleet}:messages", "warmroute:{fleet}:responses"
DELAY_S = 1.0


async def whole(it: World) -> list[bool]:
    """Whether each router hears the other through the store, by its page."""
    pages = [json.loads(await it.page("/admin/replicas", each))["sharing"] for each in it.routers]
    return [page["whole"] and len(page["routers"]) == len(it.routers) - 1 for page in pages]


async def refused(it: World, kind: str) -> int:
    """Messages and entries of the store that routers have not believed for this reason; the lowest of all routers."""
    lines = [(await it.page("/metrics", each)).decode().splitlines() for each in it.routers]
    name = f'warmroute_peering_messages_total{{kind="{kind}"}} '
    return min(int(float(line.removeprefix(name))) for page in lines for line in page if line.startswith(name))


async def lie(server: StoreServer, it: World) -> None:
    """Write to the store what no router has, and say again what routers have said; return once each has refused it."""
    before = await refused(it, "unauthenticated"), await refused(it, "replayed")
    said = await recorded(server)
    owners = [(id_, each.url, "rival") for id_ in it.ids for each in it.engines]
    frame = PeerFrame(name="x", spent=[TenantUsage("spent", 0.0, 0.0, 1e9, 1e9)], dead=[it.engines[0].url])
    await server.ask("XADD", STREAM, "*", "m", pack_frame(frame, 7, 1, 1.0))
    await server.ask("DEL", OWNERS)
    for id_, url, tenant in owners:
        await server.ask("XADD", OWNERS, "*", "i", id_, "r", url, "t", tenant, "m", b"x" * 16)
    for message in said:
        await server.ask("XADD", STREAM, "*", "m", message)

    async def all_was_read() -> bool:
        unauthenticated = await refused(it, "unauthenticated") - before[0]
        return unauthenticated > len(owners) and await refused(it, "replayed") > before[1]

    await eventually(all_was_read)


async def contents(server: StoreServer) -> dict[bytes, bytes]:
    """All keys, as the store itself writes them down."""
    async with Redis(port=server.port) as redis:
        return {key: dumped for key in await redis.keys() if (dumped := await redis.dump(key)) is not None}


async def emptied(server: StoreServer, it: World, then: dict[bytes, bytes]) -> None:
    """Take everything out, put this in, and return once each router has written again that it is there."""
    async with Redis(port=server.port) as redis:
        await redis.flushall()
        for key, dumped in then.items():
            await redis.restore(key, 0, dumped)
        async with asyncio.timeout(60):
            while len(await redis.keys("warmroute:{fleet}:state:*")) < len(it.routers):
                await asyncio.sleep(0.02)


async def put(server: StoreServer, network: Network, it: World, state: str, then: dict[bytes, bytes]) -> None:
    """Put the store into the state, and wait until every router has noticed."""
    if state == "killed":
        await server.kill()
    elif state == "frozen":
        server.freeze()
    elif state == "slow":
        network.delay_s = DELAY_S
    elif state == "lying":
        await lie(server, it)
    else:
        await emptied(server, it, then if state == "old" else {})
    if state in ("killed", "frozen", "slow"):

        async def alone() -> bool:
            return not any(await whole(it))

        await eventually(alone)


async def recorded(server: StoreServer) -> list[bytes]:
    """Messages of routers that are in the stream."""
    async with Redis(port=server.port) as redis:
        return [fields[b"m"] for _, fields in await redis.xrange(STREAM)]


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, state: str) -> None:
    """What is open, and what is served, is what the cell says, at both routers."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        network = await stack.enter_async_context(Network(server.port))
        then: dict[bytes, bytes] = {}

        async def started(_: World) -> None:
            then.update(await contents(server))

        shared = {"peering__redis_url": f"redis://127.0.0.1:{network.port}", "peering__timeout_s": "0.5"}
        it = await stack.enter_async_context(world(tmp_path, routers=2, started=started, **shared))
        await put(server, network, it, state, then)
        await it.holds(CELLS[state])
