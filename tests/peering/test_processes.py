"""Routers as processes that share a store: a picker, and one that is killed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.extproc.asking import picking
from tests.peering.routers import routers_of, whole
from tests.peering.stores import StoreServer
from tests.support.command import command
from tests.support.fakes import FakeEngine, running
from tests.support.waiting import until

RESPONSES = "/v1/responses"


async def sharing_of(client: ClientSession, admin_url: str) -> dict[str, Any]:
    """What a router's page says of its link."""
    async with client.get(f"{admin_url}/admin/replicas") as response:
        said: dict[str, Any] = (await response.json())["sharing"]
        return said


async def test_sighup_moves_a_router_to_another_store(
    tmp_path: Path, client: ClientSession, engine: FakeEngine
) -> None:
    """`kill -HUP` with another store in the URL's file: the command is there at once."""
    file = tmp_path / "url"
    async with StoreServer() as old, StoreServer() as new, running(engine, peering__redis_url=new.url) as app:
        file.write_text(old.url)
        quiet = {"listen__file_watch_interval_s": "0", "peering__redis_url_file": str(file)}
        async with command(engine, **quiet) as router:
            async with asyncio.timeout(60):
                while not (await sharing_of(client, router.admin_url))["whole"]:
                    await asyncio.sleep(0.05)
            assert routers_of(app) == 1
            file.write_text(new.url)
            router.process.send_signal(signal.SIGHUP)
            await until(lambda: routers_of(app) == 2)
            async with asyncio.timeout(60):
                while not (await sharing_of(client, router.admin_url))["routers"]:
                    await asyncio.sleep(0.05)


async def test_a_picker_shares_with_an_edge(engine: FakeEngine) -> None:
    """Both frontends share: each receives from the other."""
    async with StoreServer() as server, running(engine, peering__redis_url=server.url) as http:
        async with picking(engine, peering__redis_url=server.url) as picker:
            await until(lambda: all(routers_of(app) == 2 and whole(app) for app in (http, picker)))


@pytest.mark.long
async def test_a_router_that_is_killed_is_forgotten_and_comes_back(client: ClientSession, engine: FakeEngine) -> None:
    """`kill -9`: the others have forgotten it within a second or so and serve on; started again it hears them."""
    async with StoreServer() as server, running(engine, peering__redis_url=server.url) as app:
        for _ in range(2):
            async with command(engine, peering__redis_url=server.url) as router:
                await until(lambda: routers_of(app) == 2)
                async with asyncio.timeout(60):
                    while not (await sharing_of(client, router.admin_url))["whole"]:
                        await asyncio.sleep(0.05)
                router.process.kill()
                await until(lambda: routers_of(app) == 1 and whole(app))
