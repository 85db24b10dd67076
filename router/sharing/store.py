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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import hiredis
from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import DefaultParser
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

from router.sharing.addresses import StoreAddress, StoreKind
from router.sharing.names import found
from router.sharing.session import StoreFailed, Written
from router.sharing.wire import Wire

# Bytes of one reply or message of the store; a longer one ends the session. Messages of more than FRAME_BYTES_MAX and
# less than this are read and passed by, so that somebody who writes them does not part the routers.
REPLY_BYTES_MAX = 64 << 20
UNANSWERED_MAX = 256  # messages that the store has not answered
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
            pool: Any = messages.connection_pool
            said, heard = await pool.get_connection(), await pool.get_connection()  # closed with the pool
            store = Store(keys, said, heard, name, timeout_s, address.database)
            await store.subscribe()
        except FAILURES as error:
            failed = failure(error)
            if address.tls and failed.kind == "timeout":  # a server without TLS waits for the end of the first line
                failed = StoreFailed("timeout", "no answer in time; does that port speak TLS, as rediss:// wants?")
            raise failed from error
        try:
            yield store
        except BaseException:
            store.abort()
            raise


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


def _wire(connection: Any, taken: Callable[[Any], None], ended: Callable[[Exception], None]) -> Wire:  # noqa: ANN401 - redis-py has two kinds
    """Read a connection of redis-py's, on which nothing is under way, as its bytes come; the client closes it."""
    transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001 - redis-py 8 does not hand it out
    reader = hiredis.Reader(protocolError=InvalidResponse, replyError=DefaultParser.parse_error)
    return Wire(transport, reader, taken, ended, REPLY_BYTES_MAX)


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
        self._pack: Callable[..., Iterable[bytes]] = said.pack_command
        self._said = _wire(said, self._take_answer, self._fail)
        self._heard = _wire(heard, self._take_message, self._fail)
        self._unanswered: deque[float] = deque()  # times at which messages were said that the store has not answered
        self._early = list[bytes]()  # messages that came before anybody listened
        self._hear = self._early.append
        self._subscribed, self._over = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None  # why the session is over: StoreFailed, or what a bug in hearing raised
        self._timeout_s = timeout_s
        base = f"warmroute:{{{name}}}:"
        self._base = base
        self._channel = f"{base}said:{database}" if database else f"{base}said"
        self._owners, self._router = f"{base}responses", f"{base}router:"

    def say(self, message: bytes) -> None:
        """Publish a message to all routers, this one included. What the store says to it is read when it comes; where
        it says nothing in time to one, the next one fails."""
        if self._error is not None:
            raise self._error if isinstance(self._error, StoreFailed) else failure(self._error)
        now_s, waiting = time.monotonic(), self._unanswered
        if waiting and (now_s - waiting[0] >= self._timeout_s or len(waiting) >= UNANSWERED_MAX):
            raise failure(TimeoutError())
        waiting.append(now_s)
        self._said.write(b"".join(self._pack("PUBLISH", self._channel, message)))

    def _take_answer(self, reply: Any) -> None:  # noqa: ANN401 - whatever the store hands out
        """The store has said to how many a message was passed on, or why it was not."""
        if isinstance(reply, Exception):
            self._fail(reply)
        elif self._unanswered:
            self._unanswered.popleft()

    def _take_message(self, reply: Any) -> None:  # noqa: ANN401 - likewise
        """A message has come, or the answer to the subscription."""
        if isinstance(reply, Exception):
            self._fail(reply)
        elif _is_message(reply):
            try:
                self._hear(reply[2])
            except Exception as bug:
                self._end(bug)
        else:
            self._subscribed.set()

    def abort(self) -> None:
        """The session is over, and maybe nobody is there to part from."""
        self._said.abort()
        self._heard.abort()

    def _fail(self, error: Exception) -> None:
        """The store has failed, or somebody who looks like it."""
        self._end(failure(error))

    def _end(self, why: Exception) -> None:
        if self._error is None:
            self._error = why
        self._subscribed.set()
        self._over.set()

    async def subscribe(self) -> None:
        """Begin to hear, before anything is said: the store answers two connections in any order, and a first message
        that came before the subscription would have others answer a router that does not hear them yet. Raises
        StoreFailed, or TimeoutError."""
        self._heard.write(b"".join(self._pack("SUBSCRIBE", self._channel)))
        async with asyncio.timeout(2 * self._timeout_s):
            await self._subscribed.wait()
        if self._error is not None:
            raise self._error

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Give every message to `hear` as it comes, from the first one since the session began, until cancelled. Raises
        what a bug in `hear` has raised."""
        for message in self._early:
            hear(message)
        self._early.clear()
        self._hear = hear
        await self._over.wait()
        if self._error is not None:
            raise self._error

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
