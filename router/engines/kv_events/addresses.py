"""Addresses of the name in an endpoint, tried one after the other.

libzmq takes one address of a name (if IPv6 is allowed, an IPv6 address if there is one) and never tries another
(zeromq/libzmq#4313). A name in a dual-stack cluster has addresses of both kinds, and vLLM's `tcp://*:5557` listens on
IPv4 only. Names are therefore resolved here, again after all addresses were tried, and each connection takes the next
address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable

RESOLVE_S = 5.0  # maximum wait for a resolver
ADDRESSES_MAX = 16  # maximum number of addresses of a name that are tried


class Addresses:
    """Addresses for an `endpoint`. `likely` returns the address that other connections to its host used last, "" if
    unknown. It is tried first, if the name still has it."""

    def __init__(self, endpoint: str, likely: Callable[[str], str] = lambda host: "") -> None:
        self.endpoint = endpoint
        self.host, self._port = _parse_named_endpoint(endpoint)
        self._likely = likely
        self._left: list[str] = []  # addresses not tried yet
        self._last = ""
        self._worked = ""  # address of the last connection that was established
        self._works = True  # False: the last returned address has not worked yet

    async def next(self, sure: str = "") -> str:
        """Return the endpoint for the next connection, with an address instead of a name.

        It is the endpoint itself if that has no name, or if the name cannot be resolved. `sure` is a current address of
        the host. Unless it has just failed, it is returned and no name is resolved.
        """
        if not self.host:
            return self.endpoint
        if sure and self._works:
            self._left, self._last = [], sure
        else:
            if not self._left:
                self._left = await self._resolve_host()
            self._last = self._left.pop(0) if self._left else ""
        self._works = False
        return endpoint_at(self._last or self.host, self._port)

    @property
    def address(self) -> str:
        """Address of the established connection; "" without one, or if the address is unknown."""
        return self._last if self._works else ""

    def works(self) -> None:
        """Record that a connection to the last returned address was established. The next connection tries it first."""
        self._works, self._worked, self._left = True, self._last, []

    async def _resolve_host(self) -> list[str]:
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError, TimeoutError):
            return []
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        first = [each for each in (self._worked, self._likely(self.host)) if each in addresses]
        return list(dict.fromkeys(first + addresses))[:ADDRESSES_MAX]


def endpoint_at(host: str, port: int) -> str:
    """Return the TCP endpoint of an address or a name."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _parse_named_endpoint(endpoint: str) -> tuple[str, int]:
    """Return (name, port) of a TCP endpoint; ("", 0) if it has an address, or is of another kind."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or set(host) & set("[];*"):
        return "", 0
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, int(port)
    return "", 0
