"""How engines hand over what they have prefilled: which legs each replica takes, and a look, every so often, whether it
is asked where it is said to be.

A decoding engine that is sent to a wrong address waits for minutes, so no replica prefills for others before whoever is
to be asked there has answered from here:

- NIXL: nobody is. The prefill leg's answer says where the blocks are. In place of where it is asked a replica is proved
  with the addresses of its pod, where that has several, which that answer may name.
- Mooncake: the bootstrap server of the prefilling engine, whose `/query` tells each rank's engine id (vLLM 0.32,
  mooncake/mooncake_utils.py). The id is another one for each process, and decode legs have to name it.
- Offloading: the p2p tier of the prefilling engine, which greets as ZeroMQ does (peers.py).
- SGLang: the bootstrap server of the prefilling engine, by its `/health` (0.5.23, disaggregation/common/conn.py). Its
  engines prefill or decode, as they were started, so that one whose role nobody tells takes no legs.

Whoever only decodes is not asked for anything, and is proved by its role alone.
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
import msgspec

from router.core.dialects.legs import ENGINE_MARK
from router.core.facts.legs import Handshake, Role
from router.core.facts.replicas import Replica
from router.engines import fetch
from router.engines.peers import listens
from router.settings.pairs import peer_endpoints, same_base
from router.settings.schema import SplitSettings

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # longest time that a bootstrap server's page may take
PAGE_BYTES_MAX = 1 << 20
MISSES = 3  # looks in a row that find nobody before a replica that was there counts as gone
PORTS = {Handshake.MOONCAKE: 8998, Handshake.SGLANG: 8998, Handshake.OFFLOADING: 5710}
"""Where engines are asked unless told otherwise: `VLLM_MOONCAKE_BOOTSTRAP_PORT`, `--disaggregation-bootstrap-port`,
`VLLM_P2P_SIDE_CHANNEL_PORT`."""

Prove = Callable[[str, Handshake | None, str], None]


class _Rank(msgspec.Struct):
    engine_id: str = ""


_decode_ranks = msgspec.json.Decoder(dict[str, _Rank]).decode


class HandProber:
    """Tells `prove(replica, handshake, address)` how each replica shakes hands; None where it does not, or not any
    more."""

    def __init__(self, prove: Prove, settings: SplitSettings, tls: ssl.SSLContext | None = None) -> None:
        """`settings.handshake` is one."""
        self._prove = prove
        self.handshake = Handshake(settings.handshake)
        self._port = settings.port or PORTS.get(self.handshake, 0)
        self._interval_s = settings.probe_interval_s
        self._endpoints = {same_base(id_): where for id_, where in peer_endpoints(settings.endpoints).items()}
        named = ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode))
        self._roles = {same_base(url): role for role, urls in named for url in urls}
        self._session = fetch.session("", TIMEOUT_S, tls)
        self.addresses: dict[str, str] = {}  # addresses of proved replicas; "" for replicas that nobody asks

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def named(self, replica: Replica) -> Replica:
        """The replica with the role that the settings give it, which goes before discovery's word."""
        role = self._roles.get(same_base(replica.id)) or self._roles.get(same_base(replica.url))
        return replica if role is None else replace(replica, role=role)

    def address(self, replica: Replica) -> str:
        """`host:port` at which the replica is to be asked, by the settings or discovery; "" where nobody asks it."""
        if self.handshake is Handshake.NIXL or replica.role is Role.DECODE:
            return ""
        if own := self._endpoints.get(same_base(replica.id)):
            return own
        peer = replica.peer if self.handshake is Handshake.OFFLOADING else ""
        host, _, port = (self._endpoints.get(same_base(replica.url)) or peer).rpartition(":")
        if not host:
            host, port = urlsplit(replica.url).hostname or "", str(self._port)
            host = f"[{host}]" if ":" in host else host
        beyond = (replica.rank or 0) if self.handshake is Handshake.OFFLOADING else 0  # each rank has the next port
        return f"{host}:{int(port) + beyond}"

    async def watch(self, replica: Replica) -> None:
        """Look until cancelled; once where there is nothing to look for."""
        if self.handshake is Handshake.SGLANG and replica.role is Role.BOTH:
            log.warning(
                "replica takes no legs of requests: it is not known whether it prefills or decodes",
                extra={"event": "role_unknown", "fields": {"replica": replica.id}},
            )
            return
        address = self.address(replica)
        before: str | None = None
        missed = 0
        if not address:
            self._say(replica.id, self.handshake, ",".join(replica.hosts) if self.handshake is Handshake.NIXL else "")
        while address:
            found = await self._look(replica, address)
            missed = 0 if found else missed + 1
            if before and 0 < missed < MISSES:
                await asyncio.sleep(self._interval_s / MISSES)
                continue
            if before is None or bool(found) is not bool(before):
                fields = {"replica": replica.id, "address": address}
                if found:
                    log.info("replica prefills for others", extra={"event": "handshake_up", "fields": fields})
                else:
                    text = "replica does not prefill for others: it does not answer where decoding ones ask it"
                    log.warning(text, extra={"event": "handshake_down", "fields": fields})
            self._say(replica.id, self.handshake if found else None, found)
            before = found
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))  # noqa: S311 - spread, not secrets

    def forget(self, replica: str) -> None:
        """The replica left, or is asked elsewhere: it shakes no hands until it is looked at again."""
        self._say(replica, None, "")

    def _say(self, replica: str, handshake: Handshake | None, address: str) -> None:
        if handshake is None:
            self.addresses.pop(replica, None)
        else:
            self.addresses[replica] = address
        self._prove(replica, handshake, address)

    async def _look(self, replica: Replica, address: str) -> str:
        """Where decode legs have to ask the replica; "" where nobody answers."""
        if self.handshake is Handshake.OFFLOADING:
            return address if await listens(address) else ""
        if self.handshake is Handshake.SGLANG:
            return address if await self._page(f"http://{address}/health") is not None else ""
        page = await self._page(f"http://{address}/query")
        try:
            ranks = _decode_ranks(page or b"{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return ""
        rank = ranks.get(str(replica.rank or 0))
        return f"{address}{ENGINE_MARK}{rank.engine_id}" if rank is not None and rank.engine_id else ""

    async def _page(self, url: str) -> bytes | None:
        """A page, or None where there is none."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                page = await fetch.read(response, PAGE_BYTES_MAX)
                return page if response.status == 200 and len(page) <= PAGE_BYTES_MAX else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
