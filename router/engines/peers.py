"""Where engines take orders of their peers: a look, every so often, whether one listens there.

vLLM's p2p tier binds a ZeroMQ socket to an address that discovery or the settings name, and a consumer that is sent to
a wrong one waits without end. So nothing is pulled from an engine, or by it, before its address was proved from here:
somebody accepts there and greets as ZeroMQ does (ZMTP 3.1, "Connection Greeting": 0xFF, eight bytes, 0x7F), which a
server does without being asked. That the engines can reach each other is not proved by that; a pull that stalls for
want of it is sent again without (edge/attempts.py), and its source rests.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from urllib.parse import urlsplit

from router.core.facts.replicas import Replica
from router.settings.pairs import peer_endpoints
from router.settings.schema import PullSettings

log = logging.getLogger(__name__)

GREETING_BYTES = 10
TIMEOUT_S = 2.0  # the longest that connecting and the greeting may take together


class PeerProber:
    """Tells `prove(replica, address)` where each engine takes orders; "" where it does not, or not any more."""

    def __init__(self, prove: Callable[[str, str], None], settings: PullSettings) -> None:
        self._prove = prove
        self._port, self._interval_s = settings.port, settings.probe_interval_s
        self._endpoints = peer_endpoints(settings.endpoints)

    def address(self, replica: Replica) -> str:
        """`host:port` at which the replica is to take orders, by discovery or the settings; "" where none says so."""
        if own := self._endpoints.get(replica.id):
            return own
        host, _, port = (self._endpoints.get(replica.url) or replica.peer).rpartition(":")
        if not host and self._port:
            host, port = urlsplit(replica.url).hostname or "", str(self._port)
            host = f"[{host}]" if ":" in host else host
        return f"{host}:{int(port) + (replica.rank or 0)}" if host else ""  # each rank has the next port

    async def watch(self, replica: Replica) -> None:
        """Look until cancelled; at once where there is nothing to look for."""
        address, before = self.address(replica), ""
        while address:
            found = address if await listens(address) else ""
            if found != before:
                fields = {"replica": replica.id, "address": address}
                if found:
                    log.info("replica can be pulled from", extra={"event": "peer_up", "fields": fields})
                else:
                    log.warning(
                        "replica cannot be pulled from: nobody takes orders of peers there",
                        extra={"event": "peer_down", "fields": fields},
                    )
            self._prove(replica.id, found)
            before = found
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - spread, not secrets


async def listens(address: str) -> bool:
    """Whether somebody accepts at `host:port` and greets as ZeroMQ does."""
    host, _, port = address.rpartition(":")
    writer = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            greeting = await reader.readexactly(GREETING_BYTES)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, OverflowError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return greeting[0] == 0xFF and greeting[-1] == 0x7F
