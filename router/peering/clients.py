"""Clients of the store by its address: one server, servers behind Sentinels, or a cluster.

Only this module and redis_store.py import redis-py, which is an optional dependency. No command is retried. Each reply
is read within limits, from the first one on.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from router.peering.frames import FRAME_BYTES_MAX
from router.peering.name_lookup import resolve_host
from router.peering.reply_limits import BoundedReader
from router.peering.session import ODD, StoreFailed
from router.peering.store_url import StoreAddress, StoreKind

REPLY_BYTES_MAX = FRAME_BYTES_MAX + 4_096  # bytes of one reply, or of a message with its channel
# Replies within one reply. The reply to XRANGE has 13 for each entry of a page. The reply to COMMAND, which a cluster
# client sends, has about 12,500 in all. A connection for messages has lists of three.
ELEMENTS_MAX, MESSAGE_ELEMENTS_MAX = 1 << 15, 8
# Exceptions of redis-py, and of Python if the store's answer has another shape than the command's.
BAD_REPLY_ERRORS = (TypeError, ValueError, LookupError, AttributeError)
FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError, *BAD_REPLY_ERRORS)


class _BoundedParser(_AsyncHiredisParser):
    """redis-py's parser, limited to replies within bounds (reply_limits.py)."""

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's
        """Begin to read this connection."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]  # redis-py's
        self._reader = BoundedReader(  # type: ignore[assignment]  # also
            InvalidResponse,
            self.parse_error,
            bytes_max=REPLY_BYTES_MAX,
            elements_max=ELEMENTS_MAX,
            nothing=NOT_ENOUGH_DATA,
        )


def message_reader() -> BoundedReader:
    """Make a reader for a connection for messages."""
    return BoundedReader(
        InvalidResponse,
        _AsyncHiredisParser.parse_error,
        bytes_max=REPLY_BYTES_MAX,
        elements_max=MESSAGE_ELEMENTS_MAX,
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for a store behind TLS. "" means the machine's authorities, and no client certificate."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


async def some_found(address: StoreAddress, within_s: float) -> None:
    """Return once the name of one host has an address. Raises OSError."""
    asked = [asyncio.ensure_future(resolve_host(host, within_s)) for host in dict(address.hosts)]
    try:
        for each in asyncio.as_completed(asked):
            try:
                return await each
            except OSError as error:
                failed = error
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    raise failed


def _options(address: StoreAddress, timeout_s: float, tls: TlsFiles) -> dict[str, Any]:
    """Return the arguments of every client: plain RESP2, which Redis 6.2 and all proxies support, and no retry."""
    options: dict[str, Any] = {
        "username": address.username or None,
        "password": address.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    if address.tls:
        own = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key or tls.certificate} if tls.certificate else {}
        options |= {"ssl": True, "ssl_ca_certs": tls.ca or None, "ssl_check_hostname": True, **own}
    return options


async def clients(
    address: StoreAddress, timeout_s: float, tls: TlsFiles, stack: AsyncExitStack
) -> tuple[Redis | RedisCluster, Redis]:
    """Return the client for keys and the client for messages, both connected. `stack` closes them. Raises one of
    FAILURES."""
    options = _options(address, timeout_s, tls)
    if address.kind is StoreKind.SINGLE:
        host, port = address.hosts[0]
        client = _limit_replies(Redis(host=host, port=port, db=address.database, **options))
        stack.push_async_callback(client.aclose)
        await client.ping()
        return client, client
    if address.kind is StoreKind.SENTINEL:
        kept = {name: value for name, value in options.items() if name not in ("username", "password")}
        named = {"username": address.sentinel_username or None, "password": address.sentinel_password or None}
        sentinel = Sentinel(list(address.hosts), sentinel_kwargs=kept | named)  # type: ignore[no-untyped-call]  # redis-py's
        for each in sentinel.sentinels:
            _limit_replies(each)
            stack.push_async_callback(each.aclose)
        client = _limit_replies(sentinel.master_for(address.service, db=address.database, **options))
        stack.push_async_callback(client.aclose)
        await client.ping()
        return client, client
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    cluster = RedisCluster(startup_nodes=nodes, **options)
    made: Any
    for made in (cluster, cluster.nodes_manager, *cluster.startup_nodes):
        made.connection_kwargs["parser_class"] = _BoundedParser
    stack.push_async_callback(_close, cluster)
    await cluster.initialize()
    error: Exception = OSError("no node of the cluster answers")
    for node in cluster.get_primaries():
        client = _limit_replies(Redis(host=str(node.host), port=int(node.port), **options))
        stack.push_async_callback(client.aclose)
        try:
            await client.ping()
        except FAILURES as failed:
            error = failed
        else:
            return cluster, client
    raise error


def _limit_replies(client: Redis) -> Redis:
    """Limit the replies of a client that has not connected, from the first one on."""
    pool: Any = client.connection_pool
    pool.connection_kwargs["parser_class"] = _BoundedParser
    return client


async def _close(cluster: RedisCluster) -> None:
    """Close a cluster client with its connections. redis-py 8 leaves those to the garbage collector if it had just lost
    a node, and was about to request the list of nodes again."""
    await cluster.aclose()
    for node in cluster.get_nodes():
        with suppress(*FAILURES):  # a connection that has ended needs no further action
            await node.disconnect()


_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "full"),
    (ReadOnlyError, "read_only"),
    (NoPermissionError, "denied"),
    (AuthenticationError, "denied"),
    (MaxConnectionsError, "refused"),
    (InvalidResponse, ODD),
    (ResponseError, "answer"),
)


def failure(error: Exception) -> StoreFailed:
    """Convert an error: its kind, and the store's own text without parts that it may quote."""
    if isinstance(error, (RedisTimeout, TimeoutError)):
        return StoreFailed("timeout", "no answer in time")
    if isinstance(error, BAD_REPLY_ERRORS) and not isinstance(error, (RedisError, OSError)):  # TLS raises both
        return StoreFailed("answer", f"an invalid Redis answer: {str(error)[:150]}")
    kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), "unreachable")
    text = str(error).partition("\n")[0][:200] or type(error).__name__
    if kind == "answer" and text.startswith(("MISCONF", "LOADING", "CLUSTERDOWN", "NOREPLICAS", "BUSY")):
        kind = "read_only"
    return StoreFailed(kind, text)
