"""The shared store as the link needs it: one channel that all routers say and hear everything on, and a few keys.

Imported where there is something to share, since redis-py is an extra. Each `Store` is one session: it is opened,
used, and closed at its first failure, and the link opens another. Nothing is tried twice in here, so that the link
alone decides how long a failure lasts.

Everything of one name of routers has a name that begins with `warmroute:{NAME}:`. The braces put all of its keys on one
node of a cluster; a message is passed on by a cluster to all of its nodes, so that any of them may be heard. A database
keeps its keys to itself and its messages not, so that the channel has its number, but for 0, in its name.
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

from router.sharing.addresses import StoreAddress
from router.sharing.clients import FAILURES, ODD_ANSWERS, TlsFiles, clients, failure, message_reader, some_found
from router.sharing.session import Entry, StoreFailed
from router.sharing.wire import Wire

MESSAGE_BYTES = 64  # bytes that a message takes beside its own
EARLY_BYTES_MAX = 8 << 20  # bytes of messages that come before the link listens, and are kept
UNANSWERED_MAX = 256  # messages that the store has not answered
PAGE = 256  # entries of the stream of owners that are read at once
PAGES_MORE = 4  # pages beyond a full memory of owners: the store drops old entries some hundreds at a time
FIELDS = (b"i", b"r", b"t", b"m")  # fields of an entry: id of the response, replica, tenant, mark of its router


@asynccontextmanager
async def opened(address: StoreAddress, name: str, timeout_s: float, tls: TlsFiles) -> AsyncIterator[Store]:
    """A session, until the block ends. Nothing here waits longer than `timeout_s`. Raises StoreFailed."""
    async with AsyncExitStack() as stack:
        try:
            await some_found(address, timeout_s)
            keys, messages = await clients(address, timeout_s, tls, stack)
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


def _wire(connection: Any, taken: Callable[[Any], None], ended: Callable[[Exception], None]) -> Wire:  # noqa: ANN401 - redis-py has two kinds
    """Read a connection of redis-py's, on which nothing is under way, as its bytes come; the client closes it."""
    transport: asyncio.Transport = connection._writer.transport  # noqa: SLF001 - redis-py 8 does not hand it out
    return Wire(transport, message_reader(), taken, ended)


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
        self._early, self._early_bytes = list[bytes](), 0  # messages that came before anybody listened
        self._hear: Callable[[bytes], None] = self._heard_early
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

    def _heard_early(self, message: bytes) -> None:
        """Keep a message until the link listens. Before the subscription there is none, and behind it a few at most:
        what is too much is lost, as any message may be."""
        bytes_ = len(message) + MESSAGE_BYTES
        if self._subscribed.is_set() and self._early_bytes + bytes_ <= EARLY_BYTES_MAX:
            self._early_bytes += bytes_
            self._early.append(message)

    def abort(self) -> None:
        """The session is over, and maybe nobody is there to part from."""
        self._said.abort()
        self._heard.abort()
        self._early.clear()
        self._hear = self._heard_early

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

    async def write(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Keep owners of stored responses, about `owners_max` in all; the oldest are dropped."""
        pipe = self._keys.pipeline(transaction=False)
        for owner, mark in entries:
            said = dict(zip(FIELDS if mark else FIELDS[:-1], (*owner, mark) if mark else owner, strict=True))
            pipe.xadd(self._owners, said, maxlen=owners_max, approximate=True)
        await self._try(pipe.execute)

    async def read(self, since_ms: int, owners_max: int) -> AsyncIterator[Sequence[Entry]]:
        """Owners that were kept since then, by the store's clock, oldest first and a page at a time. There are about
        `owners_max`: a store that has more pages has no end."""
        begin: str | bytes = str(since_ms)
        for _ in range(owners_max // PAGE + PAGES_MORE):
            page = await self._try(self._keys.xrange, self._owners, begin, "+", PAGE)
            try:
                entries = [found for _, fields in page if (found := _entry(fields)) is not None]
                begin = b"(" + page[-1][0] if page else begin
            except ODD_ANSWERS as error:
                raise failure(error) from error
            yield entries
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


def _entry(fields: Any) -> Entry | None:  # noqa: ANN401 - whatever somebody has put there
    """An entry of the stream; None for one that no router wrote."""
    try:
        response_id, replica, tenant = (fields[name].decode() for name in FIELDS[:-1])
        mark = fields.get(FIELDS[-1], b"")
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return None
    return ((response_id, replica, tenant), mark) if isinstance(mark, bytes) else None
