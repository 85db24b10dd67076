"""The shared store as the link needs it: one channel that all routers say and hear everything on, and a few keys.

The only importer of redis-py, which is an extra. Each `Store` is one session: it is opened, used, and closed at its
first failure, and the link opens another. Nothing is tried twice in here, so that the link alone decides how long a
failure lasts.

Everything of one name of routers has a name that begins with `warmroute:{NAME}:`. The braces put all of its keys on one
node of a cluster; a message is passed on by a cluster to all of its nodes, so that any of them may be heard. A database
keeps its keys to itself and its messages not, so that the channel has its number, but for 0, in its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from router.sharing.addresses import StoreAddress, StoreKind
from router.sharing.names import found
from router.sharing.session import StoreFailed, Written

SLICE_S = 0.0005  # time that messages are heard for in one go, but for the last of them
PAGE = 512  # entries of the stream of owners that are read at once
FIELDS = (b"i", b"r", b"t")  # fields of an entry: id of the response, replica, tenant
# Exceptions of redis-py, and of Python where the store's answer has another shape than the command's.
ODD_ANSWERS = (TypeError, ValueError, LookupError, AttributeError)
FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError, *ODD_ANSWERS)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for a store behind TLS; "" stands for the machine's authorities, and for no certificate of ours."""

    ca: str = ""
    certificate: str = ""
    key: str = ""


@asynccontextmanager
async def opened(address: StoreAddress, name: str, timeout_s: float, tls: TlsFiles) -> AsyncIterator[Store]:
    """A session, until the block ends. Nothing here waits longer than `timeout_s`. Raises StoreFailed."""
    async with AsyncExitStack() as stack:
        with_options = _options(address, timeout_s, tls)
        try:
            await _some_found(address, timeout_s)
            keys, messages = await _clients(address, with_options, stack)
            said, heard = [await _connection(messages) for _ in range(2)]
            store = Store(keys, said, heard, name, timeout_s, address.database)
        except FAILURES as error:
            raise failure(error) from error
        await store.subscribe()
        yield store


async def _some_found(address: StoreAddress, within_s: float) -> None:
    """Return once the name of one host has an address. Raises OSError."""
    asked = [asyncio.ensure_future(found(host, within_s)) for host in dict(address.hosts)]
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
    """Arguments of every client: plain RESP2, which Redis 6.2 and all proxies speak, and no second try."""
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


async def _clients(
    address: StoreAddress, options: dict[str, Any], stack: AsyncExitStack
) -> tuple[Redis | RedisCluster, Redis]:
    """The client that keys are asked of, and the one for messages, both connected."""
    if address.kind is StoreKind.SINGLE:
        host, port = address.hosts[0]
        client = Redis(host=host, port=port, db=address.database, **options)
        stack.push_async_callback(client.aclose)
        await client.ping()
        return client, client
    if address.kind is StoreKind.SENTINEL:
        kept = {name: value for name, value in options.items() if name not in ("username", "password")}
        named = {"username": address.sentinel_username or None, "password": address.sentinel_password or None}
        sentinel = Sentinel(list(address.hosts), sentinel_kwargs=kept | named)  # type: ignore[no-untyped-call]  # redis-py's
        for each in sentinel.sentinels:
            stack.push_async_callback(each.aclose)
        client = sentinel.master_for(address.service, db=address.database, **options)
        stack.push_async_callback(client.aclose)
        await client.ping()
        return client, client
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    cluster = RedisCluster(startup_nodes=nodes, **options)
    stack.push_async_callback(_close, cluster)
    await cluster.initialize()
    error: Exception = OSError("no node of the cluster answers")
    for node in cluster.get_primaries():
        client = Redis(host=str(node.host), port=int(node.port), **options)
        stack.push_async_callback(client.aclose)
        try:
            await client.ping()
        except FAILURES as failed:
            error = failed
        else:
            return cluster, client
    raise error


async def _close(cluster: RedisCluster) -> None:
    """Close its connections: redis-py 8 leaves those to the garbage collector where it had just lost a node, and was
    about to ask for its nodes anew."""
    await cluster.aclose()
    for node in cluster.get_nodes():
        with suppress(*FAILURES):  # of a connection that is no more
            await node.disconnect()


async def _connection(client: Redis) -> Any:  # noqa: ANN401 - redis-py has two kinds of connections
    """A connection of the client's pool that is kept: dozens of messages go over it each second, and over a kept one
    they take under half of the CPU, without what commands of redis-py 8 do besides (taking a connection from the pool,
    trying again, a timer for each read and write). `Store` limits how long a message may take."""
    connection: Any = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]  # redis-py's
    connection.socket_timeout = None
    return connection


class Store:
    """One session with the store. Every method raises StoreFailed."""

    def __init__(
        self,
        keys: Redis | RedisCluster,
        said: Any,  # noqa: ANN401 - likewise
        heard: Any,  # noqa: ANN401 - likewise
        name: str,
        timeout_s: float,
        database: int,
    ) -> None:
        """Messages go out over the connection `said`, and come over `heard`; both are closed with their client."""
        self._keys: Any = keys  # the types of redis-py say of each command that it may be awaited, or not
        self._said, self._heard = said, heard
        self._saying = asyncio.Lock()  # answers come in the order of messages
        self._timeout_s = timeout_s
        base = f"warmroute:{{{name}}}:"
        self._base = base
        self._channel = f"{base}said:{database}" if database else f"{base}said"
        self._owners, self._router = f"{base}responses", f"{base}router:"

    async def say(self, message: bytes) -> None:
        """Publish a message to all routers, this one included."""
        try:
            async with asyncio.timeout(self._timeout_s), self._saying:
                if not self._said.is_connected:  # redis-py would connect again, maybe to a server that is no master now
                    raise StoreFailed("unreachable", "the connection for messages is closed")
                await self._said.send_command("PUBLISH", self._channel, message)
                await self._said.read_response()
        except FAILURES as error:
            raise failure(error) from error

    async def subscribe(self) -> None:
        """Begin to hear, before anything is said: the store answers two connections in any order, and a first message
        that came before the subscription would have others answer a router that does not hear them yet."""
        await self._try(self._heard.send_command, "SUBSCRIBE", self._channel)
        await self._try(self._heard.read_response)

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Give every message to `hear` as it comes, from the first one since the session began, until cancelled."""
        try:
            heard_s = 0.0  # time that hearing has taken since others were let in
            while True:
                said = await self._heard.read_response()
                if not _is_message(said):
                    continue
                begun_s = time.monotonic()
                hear(said[2])
                heard_s += time.monotonic() - begun_s
                if heard_s > SLICE_S:  # messages that came together are read without a pause
                    heard_s = 0.0
                    await asyncio.sleep(0)
        except (RedisError, OSError) as error:  # not what a bug in hearing raises
            raise failure(error) from error

    async def now_ms(self) -> int:
        """The store's clock, of which the ids of a stream are made, in ms since 1970."""
        said = await self._try(self._keys.execute_command, "TIME", **self._anywhere)
        try:
            seconds, micros = said
            return int(seconds) * 1_000 + int(micros) // 1_000
        except ODD_ANSWERS as error:
            raise failure(error) from error

    async def present(self, router: str, about: bytes, for_s: float) -> bool:
        """Say for so long that this router is there, which proves that the store takes writes. Returns whether it was
        said there already."""
        said = await self._try(self._keys.set, self._router + router, about, px=int(for_s * 1_000), get=True)
        return said is not None

    async def leave(self, router: str) -> None:
        """Say that this router is there no more."""
        await self._try(self._keys.delete, self._router + router)

    async def put(self, key: str, value: bytes, for_s: float) -> None:
        """Leave something for so long, for whoever takes it."""
        await self._try(self._keys.set, self._base + key, value, px=int(for_s * 1_000))

    async def take(self, key: str) -> bytes | None:
        """Take what was left: nothing is put in its place for a millisecond, which needs no right besides SET."""
        found = await self._try(self._keys.set, self._base + key, b"", px=1, get=True)
        return found if found and isinstance(found, bytes) else None

    async def write(self, owners: Iterable[Written], owners_max: int) -> None:
        """Keep owners of stored responses, about `owners_max` in all; the oldest are dropped."""
        pipe = self._keys.pipeline(transaction=False)
        for response_id, replica, tenant in owners:
            said = dict(zip(FIELDS, (response_id, replica, tenant), strict=True))
            pipe.xadd(self._owners, said, maxlen=owners_max, approximate=True)
        await self._try(pipe.execute)

    async def read(self, since_ms: int) -> AsyncIterator[Sequence[Written]]:
        """Owners that were kept since then, by the store's clock, oldest first and a page at a time."""
        begin: str | bytes = str(since_ms)
        while True:
            page = await self._try(self._keys.xrange, self._owners, begin, "+", PAGE)
            try:
                owners = [found for _, fields in page if (found := _written(fields)) is not None]
                begin = b"(" + page[-1][0] if page else begin
            except ODD_ANSWERS as error:
                raise failure(error) from error
            yield owners
            if len(page) < PAGE:
                return

    @property
    def _anywhere(self) -> dict[str, Any]:
        """Arguments of a command without a key: a cluster has to be told whom to ask."""
        return {"target_nodes": RedisCluster.RANDOM} if isinstance(self._keys, RedisCluster) else {}

    async def _try(self, command: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - any command
        try:
            async with asyncio.timeout(2 * self._timeout_s):  # redis-py's own limits are for each read and write
                return await command(*arguments, **named)
        except FAILURES as error:
            raise failure(error) from error


def _is_message(said: Any) -> bool:  # noqa: ANN401 - whatever the store hands out
    """Whether it is [b"message", channel, bytes]."""
    return isinstance(said, list) and len(said) == 3 and said[0] == b"message" and isinstance(said[2], bytes)


def _written(fields: Any) -> Written | None:  # noqa: ANN401 - whatever somebody has put there
    """An entry of the stream; None for one that nobody of us wrote."""
    try:
        response_id, replica, tenant = (fields[name].decode() for name in FIELDS)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return None
    return response_id, replica, tenant


_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "full"),
    (ReadOnlyError, "read_only"),
    (NoPermissionError, "denied"),
    (AuthenticationError, "denied"),
    (MaxConnectionsError, "refused"),
    (ResponseError, "answer"),
)


def failure(error: Exception) -> StoreFailed:
    """What went wrong, in words of ours: its kind, and the store's own text without what it may quote."""
    if isinstance(error, (RedisTimeout, TimeoutError)):
        return StoreFailed("timeout", "no answer in time")
    if isinstance(error, ODD_ANSWERS) and not isinstance(error, (RedisError, OSError)):  # TLS raises both
        return StoreFailed("answer", f"an answer that no Redis gives: {str(error)[:150]}")
    kind = next((kind for type_, kind in _KINDS if isinstance(error, type_)), "unreachable")
    text = str(error).partition("\n")[0][:200] or type(error).__name__
    if kind == "answer" and text.startswith(("MISCONF", "LOADING", "CLUSTERDOWN", "NOREPLICAS", "BUSY")):
        kind = "read_only"
    return StoreFailed(kind, text)
