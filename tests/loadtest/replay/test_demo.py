"""The end of the demo: a router that can be looked at."""

from __future__ import annotations

import argparse
import asyncio
import io
import re

from aiohttp import ClientSession
from rich.console import Console

from loadtest.replay.demo import stay


async def test_it_ends_with_a_page_that_moves(client: ClientSession) -> None:
    """The last line is the page's address, requests go on, and ending it leaves nothing that listens."""
    said = io.StringIO()
    ports = argparse.Namespace(port=0, admin_port=0)
    staying = asyncio.create_task(stay(ports, Console(file=said, width=200)))
    try:
        async with asyncio.timeout(60):
            while "/dashboard" not in said.getvalue():
                assert not staying.done()
                await asyncio.sleep(0.02)
            last = said.getvalue().strip().splitlines()[-1]
            (page,) = re.findall(r"^Dashboard: (http://127\.0\.0\.1:\d+)/dashboard, with wall time: ", last)
            assert last.endswith("a second there is 5 simulated seconds of the table")
            async with client.get(page + "/dashboard") as response:
                assert response.status == 200
            requests = 0
            while requests < 3:
                async with client.get(page + "/admin/observatory") as response:
                    requests = (await response.json())["totals"]["requests"]
                await asyncio.sleep(0.02)
    finally:
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)
    assert said.getvalue().rstrip().endswith("stopping")
