"""Permitted addresses of replicas that are found or added at run time: addresses and networks, never names.

Adding a replica makes the router connect to it, from the router's own network. So only unambiguous URLs are accepted:
`http://ADDRESS:PORT`, with the address in the form that `ipaddress` prints. Names are refused, because they may resolve
to another address the next time. User names, paths and fragments are refused too, as are other spellings of an address
(decimal, octal, hexadecimal, IPv4 in IPv6). Addresses of clouds' metadata services, which give out a machine's own
credentials, are always refused.

The same addresses are refused if discovery finds them, in DNS or in a pod's status. This machine's own addresses are
refused there too, unless the settings allow them. Authors of DNS records or of a pod's status are trusted to name
replicas, and for no other purpose.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_URL = re.compile(r"(https?)://(?:([0-9.]{7,15})|\[([0-9a-f:]{2,39})\]):([0-9]{1,5})")
_ALLOWED = re.compile(
    r"(https?)://(?:([0-9.]{7,15}(?:/[0-9]{1,2})?)|\[([0-9a-f:]{2,39}(?:/[0-9]{1,3})?)\]):([0-9]{1,5})"
)
_METADATA = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"))
)


class NotAllowed(ValueError):
    """Raised if a replica may not have this URL, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class AllowedNetwork:
    """Addresses of one network, on one port."""

    scheme: str
    network: Network
    port: int


def parse_networks(given: Iterable[str]) -> list[AllowedNetwork]:
    """Parse `http://10.0.0.0/8:8000` or `https://[fd00::/8]:443`. Raises ValueError."""
    return [_parse_network(each) for each in given]


def _parse_network(given: str) -> AllowedNetwork:
    found = _ALLOWED.fullmatch(given)
    if found is None or not 0 < int(found[4]) < 1 << 16:
        raise ValueError(f"'{given}' must have the form http://10.0.0.0/8:8000 or http://[fd00::/8]:8000")
    network = ipaddress.ip_network(found[2] or found[3])
    return AllowedNetwork(found[1], network, int(found[4]))


def allowed_problems(given: Iterable[str]) -> list[str]:
    """Return the problems of the setting `admin.replicas_allowed`."""
    problems = []
    for each in given:
        try:
            _parse_network(each)
        except ValueError as error:
            problems.append(f"'admin.replicas_allowed': {error}")
    return problems


def check_replica_url(url: str, within: Iterable[AllowedNetwork]) -> str:
    """Check the URL of a replica, and return it. Raises NotAllowed."""
    found = _URL.fullmatch(url)
    if found is None:
        raise NotAllowed("the URL of a replica must be http://ADDRESS:PORT, with an IP address and no path")
    scheme, port = found[1], int(found[4])
    try:
        address = ipaddress.ip_address(found[2] or found[3])
    except ValueError as error:
        raise NotAllowed("the host is not an IP address") from error
    if str(address) != (found[2] or found[3]) or str(port) != found[4]:
        raise NotAllowed("the address must be in its shortest form, and the port without leading zeros")
    if _never(address):
        raise NotAllowed("the address cannot belong to a replica")
    if not any(_within(address, scheme, port, each) for each in within):
        raise NotAllowed("the address is not within admin.replicas_allowed")
    return url


def is_public(address: str, *, loopback: bool) -> bool:
    """True if discovery may use this text as a replica's address. An address of this machine's own is accepted with
    `loopback` only."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not _never(parsed) and (loopback or not parsed.is_loopback)


def _within(address: Address, scheme: str, port: int, allowed: AllowedNetwork) -> bool:
    # false if IP versions differ
    return (scheme, port) == (allowed.scheme, allowed.port) and address in allowed.network


def _never(address: Address) -> bool:
    """True if an address is never allowed: link-local (169.254.169.254 is), no host's, or IPv4 written as IPv6."""
    mapped = isinstance(address, ipaddress.IPv6Address) and (
        address.ipv4_mapped is not None or address.sixtofour is not None or address.teredo is not None
    )
    mapped = mapped or any(address in network for network in _TRANSLATED)  # only IPv6 has these
    odd = address.is_link_local or address.is_multicast or address.is_unspecified or address == _BROADCAST
    return bool(mapped or odd or address in _METADATA)


# IPv4 addresses written as IPv6 by NAT64 (RFC 6052, RFC 8215) or an old stack (RFC 4291 section 2.5.5.1). ::1 is in the
# old range, but is not such an address.
_TRANSLATED = (
    *map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48")),
    *ipaddress.IPv6Network("::/96").address_exclude(ipaddress.IPv6Network("::1/128")),
)
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def is_loopback(host: str) -> bool:
    """True if a listener on this address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(host: str) -> bool:
    """True if a host is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
