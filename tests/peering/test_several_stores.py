"""Links through stores of several servers: those that Sentinels lead to, and a cluster."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.peering.links import linked
from tests.peering.stores import StoreServer, free_port, replica_of
from tests.support.waiting import until


@pytest.mark.long
async def test_sentinels_lead_to_the_server_that_takes_writes() -> None:
    """`redis+sentinel://`: found through Sentinels, one of which does not answer; and found again when they have chosen
    another server."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(StoreServer())
        second = await stack.enter_async_context(replica_of(first))
        conf = Path(stack.enter_context(TemporaryDirectory())) / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor mymaster 127.0.0.1 {first.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 2000\n"
        )
        sentinel = await stack.enter_async_context(StoreServer(str(conf), "--sentinel"))
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/mymaster"
        a, b = [await stack.enter_async_context(linked(url, name)) for name in "ab"]
        await until(lambda: a.link.routers == 2 and b.link.routers == 2)
        while b"num-slaves\r\n$1\r\n1" not in await sentinel.ask("SENTINEL", "MASTER", "mymaster"):
            await asyncio.sleep(0.1)
        await first.kill()
        await until(lambda: bool(a.link.failures and b.link.failures))
        heard = a.link.counts["heard"]
        await until(lambda: a.link.counts["heard"] > heard + 4 and a.link.connected and a.link.routers == 2)
        assert b"role:master" in await second.ask("INFO", "replication")


async def test_a_cluster_of_three() -> None:
    """`redis+cluster://`: messages pass whichever node one is connected to, and owners are kept on the node of their
    slot; one of the nodes that are named may be gone."""
    async with AsyncExitStack() as stack:
        options = [("--cluster-enabled", "yes", "--cluster-port", str(free_port())) for _ in range(3)]
        nodes = [await stack.enter_async_context(StoreServer(*each)) for each in options]
        edges = (0, 5461, 10923, 16384)
        for n, node in enumerate(nodes):
            await node.ask("CLUSTER", "ADDSLOTSRANGE", str(edges[n]), str(edges[n + 1] - 1))
            await node.ask("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port), options[0][3])
        for node in nodes:
            while b"cluster_state:ok" not in await node.ask("CLUSTER", "INFO"):
                await asyncio.sleep(0.05)
        gone = free_port()
        a = await stack.enter_async_context(linked(f"redis+cluster://127.0.0.1:{gone},127.0.0.1:{nodes[0].port}", "a"))
        b = await stack.enter_async_context(linked(f"redis+cluster://127.0.0.1:{nodes[2].port}", "b"))
        await until(lambda: a.link.routers == 2 and b.link.routers == 2)
        a.link.publish_response_owner("resp_1", "http://r", "acme")
        await until(lambda: b.owners and a.link.counts["written"])
        c = await stack.enter_async_context(linked(f"redis+cluster://127.0.0.1:{nodes[1].port}", "c"))
        await until(lambda: c.owners)
