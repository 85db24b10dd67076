"""Check that the hosts in a prefilling engine's answer are its own.

The decode stage repeats the answer of NIXL's prefill stage, and its engine connects to the hosts in that answer. A
faulty or hostile engine could so make another one connect to any host. So each host must be the prefilling replica's:
the host of its URL, the address that the answer came from, an address of its pod, or one of the setting `disagg.hosts`.

Connectors name hosts in fields of many names (vLLM 0.32: `remote_host`, Mooncake's `remote_bootstrap_addr`, LMCache's
`receiver_host`, SGLang's `bootstrap_host`), also at deeper levels, and more connectors exist than are known here. So a
field counts by its name or by its text. Every text under a name with one of HOST_WORDS is a host. Any other text that
is written as an address is a host too, except for ids. A number can be an address as well, so a number under a name
that ends with such a word is refused. A port alone leads to no other host. If a name occurs twice, only the last one
counts and is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from router.core.prompts.json_fields import UNREADABLE
from router.core.types.replicas import Replica

TEXTS_MAX = 4_096  # texts, lists with texts and objects of one answer
DEPTH_MAX = 8  # levels of lists and objects
TEXT_CHARS_MAX = 512  # characters of a text that may be an address
NAME_CHARS_MAX = 256  # characters of a name that are looked at, the last ones
# A name is a host's if it contains one of these, or has one of IP_WORDS as a word.
HOST_WORDS = ("host", "addr", "url", "uri", "endpoint", "server", "peer", "socket", "dest", "target", "dns", "fqdn")
IP_WORDS = frozenset(("ip", "ips", "ipv"))
_NO_WORD = re.compile(r"[^a-z]")
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+]{0,15}://)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?/?")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63}){0,126}\.?")
_EMPTY = re.compile(rb"null|true|false|[\[\]{}\s]+")
_DOTTED = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+\.?")

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class OwnHosts:
    """Names, addresses and networks. `listed` are those of the setting, `host or CIDR` each."""

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for each in listed:
            try:
                self._networks.append(ip_network(each, strict=False))
            except ValueError:
                self._names.add(_plain(each))

    def has(self, host: str, own: Iterable[str]) -> bool:
        """True if a host is listed or one of these."""
        address = _address(host)
        if address is None:
            return _plain(host) in self._names or any(_plain(host) == _plain(each) for each in own)
        if any(address == _address(each) for each in own):
            return True
        return any(address in network for network in self._networks if network.version == address.version)


def hosts_of(replica: str, address: str, peer: str) -> list[str]:
    """Return the hosts that are a replica's own: that of its URL, `peer` from which its answer came, and those of its
    pod. The latter are its `address` (PrefillStage.address) if that has no port."""
    every = urlsplit(Replica(replica).url).hostname or "", *address.split(","), peer
    return [each for each in every if each]


class ForeignHost(Exception):
    """An answer names a host that is not its replica's own, or cannot be read."""


def check_transfer_params(params: bytes, own: Iterable[str], listed: OwnHosts) -> bytes:
    """Return the part of a prefill stage's answer that the decode stage repeats: the same fields and values. Raises
    ForeignHost."""
    try:
        return msgspec.json.encode(_Look(tuple(own), listed).read(Raw(params), 0))
    except UNREADABLE:
        raise ForeignHost("cannot be parsed") from None


def host_problem(listed: str) -> bool:
    """True if an entry of the setting is neither a host nor a CIDR."""
    try:
        ip_network(listed, strict=False)
    except ValueError:
        return _NAME.fullmatch(listed) is None or not any(map(str.isalpha, listed))
    return False


class _Look:
    """One pass through an answer. Its cost is bounded by the number of texts."""

    def __init__(self, own: tuple[str, ...], listed: OwnHosts) -> None:
        self._own, self._listed = own, listed
        self._left = TEXTS_MAX

    def read(self, raw: Raw, depth: int) -> dict[str, object]:
        return {name: self._value(each, name, depth) for name, each in _decode_object(raw).items()}

    def _value(self, raw: Raw, name: str, depth: int, *, kept: bool | None = None) -> object:
        """Check a value under this name. With `kept`, its texts are hosts in any case, because the name of an enclosing
        field is a host's."""
        first = bytes(memoryview(raw)[:1])
        words = _NO_WORD.split(name[-NAME_CHARS_MAX:].lower())
        host = bool(kept) or _is_host(words)
        if first not in b'"[{' or (first != b'"' and b'"' not in bytes(raw)):  # numbers, true, false and null
            last = [word for word in words if word][-1:]
            if _is_host(last) and "port" not in last[0] and not _EMPTY.fullmatch(raw):
                raise ForeignHost(f"{name[:100]} is not a string")
            return raw
        self._left -= 1
        if self._left < 0 or depth > DEPTH_MAX:
            raise ForeignHost("too many values")
        if first == b'"':
            named_id = words[-1] in ("id", "ids") or name.endswith(("Id", "Ids", "ID"))
            self._text(_decode_text(raw), name[:100], host=host, may_be=not named_id)
            return raw
        if first == b"[":
            return [self._value(each, name, depth + 1, kept=host) for each in _decode_list(raw)]
        inner = _decode_object(raw)
        return {key: self._value(each, key, depth + 1, kept=host) for key, each in inner.items()}

    def _text(self, text: str, name: str, *, host: bool, may_be: bool) -> None:
        if not host and not (may_be and _is_written_as_address(text)):
            return
        if len(text) > TEXT_CHARS_MAX:
            raise ForeignHost(f"{name} is {text[:100]!r}")
        for each in text.split(","):
            found = _ADDRESS.fullmatch(each.strip())
            bare = _address(each.strip())
            if bare is None and found is None:
                raise ForeignHost(f"{name} is {text[:100]!r}")
            there = found[1].strip("[]") if bare is None and found is not None else each.strip()
            if not self._listed.has(there, self._own):
                raise ForeignHost(f"{name} is {text[:100]!r}")


def _is_host(words: list[str]) -> bool:
    return any(word in IP_WORDS or any(part in word for part in HOST_WORDS) for word in words)


def _is_written_as_address(text: str) -> bool:
    if "://" in text:
        return True
    if len(text) > TEXT_CHARS_MAX:
        return False
    if _address(text) is not None or _DOTTED.fullmatch(text):
        return True
    found = _ADDRESS.fullmatch(text)
    return found is not None and (":" in text or "[" in text)


def _plain(host: str) -> str:
    return host.rstrip(".").lower()


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return a text as an address. None if it is a name, or only resembles an address."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
