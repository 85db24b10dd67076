"""Source of a replica's KV events: converts its own description to addresses to which the router may connect.

vLLM (0.31 and later) lists the source of every data-parallel rank on `/kv_event_sources`, with ports already offset by
the rank (vllm/distributed/kv_events.py). SGLang names the first port on `/server_info`. An engine's page is trusted for
a port but never for a host. The router connects to the replica's own host, so a replica cannot make it connect
elsewhere.

Endpoints in the settings come from the operator and are used unchanged. Endpoints from discovery are trusted too, with
their host. They are those of the server's first rank: engines add the rank to the port, and so does the router.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from router.core.types.replicas import Replica
from router.engines import http_client
from router.engines.kv_events.addresses import endpoint_at

PAGE_BYTES_MAX = 1 << 20
_ANY = {"*", "0.0.0.0", "::", ""}  # noqa: S104 - addresses on engines' pages; the router does not bind them
_ASKED = (404, 405, 501)  # statuses of an engine without such a page


@dataclass(frozen=True, slots=True)
class Source:
    """Addresses of a replica's events.

    - `endpoint`: "" if the engine connects to the router.
    - `replay`: "" if there is no replay.
    - `topic`: None accepts any topic.
    """

    endpoint: str
    replay: str = ""
    topic: str | None = None


@dataclass(frozen=True, slots=True)
class EventsDisabled:
    """The replica publishes no events for the router."""

    why: str


class NoAnswer(Exception):
    """The replica did not answer, so its source is unknown."""


class _Vllm(msgspec.Struct):
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    endpoint: str = ""
    replay_endpoint: str | None = None
    buffer_steps: int | None = None
    topic: str | None = None


class _Sglang(msgspec.Struct):
    publisher: str | None = "zmq"
    endpoint_host: str = "*"
    endpoint_port_base: int = 0
    topic: str | None = None
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    kv_events: _Sglang | None = None


_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError)


class EventSourceResolver:
    """Finds the sources of replicas.

    - `configured`: sources by replica id.
    - `bound_port`: port of the address to which engines connect.
    """

    def __init__(
        self,
        *,
        configured: Mapping[str, Source],
        bound_port: int | None,
        api_key: str,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._configured = configured
        self._bound_port = bound_port
        self._addresses: dict[str, str] = {}  # host -> address of its last answer
        self._session = http_client.session(api_key, timeout_s, tls, self._addresses)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def address(self, host: str) -> str:
        """Return the address of a host's last answer; "" if it was not queried."""
        return self._addresses.get(host, "")

    async def find(self, replica: Replica) -> Source | EventsDisabled:
        """Return the source from the settings, discovery, or the replica itself. Raises NoAnswer if the replica does
        not answer."""
        if replica.id in self._configured:
            return self._configured[replica.id]
        if replica.events:
            return _build_discovered_source(replica)
        status, page = await self._get(f"{replica.url}/kv_event_sources")
        try:
            if status == 200:
                return await self._vllm(replica, page)
            if status not in _ASKED:
                raise NoAnswer(f"/kv_event_sources: status {status}")
            status, page = await self._get(f"{replica.url}/server_info")
            if status == 200:
                return await self._sglang(replica, page)
        except _UNREADABLE as error:
            return EventsDisabled(f"its description of KV events is invalid: {error}")
        if status not in _ASKED:
            raise NoAnswer(f"/server_info: status {status}")
        return EventsDisabled("does not describe its KV events (no /kv_event_sources or /server_info)")

    async def _vllm(self, replica: Replica, page: bytes) -> Source | EventsDisabled:
        listed = msgspec.json.decode(page, type=dict[int, _Vllm])
        if not listed:
            return EventsDisabled("KV events are switched off (--kv-events-config)")
        ranks = sorted(listed)  # a server with only a part of the ranks counts its own from 0
        if replica.rank is None and len(ranks) > 1:
            return EventsDisabled(f"has {len(ranks)} data-parallel ranks with separate caches")
        if (replica.rank or 0) >= len(ranks):
            return EventsDisabled(f"has no event source for rank {replica.rank}")
        said = listed[ranks[replica.rank or 0]]
        if not said.enable_kv_cache_events or said.publisher != "zmq" or not said.endpoint:
            return EventsDisabled("KV events are not published over ZeroMQ (--kv-events-config)")
        endpoint = await self._reachable(said.endpoint, replica)
        if isinstance(endpoint, EventsDisabled):
            return endpoint
        replay = await self._reachable(said.replay_endpoint or "", replica) if said.buffer_steps != 0 else ""
        return Source(endpoint, replay if isinstance(replay, str) else "", said.topic)

    async def _sglang(self, replica: Replica, page: bytes) -> Source | EventsDisabled:
        said = msgspec.json.decode(page, type=_ServerInfo).kv_events
        if said is None or said.publisher != "zmq":
            return EventsDisabled("KV events are switched off, or not on TCP (--kv-events-config)")
        rank = replica.rank or 0
        host = f"[{said.endpoint_host}]" if ":" in said.endpoint_host else said.endpoint_host
        endpoint = await self._reachable(f"tcp://{host}:{said.endpoint_port_base + rank}", replica)
        if isinstance(endpoint, EventsDisabled):
            return endpoint
        if said.replay_endpoint_port_base is None:
            return Source(endpoint, "", said.topic)
        replay = await self._reachable(f"tcp://*:{said.replay_endpoint_port_base + rank}", replica)
        return Source(endpoint, replay if isinstance(replay, str) else "", said.topic)

    async def _reachable(self, said: str, replica: Replica) -> str | EventsDisabled:
        """Return the address for the connection; "" without one, and if the engine connects to the router."""
        host = URL(replica.url).host or ""
        if said.startswith("ipc://"):
            if not said.startswith("ipc:///") or "\0" in said or not _is_loopback(host):
                return EventsDisabled(f"publishes on {said[:200]}, but is not on this machine")
            return said
        if not said:
            return ""
        named, port = _parse_endpoint(said)
        if not port:
            return EventsDisabled(f"publishes on {said[:200]}, which is not a valid address")
        if named not in _ANY and not await _same_host(named, host):
            if self._bound_port is not None:
                return ""
            return EventsDisabled(
                f"connects to, or listens on, {said[:200]}, which is not the replica's host (events.bind)"
            )
        if port == self._bound_port and named not in _ANY:
            return ""  # vLLM connects to an address that names a host
        return endpoint_at(host, port)

    async def _get(self, url: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                page = await http_client.read_body(response, PAGE_BYTES_MAX)
                if len(page) > PAGE_BYTES_MAX:
                    raise NoAnswer(f"{URL(url).path}: page too long")
                return response.status, page
        except TimeoutError as error:
            raise NoAnswer("no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(http_client.describe_error(error)) from error


def _build_discovered_source(replica: Replica) -> Source | EventsDisabled:
    """Return the source of this rank from discovery's endpoints."""
    ends = []
    for first in filter(None, (replica.events, replica.replay)):
        host, port = _parse_endpoint(first)
        port += replica.rank or 0
        if not 0 < port < 1 << 16 or not host:
            return EventsDisabled(f"has no KV events at {first[:200]}, the address from discovery")
        ends.append(endpoint_at(host, port))
    return Source(*ends)


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of a tcp:// address; ("", 0) if it is not one."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 1 << 16:
        return "", 0
    return _plain(host), int(port)


def _plain(host: str) -> str:
    """Return a host without brackets. An IPv4 address in IPv6 form becomes IPv4: vLLM needs `[::ffff:127.0.0.1]` to
    bind."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_plain(host)).is_loopback
    except ValueError:
        return host == "localhost"


async def _same_host(named: str, host: str) -> bool:
    """True if two names are the same host: equal, both loopback, or `host` resolves to `named`."""
    if named == _plain(host) or (_is_loopback(named) and _is_loopback(host)):
        return True
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_plain(str(address[0])) == named for *_, address in found)


def same_peer(peer: str, host: str) -> bool:
    """True if a connection from `peer` can come from `host`. Names are not resolved."""
    try:
        ipaddress.ip_address(_plain(host))
    except ValueError:
        return host != "localhost" or _is_loopback(peer)
    return _plain(peer) == _plain(host) or (_is_loopback(peer) and _is_loopback(host))
