"""With workers the hub's process serves the admin pages, with the same server and the same limits."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.multiprocess.test_processes import command, metric
from tests.support.fakes import FakeEngine

HALF_OPEN = b"GET /metrics HTTP/1.1\r\nHost: local"


@pytest.mark.promise("The admin listener limits its own connections, in all and per address.", "admin")
@pytest.mark.long
@pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.1 alone is loopback there")
async def test_the_hub_ends_whoever_keeps_it_waiting(engine: FakeEngine) -> None:
    """Of six half-open heads from one address, which may have four connections, two are closed at once and four with a
    408; workers do not notice, and the hub's metrics say it to another address."""
    limits = {"admin__connections_per_client_max": "4", "listen__head_timeout_s": "1"}
    async with command(engine, **limits) as router:
        port = int(router.admin_url.rpartition(":")[2])

        async def said() -> bytes:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            except ConnectionResetError:  # closed before the loop saw that it was connected
                return b""
            try:
                writer.write(HALF_OPEN)
                return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(said() for _ in range(6)))
        assert sorted(answer[:12] for answer in answers) == [b"", b"", *[b"HTTP/1.1 408"] * 4]
        assert await metric(router, "warmroute_admin_connections_closed_total") == 6
        assert await metric(router, "warmroute_connections_closed_total") == 0
