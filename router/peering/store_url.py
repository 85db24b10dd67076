"""Address of the shared store, from `peering.redis_url`: one server, servers behind Sentinels, or a cluster.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]
    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DATABASE]
    redis+cluster://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]...]

`rediss` instead of `redis` is the same with TLS; `valkey` and `valkeys` mean the same two. Sentinels may have a
separate password: `?sentinel_password=`, and `sentinel_username=`. Special characters in a user's name or a password
are percent-encoded, as in any URL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qsl, unquote, urlsplit

HOSTS_MAX = 32
_TLS = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}


class StoreKind(StrEnum):
    """Method to find the server that accepts writes."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_PORTS = {StoreKind.SINGLE: 6379, StoreKind.SENTINEL: 26379, StoreKind.CLUSTER: 6379}


class BadAddress(ValueError):
    """The URL is not a store's. The text gives the reason, and has no password."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's address. A `service` is the name by which Sentinels know the server."""

    kind: StoreKind
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    service: str = ""
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return the address for people: without a user and a password."""
        scheme = "rediss" if self.tls else "redis"
        kind = "" if self.kind is StoreKind.SINGLE else f"+{self.kind}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        service, database = f"/{self.service}" if self.service else "", f"/{self.database}" if self.database else ""
        return f"{scheme}{kind}://{hosts}{service}{database}"


def parse_address(url: str, password: str | None = None) -> StoreAddress:
    """Parse a store's URL. A given `password` overrides the URL's own. Raises BadAddress."""
    scheme, slashes, rest = url.partition("://")
    base, plus, word = scheme.lower().partition("+")
    if not slashes or base not in _TLS or (plus and word not in (StoreKind.SENTINEL, StoreKind.CLUSTER)):
        raise BadAddress("must begin with redis://, rediss://, redis+sentinel:// or redis+cluster://")
    kind = StoreKind(word) if plus else StoreKind.SINGLE
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    user, _, listed = authority.rpartition("@")
    username, _, own = user.partition(":")
    parts = [unquote(part) for part in path.split("/") if part]
    service = parts.pop(0) if kind is StoreKind.SENTINEL and parts else ""
    if kind is StoreKind.SENTINEL and not service:
        raise BadAddress("must end with the name of the Sentinel service: redis+sentinel://HOST:26379/mymaster")
    asked = dict(parse_qsl(query))
    if asked.keys() - {"sentinel_username", "sentinel_password"} or (asked and kind is not StoreKind.SENTINEL):
        raise BadAddress("allows only the options sentinel_username and sentinel_password after '?'")
    return StoreAddress(
        kind,
        _hosts(listed, kind),
        tls=_TLS[base],
        username=unquote(username),
        password=password or unquote(own),
        database=_database(parts, kind),
        service=service,
        sentinel_username=asked.get("sentinel_username", ""),
        sentinel_password=asked.get("sentinel_password", ""),
    )


def _hosts(listed: str, kind: StoreKind) -> tuple[tuple[str, int], ...]:
    hosts = []
    for each in listed.split(","):
        try:
            split = urlsplit(f"//{each}")
            host, port = split.hostname, split.port
        except ValueError as error:
            raise BadAddress("has an invalid host or port") from error
        if not host or any(character.isspace() for character in host):
            raise BadAddress("has no host")
        if port == 0:
            raise BadAddress("has the invalid port 0")
        hosts.append((host, _PORTS[kind] if port is None else port))
    if len(hosts) > HOSTS_MAX:
        raise BadAddress(f"has {len(hosts)} hosts; at most {HOSTS_MAX} are allowed, and the others are discovered")
    if len(hosts) > 1 and kind is StoreKind.SINGLE:
        raise BadAddress("has several hosts, which only redis+sentinel:// and redis+cluster:// allow")
    return tuple(hosts)


def _database(parts: list[str], kind: StoreKind) -> int:
    if not parts:
        return 0
    if len(parts) > 1 or not (parts[0].isascii() and parts[0].isdigit()) or len(parts[0]) > 4:
        raise BadAddress("must end with the number of a database")
    if kind is StoreKind.CLUSTER and int(parts[0]):
        raise BadAddress("selects a database, but a cluster has only database 0")
    return int(parts[0])


def url_problem(url: str) -> str:
    """Return the problem of a URL; "" if it has no problem."""
    try:
        parse_address(url)
    except BadAddress as error:
        return str(error)
    return ""
