"""The Kubernetes API server away, from which the router has its replicas."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from tests.away.cells import Cell
from tests.away.engines import StoringEngine
from tests.away.rig import World, before, eventually
from tests.support.apiserver import ApiServer
from tests.support.podstore import pod
from tests.support.waiting import until

PART = "API server"
CELLS = {
    "killed": Cell("Its listener and all connections are closed."),
    "frozen": Cell("It takes requests and answers none; watches are cut."),
    "slow": Cell("Each answer is 1 s late; watches are cut."),
    "lying": Cell(
        "Its list has pods at a cloud's metadata service and at a multicast address. Watches send invalid events, "
        "and later lists are no JSON."
    ),
    "emptied": Cell(
        "It has no pods.", serves=(), why="It determines the replicas; without a replica the answer is 503."
    ),
    "old": Cell("Its list is yesterday's, with one pod that is gone."),
}
ODD = ("169.254.169.254", "224.0.0.1")
DEAD = "127.0.0.9"  # a pod of its own by its address, at which nobody listens


async def known(it: World) -> list[str]:
    """Replicas that the router has."""
    return [row["id"] for row in json.loads(await it.page("/admin/replicas"))["replicas"]]


async def cut(api: ApiServer, *verbs: str) -> None:
    """Cut the watches, and return when the router has asked for this again."""
    before = Counter(api.asked)
    api.close_watches()
    await until(lambda: all(api.asked[verb] > before[verb] for verb in verbs))


async def comes(api: ApiServer, it: World) -> None:
    """Add a pod that is not there, and return when the router has it, as the last of what is new."""
    api.store.create(pod("gone", ip=DEAD, port=it.engines[0].port))

    async def there() -> bool:
        return any(DEAD in url for url in await known(it))

    await eventually(there)


async def late(_: str, __: web.Request) -> None:
    """Take a second, and answer as ever."""
    await asyncio.sleep(1.0)


async def nonsense(verbs: list[str], verb: str, _: web.Request) -> web.StreamResponse | None:
    """An answer that says nothing in the API's own words."""
    if verb not in verbs:
        return None
    return web.Response(text='{"type": "ADDED", "object": 7}\n[]\n' if verb == "watch" else "<html>")


async def put(api: ApiServer, it: World, state: str) -> None:
    """Put the API server into the state, and wait until the router has noticed."""
    if state == "killed":
        await api.down()

        async def stale() -> bool:
            return not json.loads(await it.page("/admin/replicas"))["discovery"]["kubernetes"]["fresh"]

        await eventually(stale)
    elif state == "frozen":
        api.stalled = True
        await cut(api, "list")
    elif state == "slow":
        api.odd = late
        await cut(api, "watch")
    elif state == "lying":
        for n, ip in enumerate(ODD):
            api.store.create(pod(f"odd-{n}", ip=ip, port=80))
        await comes(api, it)
        assert not any(ip in url for url in await known(it) for ip in ODD)
        for verbs in (["watch"], ["watch", "list"]):
            api.odd = partial(nonsense, verbs)
            await cut(api, *verbs[-1:])
    elif state == "emptied":
        api.store.delete("a")

        async def none() -> bool:
            return not await known(it)

        await eventually(none)
    else:
        await comes(api, it)


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(StoringEngine())  # pods are told apart by their addresses
        api = await stack.enter_async_context(ApiServer())
        api.store.create(pod("a", ip="127.0.0.1", port=engine.port))
        settings = {
            "discovery__source": "kubernetes",
            "discovery__selector": "app=vllm",
            "discovery__loopback": "true",
            "discovery__kubeconfig": str(api.kubeconfig(tmp_path)),
        }
        it = await stack.enter_async_context(before(tmp_path, [engine], named=False, **settings))
        await put(api, it, state)
        await it.holds(CELLS[state])
