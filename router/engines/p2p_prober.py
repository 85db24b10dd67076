"""Periodic check that an engine accepts P2P KV transfer at its peer address.

vLLM's P2P tier binds a ZeroMQ socket to an address that discovery or the settings name. An engine that is sent to a
wrong address waits forever. No KV transfer from or to an engine is therefore requested before its address was checked
from here. A server must accept the connection and send a ZeroMQ greeting. It does so without a request (ZMTP 3.1,
"Connection Greeting": 0xFF, eight bytes, 0x7F).

The check does not prove that the engines can reach each other. If a transfer stalls for that reason, the request is
sent again without one (proxy/attempts.py), and the source gets a cooldown.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from urllib.parse import urlsplit

from router.config.schema import P2pSettings
from router.config.url_maps import peer_endpoints
from router.core.types.replicas import Replica

log = logging.getLogger(__name__)

GREETING_BYTES = 10
TIMEOUT_S = 2.0  # maximum time of connection and greeting together


class P2pProber:
    """Calls `prove(replica, address)` with each engine's peer address; "" if it has none, or no longer."""

    def __init__(self, prove: Callable[[str, str], None], settings: P2pSettings) -> None:
        self._prove = prove
        self._port, self._interval_s = settings.port, settings.probe_interval_s
        self._endpoints = peer_endpoints(settings.endpoints)

    def address(self, replica: Replica) -> str:
        """Return `host:port` of the replica's P2P tier, from discovery or the settings; "" if neither names it."""
        if own := self._endpoints.get(replica.id):
            return own
        host, _, port = (self._endpoints.get(replica.url) or replica.peer).rpartition(":")
        if not host and self._port:
            host, port = urlsplit(replica.url).hostname or "", str(self._port)
            host = f"[{host}]" if ":" in host else host
        return f"{host}:{int(port) + (replica.rank or 0)}" if host else ""  # each rank has the next port

    async def watch(self, replica: Replica) -> None:
        """Check the replica until cancelled; return at once if it has no address."""
        address, before = self.address(replica), ""
        while address:
            found = address if await accepts_zmtp(address) else ""
            if found != before:
                fields = {"replica": replica.id, "address": address}
                if found:
                    log.info("replica accepts P2P KV transfers", extra={"event": "peer_up", "fields": fields})
                else:
                    log.warning(
                        "replica accepts no P2P KV transfers: its address does not answer",
                        extra={"event": "peer_down", "fields": fields},
                    )
            self._prove(replica.id, found)
            before = found
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - spread, not secrets


async def accepts_zmtp(address: str) -> bool:
    """True if a server accepts at `host:port` and sends a ZeroMQ greeting."""
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
