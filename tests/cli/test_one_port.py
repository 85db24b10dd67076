"""Several routers on one port of a machine, as processes: `listen.reuse_port`."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.peering.stores import StoreServer
from tests.support.command import Command, Traffic, command, json_of, metric
from tests.support.fakes import FakeEngine, status

RESPONSES = "/v1/responses"
RESET_MAX = 2  # connections that the kernel accepts between the last accept of a router that ends and its close
CLIENTS = 4  # of Traffic: each may have a request in flight at a router that is killed

pytestmark = [
    pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no system without SO_REUSEPORT can do that"),
    pytest.mark.promise("Several routers on one port serve as one, and each may end or be killed.", "store"),
]


@asynccontextmanager
async def on_one_port(number: int, *engines: FakeEngine, **more: str) -> AsyncIterator[list[Command]]:
    """So many routers, all of which listen on one port and know each other."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(StoreServer())
        given = {"listen__reuse_port": "true", "peering__redis_url": store.url, **more}
        routers = [await stack.enter_async_context(command(*engines, **given))]
        given["listen__port"] = routers[0].url.rpartition(":")[2]
        for _ in range(number - 1):
            routers.append(await stack.enter_async_context(command(*engines, **given)))
        assert {router.url for router in routers} == {routers[0].url}
        assert len({router.admin_url for router in routers}) == number
        async with asyncio.timeout(60):
            for router in routers:
                while len((await json_of(f"{router.admin_url}/admin/replicas"))["sharing"]["routers"]) < number - 1:
                    await asyncio.sleep(0.05)
        yield routers


async def asked(url: str, engines: tuple[FakeEngine, ...], **body: Any) -> FakeEngine:
    """The engine that answered a request on a connection of its own."""
    for each in engines:
        each.seen.clear()
    async with aiohttp.ClientSession() as client:
        async with client.post(url + RESPONSES, json={"model": "m", "input": "x", **body}) as response:
            assert response.status == 200
    (found,) = [each for each in engines if each.seen]
    return found


async def test_both_routers_know_a_stored_response(engine: FakeEngine, other: FakeEngine) -> None:
    """Whichever router accepts a connection sends a request to the replica that has the response before it."""
    engines = engine, other
    async with on_one_port(2, *engines) as routers:
        for each in engines:
            each.script.append(status(200, '{"id": "resp_1", "object": "response"}'))
        maker = await asked(routers[0].url, engines)
        for each in engines:
            each.script.clear()
        requests = 1
        async with asyncio.timeout(60):
            while not all([await metric(router, "warmroute_requests_total") >= 2 for router in routers]):
                assert await asked(routers[0].url, engines, previous_response_id="resp_1") is maker
                requests += 1
        assert sum([await metric(router, "warmroute_requests_total") for router in routers]) == requests


@pytest.mark.long
async def test_routers_end_and_others_go_on(engine: FakeEngine) -> None:
    """Under traffic one of three gets SIGTERM and one is killed: no client is refused, and what breaks was at them."""
    async with on_one_port(3, engine, listen__lame_duck_s="0.2") as routers:
        traffic = Traffic(routers[0].url)
        async with traffic.going():
            await traffic.more(30)
            routers[0].process.send_signal(signal.SIGTERM)
            assert await routers[0].process.wait() == 0
            await traffic.more(30)
            assert len(traffic.broken) <= RESET_MAX
            await routers[1].kill()
            await traffic.more(30)
        assert len(traffic.broken) <= RESET_MAX + CLIENTS
        assert await metric(routers[2], "warmroute_requests_total") >= 30


async def test_a_router_without_the_setting_ends(engine: FakeEngine) -> None:
    """A second router that was started by mistake does not take part of the traffic."""
    async with command(engine, listen__reuse_port="true") as router:
        with pytest.raises(AssertionError, match="the address is in use"):
            async with command(engine, listen__port=router.url.rpartition(":")[2]):
                pass
