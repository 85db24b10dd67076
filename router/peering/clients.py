"""Client of the store by its address: one server, servers behind Sentinels, or a cluster.

All keys of a fleet are on one server, which is found when a session begins: by Sentinels, or as the node of a cluster
that has the fleet's slot. A session ends when another server takes over. Only this module and redis_store.py import
redis-py, which is an optional dependency. No command is retried.

Replies are parsed by redis-py's own parser, also if hiredis is installed. hiredis allocates a list with as many
elements as a reply announces, 10^9 in thirteen bytes. The other one takes memory only for bytes that have arrived.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    InvalidResponse,
    MaxConnectionsError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from router.peering.name_lookup import resolve_host
from router.peering.session import ODD, StoreFailed
from router.peering.store_url import StoreAddress, StoreKind

# Exceptions of redis-py, and of Python if the store's answer has another shape than the command's.
BAD_REPLY_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
READ_BYTES = 64 << 10  # bytes of a reply that are read at once
FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError, *BAD_REPLY_ERRORS)


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


async def connect(
    address: StoreAddress, key: str, timeout_s: float, read_timeout_s: float, tls: TlsFiles, stack: AsyncExitStack
) -> Redis:
    """Return a connected client of the server that has this key, with at most `read_timeout_s` for a reply. `stack`
    closes it. Raises one of FAILURES."""
    options = _options(address, timeout_s, tls)
    if address.kind is StoreKind.SENTINEL:
        host, port = await _ask_sentinels(address, options)
    elif address.kind is StoreKind.CLUSTER:
        host, port = await _ask_cluster(address, key, options)
    else:
        host, port = address.hosts[0]
    client = _parsed_as_it_arrives(
        Redis(host=host, port=port, db=address.database, **options | {"socket_timeout": read_timeout_s})
    )
    stack.push_async_callback(client.aclose)
    await client.ping()
    return client


async def _ask_sentinels(address: StoreAddress, options: dict[str, Any]) -> tuple[str, int]:
    kept = {name: value for name, value in options.items() if name not in ("username", "password")}
    named = {"username": address.sentinel_username or None, "password": address.sentinel_password or None}
    sentinel = Sentinel(list(address.hosts), sentinel_kwargs=kept | named)  # type: ignore[no-untyped-call]  # redis-py's
    for each in sentinel.sentinels:
        _parsed_as_it_arrives(each)
    try:
        host, port = await sentinel.discover_master(address.service)
    finally:
        for each in sentinel.sentinels:
            await each.aclose()
    return str(host), int(port)


async def _ask_cluster(address: StoreAddress, key: str, options: dict[str, Any]) -> tuple[str, int]:
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    cluster = RedisCluster(startup_nodes=nodes, **options)
    made: Any
    for made in (cluster, cluster.nodes_manager, *cluster.startup_nodes):
        made.connection_kwargs["parser_class"] = _AsyncRESP2Parser
    try:
        await cluster.initialize()
        node = cluster.get_node_from_key(key)
        if node is None:
            raise OSError("no node of the cluster has the keys of this fleet")
        return str(node.host), int(node.port)
    finally:
        await cluster.aclose()


def _parsed_as_it_arrives(client: Redis) -> Redis:
    """Select the parser of a client that has not connected."""
    client.connection_pool.connection_kwargs["parser_class"] = _AsyncRESP2Parser
    return client


_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "full"),
    (ReadOnlyError, "read_only"),
    (NoPermissionError, "denied"),
    (AuthenticationError, "denied"),
    (MaxConnectionsError, "refused"),
    (MovedError, "unreachable"),
    (AskError, "unreachable"),
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


class _OneReply(_AsyncRESP2Parser):
    """redis-py's parser for a connection that never has more than one reply. It parses in memory what has arrived;
    otherwise each line is a read of the stream."""

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: ANN401 - any reply
        """Parse the next reply. Raises one of FAILURES."""
        if self._stream is not None:
            self._chunks.append(await self._stream.read(READ_BYTES))
        return await super().read_response(disable_decoding)


class DedicatedConnection:
    """Connection for one command at a time. It costs about half of a client's command: a write needs no task, and one
    timer limits many commands."""

    def __init__(self, connection: AbstractConnection) -> None:
        """`connection` is connected, and has no time limits of its own."""
        self._connection = connection
        self._task: asyncio.Task[Any] | None = None  # the task of the command
        self._due_s = math.inf  # time at which the command fails
        self._late = False  # True if it was cancelled then
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, *words: str | bytes | int, within_s: float) -> Any:  # noqa: ANN401 - any reply
        """Send a command, and return its reply. Raises StoreFailed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("a command needs a task")
        cancelled, self._task, self._late, self._due_s = task.cancelling(), task, False, loop.time() + within_s
        if self._timer is None:  # otherwise it is set for an earlier time, and is set again then
            self._timer = loop.call_at(self._due_s, self._check, loop)
        try:
            command = self._connection.pack_command(*words)
            await self._connection.send_packed_command(command, check_health=False)
            return await self._connection.read_response(disable_decoding=True)  # values stay bytes anyway
        except asyncio.CancelledError:
            if self._late and task.uncancel() <= cancelled:
                raise failure(TimeoutError()) from None
            raise
        except FAILURES as error:
            raise failure(error) from error
        finally:
            self._task, self._due_s = None, math.inf

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._task is None:
            return
        if loop.time() < self._due_s:
            self._timer = loop.call_at(self._due_s, self._check, loop)
        else:
            self._late = self._task.cancel()


async def dedicated(client: Redis, stack: AsyncExitStack) -> DedicatedConnection:
    """Connect once more to a client's server. `stack` closes the connection. Raises one of FAILURES."""
    pool: Any = client.connection_pool  # redis-py has no types for this
    connection = pool.make_connection()
    connection.set_parser(_OneReply)
    stack.push_async_callback(connection.disconnect)
    await connection.connect()
    connection.socket_timeout = None
    return DedicatedConnection(connection)
