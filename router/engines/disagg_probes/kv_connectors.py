"""KV connector of each replica for disaggregated prefill, with periodic checks of the address that decoding engines
use.

A decoding engine waits for minutes if it gets a wrong address. No replica therefore prefills for others before the
server that the decoding engine will contact has answered a check from the router:

- NIXL: there is no such server. The answer of the prefill stage names the address of the blocks. Instead of a checked
  address, a replica gets the addresses of its pod if that has several, because the answer can name any of them.
- Mooncake: the bootstrap server of the prefilling engine. Its `/query` returns each rank's engine id (vLLM 0.32,
  mooncake/mooncake_utils.py). The id is different for each process, and decode stages must name it.
- Offloading: the P2P tier of the prefilling engine, which sends a ZeroMQ greeting (p2p_prober.py).
- SGLang: the bootstrap server of the prefilling engine, by its `/health` (0.5.23, disaggregation/common/conn.py). Its
  engines are started either to prefill or to decode, so an engine without a known role takes no stage.

An engine that only decodes is contacted by no other engine. Its role alone is sufficient.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp

from router.config.schema import DisaggSettings
from router.config.url_maps import peer_endpoints, same_base
from router.core.disagg.bodies import proven_address
from router.core.types.disagg_types import KvConnector, Probe, Role
from router.core.types.replicas import Replica
from router.engines import http_client
from router.engines.p2p_prober import accepts_zmtp

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # maximum time for a page of a bootstrap server
PAGE_BYTES_MAX = 1 << 20
MISSES = 3  # consecutive failed checks before a replica that answered counts as gone

ReportConnector = Callable[[str, KvConnector | None, str], None]


class KvConnectorProber:
    """Calls `prove(replica, connector, address)` with each replica's KV connector; None if it has none, or no
    longer."""

    def __init__(self, prove: ReportConnector, settings: DisaggSettings, tls: ssl.SSLContext | None = None) -> None:
        """`settings.kv_connector` must name a connector."""
        self._prove = prove
        self.connector = KvConnector(settings.kv_connector)
        self._traits = self.connector.traits
        self._port = settings.port or self._traits.port
        self._interval_s = settings.probe_interval_s
        self._endpoints = {same_base(id_): where for id_, where in peer_endpoints(settings.endpoints).items()}
        named = ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode))
        self._roles = {same_base(url): role for role, urls in named for url in urls}
        self._session = http_client.session("", TIMEOUT_S, tls)
        self.addresses: dict[str, str] = {}  # addresses of proved replicas; "" for replicas that no engine contacts

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def with_configured_role(self, replica: Replica) -> Replica:
        """Return the replica with its role from the settings, which have priority over discovery."""
        role = self._roles.get(same_base(replica.id)) or self._roles.get(same_base(replica.url))
        return replica if role is None else replace(replica, role=role)

    def address(self, replica: Replica) -> str:
        """Return `host:port` of the replica's server, from the settings or discovery; "" if no engine contacts it."""
        if self._traits.probe is Probe.NONE or replica.role is Role.DECODE:
            return ""
        if own := self._endpoints.get(same_base(replica.id)):
            return own
        peer = replica.peer if self._traits.has_p2p_server else ""
        host, _, port = (self._endpoints.get(same_base(replica.url)) or peer).rpartition(":")
        if not host:
            host, port = urlsplit(replica.url).hostname or "", str(self._port)
            host = f"[{host}]" if ":" in host else host
        beyond = (replica.rank or 0) if self._traits.has_p2p_server else 0
        return f"{host}:{int(port) + beyond}"

    async def watch(self, replica: Replica) -> None:
        """Check the replica until cancelled; return at once if no check is necessary."""
        if self._traits.single_stage_engines and replica.role is Role.BOTH:
            log.warning(
                "replica gets no disaggregated requests: its role (prefill or decode) is unknown",
                extra={"event": "role_unknown", "fields": {"replica": replica.id}},
            )
            return
        address = self.address(replica)
        before: str | None = None
        missed = 0
        if not address:
            self._say(replica.id, self.connector, ",".join(replica.hosts) if self._traits.probe is Probe.NONE else "")
        while address:
            found = await self._probe(replica, address)
            missed = 0 if found else missed + 1
            if before and 0 < missed < MISSES:
                await asyncio.sleep(self._interval_s / MISSES)
                continue
            if before is None or bool(found) is not bool(before):
                fields = {"replica": replica.id, "address": address}
                if found:
                    text = "replica prefills for decode replicas"
                    log.info(text, extra={"event": "kv_connector_up", "fields": fields})
                else:
                    text = "replica does not prefill for decode replicas: its transfer address does not answer"
                    log.warning(text, extra={"event": "kv_connector_down", "fields": fields})
            self._say(replica.id, self.connector if found else None, found)
            before = found
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - spread, not secrets

    def forget(self, replica: str) -> None:
        """Remove a replica that left or changed its address. It has no connector until the next check."""
        self._say(replica, None, "")

    def _say(self, replica: str, connector: KvConnector | None, address: str) -> None:
        if connector is None:
            self.addresses.pop(replica, None)
        else:
            self.addresses[replica] = address
        self._prove(replica, connector, address)

    async def _probe(self, replica: Replica, address: str) -> str:
        """Return the address for decode stages; "" if no server answers."""
        if self._traits.probe is Probe.ZMTP:
            page = b"" if await accepts_zmtp(address) else None
        else:
            page = await self._page(f"http://{address}{self._traits.probe_path}")
        return "" if page is None else proven_address(self.connector, page, address, replica.rank)

    async def _page(self, url: str) -> bytes | None:
        """Return a page, or None if it cannot be read."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                page = await http_client.read_body(response, PAGE_BYTES_MAX)
                return page if response.status == 200 and len(page) <= PAGE_BYTES_MAX else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
