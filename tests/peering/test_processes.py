"""Routers as processes that share a store: several workers, a picker, and one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.extproc.asking import picking
from tests.multiprocess.test_processes import HUB, Command, command
from tests.peering.routers import routers_of, whole
from tests.peering.stores import StoreServer
from tests.support.fakes import FakeEngine, running, status
from tests.support.waiting import until

RESPONSES = "/v1/responses"


async def sharing_of(client: ClientSession, admin_url: str) -> dict[str, Any]:
    """What a router's page says of its link."""
    async with client.get(f"{admin_url}/admin/replicas") as response:
        said: dict[str, Any] = (await response.json())["sharing"]
        return said


@pytest.mark.long
async def test_workers_share_through_their_hub(client: ClientSession, engine: FakeEngine, other: FakeEngine) -> None:
    """A router of several workers and one of a single process know each other's stored responses; a hub that is killed
    is back with all of them, since the store has kept them."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        many = await stack.enter_async_context(command(engine, other, peering__redis_url=server.url))
        one = await stack.enter_async_context(running(engine, other, peering__redis_url=server.url))
        await until(lambda: routers_of(one) == 2)

        async def asked(url: str, **body: Any) -> FakeEngine:
            """The engine that answered."""
            for each in (engine, other):
                each.seen.clear()
            async with client.post(url + RESPONSES, json={"model": "m", "input": "x", **body}) as response:
                assert response.status == 200
            (found,) = [each for each in (engine, other) if each.seen]
            return found

        async def made(url: str, id_: str) -> FakeEngine:
            for each in (engine, other):
                each.script.append(status(200, f'{{"id": "{id_}", "object": "response"}}'))
            found = await asked(url)
            for each in (engine, other):
                each.script.clear()
            return found

        async def found(url: str) -> None:
            """Both responses are known there, whichever worker is asked."""
            for id_, replica in at.items():
                async with asyncio.timeout(60):
                    in_a_row = 0
                    while in_a_row < 6:
                        in_a_row = in_a_row + 1 if await asked(url, previous_response_id=id_) is replica else 0

        at = {"resp_m": await made(many.url, "resp_m"), "resp_o": await made(one.url, "resp_o")}
        for url in (one.url, many.url):
            await found(url)
        assert one.hub.link is not None
        await until(lambda: one.hub.link and one.hub.link.link.counts["written"])
        os.kill(many.pids(HUB)[-1], signal.SIGKILL)
        await until(lambda: len(many.pids(HUB)) == 2)
        async with asyncio.timeout(60):
            while not (said := await _page(client, many)) or not said["whole"] or not said["routers"]:
                await asyncio.sleep(0.05)
        await found(many.url)


async def _page(client: ClientSession, router: Command) -> dict[str, Any] | None:
    """The same of a router whose hub may be about to start."""
    try:
        return await sharing_of(client, router.admin_url)
    except Exception:  # whatever a listener says that has just lost its process
        return None


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_sighup_moves_a_router_to_another_store(
    workers: int, tmp_path: Path, client: ClientSession, engine: FakeEngine
) -> None:
    """`kill -HUP` with another store in the URL's file: the command is there at once, with and without a hub of its
    own."""
    file = tmp_path / "url"
    async with StoreServer() as old, StoreServer() as new, running(engine, peering__redis_url=new.url) as app:
        file.write_text(old.url)
        quiet = {"listen__file_watch_interval_s": "0", "peering__redis_url_file": str(file)}
        async with command(engine, workers=workers, **quiet) as router:
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
    """Both faces share: each hears the other."""
    async with StoreServer() as server, running(engine, peering__redis_url=server.url) as edge:
        async with picking(engine, peering__redis_url=server.url) as picker:
            await until(lambda: all(routers_of(app) == 2 and whole(app) for app in (edge, picker)))


@pytest.mark.long
async def test_a_router_that_is_killed_is_forgotten_and_comes_back(client: ClientSession, engine: FakeEngine) -> None:
    """`kill -9`: the others have forgotten it within a second or so and serve on; started again it hears them."""
    async with StoreServer() as server, running(engine, peering__redis_url=server.url) as app:
        for _ in range(2):
            async with command(engine, workers=1, peering__redis_url=server.url) as router:
                await until(lambda: routers_of(app) == 2)
                async with asyncio.timeout(60):
                    while not (await sharing_of(client, router.admin_url))["whole"]:
                        await asyncio.sleep(0.05)
                router.process.kill()
                await until(lambda: routers_of(app) == 1 and whole(app))
