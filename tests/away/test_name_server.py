"""The name server away, from which the router has its replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.away.cells import Cell
from tests.away.engines import StoringEngine
from tests.away.resolving import NAME, PORT, NameServer
from tests.away.rig import World, before, eventually
from tests.support.waiting import until

PART = "Name server"
CELLS = {
    "killed": Cell("Its port is closed."),
    "frozen": Cell("It answers no query."),
    "slow": Cell("Each answer is 1 s late."),
    "lying": Cell("It returns the address of a cloud's metadata service, and a multicast one."),
    "emptied": Cell("It returns no addresses for the name."),
    "old": Cell(
        "It returns yesterday's address, without a listener.",
        serves=(),
        why="It determines the replicas; if no replica answers, a request gets 502 or 503.",
    ),
}
ODD, DEAD = ["169.254.169.254", "224.0.0.1"], "127.0.0.9"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[NameServer, int, asyncio.DatagramTransport]]:
    """A name server, its port, and its socket."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    server.transport = transport
    try:
        yield server, transport.get_extra_info("sockname")[1], transport
    finally:
        transport.close()


async def put(server: NameServer, socket: asyncio.DatagramTransport, it: World, state: str) -> None:
    """Put the name server into the state, and wait until the router has noticed."""

    async def page() -> tuple[bool, list[str]]:
        said = json.loads(await it.page("/admin/replicas"))
        return said["discovery"]["dns"]["fresh"], [row["id"] for row in said["replicas"]]

    async def stale() -> bool:
        return not (await page())[0]

    async def moved() -> bool:
        return any(DEAD in url for url in (await page())[1])

    if state == "slow":
        server.delay_s = 1.0
        enough = server.answered + 2
        await until(lambda: server.answered >= enough)
    elif state == "frozen":
        server.mute = True
        enough = server.asked + 1
        await until(lambda: server.asked >= enough)
    elif state == "old":
        server.addresses = [DEAD]
        await eventually(moved)
    else:
        if state == "killed":
            socket.close()
        server.addresses = ODD if state == "lying" else []
        await eventually(stale)


@pytest.mark.promise("An unavailable component opens only access in reference/unavailable-components.md.", "faults")
@pytest.mark.long
@pytest.mark.parametrize("state", CELLS)
async def test_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """What is open, and what is served, is what the cell says."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(StoringEngine())  # all addresses of a name have one port
        server, port, socket = await stack.enter_async_context(serving())
        server.addresses = ["127.0.0.1"]
        monkeypatch.setenv(PORT, str(port))
        settings = {
            "discovery__source": "dns",
            "discovery__dns_name": NAME,
            "discovery__dns_interval_s": "0.1",
            "discovery__port": str(engine.port),
            "discovery__loopback": "true",
        }
        module = "tests.away.resolving"
        it = await stack.enter_async_context(before(tmp_path, [engine], named=False, module=module, **settings))
        await put(server, socket, it, state)
        await it.holds(CELLS[state])
