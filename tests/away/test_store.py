"""The shared store away, before two routers that share: what each of them opens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
CHANNEL, OWNERS = "warmroute:{fleet}:said", "warmroute:{fleet}:responses"
DELAY_S = 1.0


async def whole(it: World) -> list[bool]:
    """Whether each router hears the other through the store, by its page."""
    pages = [json.loads(await it.page("/admin/replicas", each))["sharing"] for each in it.routers]
    return [page["whole"] and len(page["routers"]) == len(it.routers) - 1 for page in pages]


async def refused(it: World, kind: str) -> int:
    """Messages and entries of the store that routers have not believed for this reason; the lowest of all routers."""
    lines = [(await it.page("/metrics", each)).decode().splitlines() for each in it.routers]
    name = f'warmroute_sharing_messages_total{{kind="{kind}"}} '
    return min(int(float(line.removeprefix(name))) for page in lines for line in page if line.startswith(name))


async def lie(server: StoreServer, network: Network, it: World, said: list[bytes]) -> None:
    """Write to the store what no router has, and say again what routers have said; return once each has refused it."""
    before = await refused(it, "unauthenticated"), await refused(it, "replayed")
    owners = [(id_, each.url, "rival") for id_ in it.ids for each in it.engines]
    frame = PeerFrame(
        name="x", spent=[TenantUsage("spent", 0.0, 0.0, 1e9, 1e9)], owners=owners, dead=[it.engines[0].url]
    )
    await server.ask("PUBLISH", CHANNEL, pack_frame(frame, 7, 1.0))
    await server.ask("DEL", OWNERS)
    for id_, url, tenant in owners:
        await server.ask("XADD", OWNERS, "*", "i", id_, "r", url, "t", tenant, "m", b"x" * 16)
    for message in said:
        await server.ask("PUBLISH", CHANNEL, message)

    async def messages_came() -> bool:
        return await refused(it, "unauthenticated") > before[0] and await refused(it, "replayed") > before[1]

    await eventually(messages_came)  # What is under way when the network is lost never arrives.
    await network.lose()  # Only a new session reads the entries.

    async def entries_were_read() -> bool:
        return await refused(it, "unauthenticated") - before[0] > len(owners)

    await eventually(entries_were_read)


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
            while len(await redis.keys("warmroute:{fleet}:router:*")) < len(it.routers):
                await asyncio.sleep(0.02)


async def put(
    server: StoreServer, network: Network, it: World, state: str, then: dict[bytes, bytes], said: list[bytes]
) -> None:
    """Put the store into the state, and wait until every router has noticed."""
    if state == "killed":
        await server.kill()
    elif state == "frozen":
        server.freeze()
    elif state == "slow":
        network.delay_s = DELAY_S
    elif state == "lying":
        await lie(server, network, it, said)
    else:
        await emptied(server, it, then if state == "old" else {})
    if state in ("killed", "frozen", "slow"):

        async def alone() -> bool:
            return not any(await whole(it))

        await eventually(alone)


@asynccontextmanager
async def recorded(server: StoreServer) -> AsyncIterator[list[bytes]]:
    """Messages of the channel, from now on."""
    said = list[bytes]()
    async with Redis(port=server.port) as redis, redis.pubsub() as channel:
        await channel.subscribe(CHANNEL)

        async def listen() -> None:
            async for each in channel.listen():
                if each["type"] == "message":
                    said.append(each["data"])

        task = asyncio.create_task(listen())
        try:
            yield said
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


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
        said = await stack.enter_async_context(recorded(server)) if state == "lying" else []
        it = await stack.enter_async_context(world(tmp_path, routers=2, started=started, **shared))
        await put(server, network, it, state, then, list(said))
        await it.holds(CELLS[state])
