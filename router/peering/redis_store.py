"""The shared store as the link needs it: one channel to which all routers publish and subscribe, and a few keys.

It is imported only if there is something to share, because redis-py is an optional dependency. Each `RedisSession` is
one session. It is opened, used, and closed at its first failure, and the link opens another. No command is retried in
this module, so that the link alone decides the time between attempts.

All keys of one fleet's name begin with `warmroute:{NAME}:`. The braces put all of them on one node of a cluster. A
cluster forwards a message to all of its nodes, so a router may subscribe at any of them. A database has separate keys
but not separate messages. So the channel's name has the database's number, except for 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from router.peering.clients import BAD_REPLY_ERRORS, FAILURES, TlsFiles, clients, failure, message_reader, some_found
from router.peering.resp_protocol import RespProtocol
from router.peering.session import Entry, StoreFailed
from router.peering.store_url import StoreAddress

MESSAGE_BYTES = 64  # overhead of a message in bytes
EARLY_BYTES_MAX = 8 << 20  # most bytes of messages that are kept before the link listens
UNANSWERED_MAX = 256  # messages that the store has not answered
PAGE = 256  # entries of the stream of owners that are read at once
PAGES_MORE = 4  # pages beyond a full memory of owners: the store drops old entries some hundreds at a time
FIELDS = (b"i", b"r", b"t", b"m")  # fields of an entry: id of the response, replica, tenant, mark of its router


@asynccontextmanager
async def open_session(
    address: StoreAddress, name: str, timeout_s: float, tls: TlsFiles
) -> AsyncIterator[RedisSession]:
    """Open a session, until the block ends. No step waits longer than `timeout_s`. Raises StoreFailed."""
    async with AsyncExitStack() as stack:
        try:
            await some_found(address, timeout_s)
            keys, messages = await clients(address, timeout_s, tls, stack)
            pool: Any = messages.connection_pool
            said, heard = await pool.get_connection(), await pool.get_connection()  # closed with the pool
            store = RedisSession(keys, said, heard, name, timeout_s, address.database)
            await store.subscribe()
        except FAILURES as error:
            failed = failure(error)
            if address.tls and failed.kind == "timeout":  # a server without TLS waits for the end of the first line
                failed = StoreFailed(
                    "timeout", "no answer in time; check that the port uses TLS, which rediss:// requires"
                )
            raise failed from error
        try:
            yield store
        except BaseException:
            store.abort()
            raise


def _wire(connection: Any, taken: Callable[[Any], None], ended: Callable[[Exception], None]) -> RespProtocol:  # noqa: ANN401 - redis-py has two kinds
    """Read an idle connection of redis-py as its bytes arrive. The client closes it."""
    transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001 - redis-py 8 does not hand it out
    return RespProtocol(transport, message_reader(), taken, ended)


class RedisSession:
    """One session with the store. Every method raises StoreFailed."""

    def __init__(
        self,
        keys: Redis | RedisCluster,
        said: Any,  # noqa: ANN401 - as above
        heard: Any,  # noqa: ANN401 - as above
        name: str,
        timeout_s: float,
        database: int,
    ) -> None:
        """Messages are sent over the connection `said` and received over `heard`. Both are closed with their client."""
        self._keys: Any = keys  # in redis-py's types, each command may or may not be awaitable
        self._pack: Callable[..., Iterable[bytes]] = said.pack_command
        self._said = _wire(said, self._take_answer, self._fail)
        self._heard = _wire(heard, self._take_message, self._fail)
        self._unanswered: deque[float] = deque()  # send times of messages that the store has not answered
        self._early, self._early_bytes = list[bytes](), 0  # messages that arrived before the link listened
        self._hear: Callable[[bytes], None] = self._heard_early
        self._subscribed, self._over = asyncio.Event(), asyncio.Event()
        # the reason for the end of the session: StoreFailed, or an exception from a bug in the receiver
        self._error: Exception | None = None
        self._timeout_s = timeout_s
        base = f"warmroute:{{{name}}}:"
        self._base = base
        self._channel = f"{base}said:{database}" if database else f"{base}said"
        self._owners, self._router = f"{base}responses", f"{base}router:"

    def publish(self, message: bytes) -> None:
        """Publish a message to all routers, this one included. The store's answer is read when it arrives. If the
        answer to one message is late, the next message fails."""
        if self._error is not None:
            raise self._error if isinstance(self._error, StoreFailed) else failure(self._error)
        now_s, waiting = time.monotonic(), self._unanswered
        if waiting and (now_s - waiting[0] >= self._timeout_s or len(waiting) >= UNANSWERED_MAX):
            raise failure(TimeoutError())
        waiting.append(now_s)
        self._said.write(b"".join(self._pack("PUBLISH", self._channel, message)))

    def _take_answer(self, reply: Any) -> None:  # noqa: ANN401 - any reply of the store
        """Process the store's answer to a message: the number of its receivers, or an error."""
        if isinstance(reply, Exception):
            self._fail(reply)
        elif self._unanswered:
            self._unanswered.popleft()

    def _take_message(self, reply: Any) -> None:  # noqa: ANN401 - as above
        """Process a message, or the answer to the subscription."""
        if isinstance(reply, Exception):
            self._fail(reply)
        elif _is_message(reply):
            try:
                self._hear(reply[2])
            except Exception as bug:
                self._end(bug)
        else:
            self._subscribed.set()

    def _heard_early(self, message: bytes) -> None:
        """Keep a message until the link listens. Before the subscription no message arrives, and after it at most a
        few. An excess is lost, as any message may be."""
        bytes_ = len(message) + MESSAGE_BYTES
        if self._subscribed.is_set() and self._early_bytes + bytes_ <= EARLY_BYTES_MAX:
            self._early_bytes += bytes_
            self._early.append(message)

    def abort(self) -> None:
        """End the session at once. The peer may be gone."""
        self._said.abort()
        self._heard.abort()
        self._early.clear()
        self._hear = self._heard_early

    def _fail(self, error: Exception) -> None:
        """End the session with a failure of the store, or of a peer that appears to be the store."""
        self._end(failure(error))

    def _end(self, why: Exception) -> None:
        if self._error is None:
            self._error = why
        self._subscribed.set()
        self._over.set()

    async def subscribe(self) -> None:
        """Subscribe before any message is published. The store answers two connections in any order. If a first message
        came before the subscription, others would answer a router that does not receive yet. Raises StoreFailed, or
        TimeoutError."""
        self._heard.write(b"".join(self._pack("SUBSCRIBE", self._channel)))
        async with asyncio.timeout(2 * self._timeout_s):
            await self._subscribed.wait()
        if self._error is not None:
            raise self._error

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Pass every message to `hear` as it arrives, from the first one since the session began, until cancelled. An
        exception from a bug in `hear` is raised here."""
        for message in self._early:
            hear(message)
        self._early.clear()
        self._hear = hear
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def fetch_time_ms(self) -> int:
        """Return the store's clock, from which the ids of a stream are made, in ms since 1970."""
        said = await self._try(self._keys.execute_command, "TIME", **self._anywhere)
        try:
            seconds, micros = said
            return int(seconds) * 1_000 + int(micros) // 1_000
        except BAD_REPLY_ERRORS as error:
            raise failure(error) from error

    async def set_presence(self, router: str, about: bytes, for_s: float) -> bool:
        """Set this router's presence for `for_s` seconds, which proves that the store accepts writes. Returns True if
        it was already set."""
        said = await self._try(self._keys.set, self._router + router, about, px=int(for_s * 1_000), get=True)
        return said is not None

    async def leave(self, router: str) -> None:
        """Remove this router's presence."""
        await self._try(self._keys.delete, self._router + router)

    async def put(self, key: str, value: bytes, for_s: float) -> None:
        """Store a value for `for_s` seconds, for the router that takes it."""
        await self._try(self._keys.set, self._base + key, value, px=int(for_s * 1_000))

    async def take(self, key: str) -> bytes | None:
        """Return a value and remove it. An empty value replaces it for a millisecond, which needs no permission except
        SET."""
        found = await self._try(self._keys.set, self._base + key, b"", px=1, get=True)
        return found if found and isinstance(found, bytes) else None

    async def write(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Store owners of stored responses, about `owners_max` in all; the oldest are dropped."""
        pipe = self._keys.pipeline(transaction=False)
        for owner, mark in entries:
            said = dict(zip(FIELDS if mark else FIELDS[:-1], (*owner, mark) if mark else owner, strict=True))
            pipe.xadd(self._owners, said, maxlen=owners_max, approximate=True)
        await self._try(pipe.execute)

    async def read(self, since_ms: int, owners_max: int) -> AsyncIterator[Sequence[Entry]]:
        """Yield owners that were stored since then, by the store's clock, oldest first and a page at a time. There are
        about `owners_max`. A store that returns more pages would never end, so reading stops."""
        begin: str | bytes = str(since_ms)
        for _ in range(owners_max // PAGE + PAGES_MORE):
            page = await self._try(self._keys.xrange, self._owners, begin, "+", PAGE)
            try:
                entries = [found for _, fields in page if (found := _entry(fields)) is not None]
                begin = b"(" + page[-1][0] if page else begin
            except BAD_REPLY_ERRORS as error:
                raise failure(error) from error
            yield entries
            if len(page) < PAGE:
                return

    @property
    def _anywhere(self) -> dict[str, Any]:
        """Arguments of a command without a key: a cluster client needs the node."""
        return {"target_nodes": RedisCluster.RANDOM} if isinstance(self._keys, RedisCluster) else {}

    async def _try(self, command: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - any command
        try:
            async with asyncio.timeout(2 * self._timeout_s):  # redis-py's own limits are for each read and write
                return await command(*arguments, **named)
        except FAILURES as error:
            raise failure(error) from error


def _is_message(said: Any) -> bool:  # noqa: ANN401 - any reply of the store
    """True if it is [b"message", channel, bytes]."""
    return isinstance(said, list) and len(said) == 3 and said[0] == b"message" and isinstance(said[2], bytes)


def _entry(fields: Any) -> Entry | None:  # noqa: ANN401 - any content of the stream
    """Decode an entry of the stream; None for one that no router wrote."""
    try:
        response_id, replica, tenant = (fields[name].decode() for name in FIELDS[:-1])
        mark = fields.get(FIELDS[-1], b"")
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return None
    return ((response_id, replica, tenant), mark) if isinstance(mark, bytes) else None
