"""The shared store as the link needs it: a stream of messages that all routers read, and a few keys.

    warmroute:{NAME}:messages          stream of messages, the last MESSAGES_MAX or somewhat more
    warmroute:{NAME}:responses         stream of owners of stored responses
    warmroute:{NAME}:routers           set of the names of routers
    warmroute:{NAME}:state:ROUTER      complete state of one router, with a lifetime of seconds
    warmroute:{NAME}:snapshot:TO:FROM  stream of parcels for a router that has started, with a lifetime of seconds

The braces put all keys of a fleet on one node of a cluster. It is imported only if there is something to share, because
redis-py is an optional dependency. Each `RedisSession` is one session. It is opened, used, and closed at its first
failure, and the link opens another. No command is retried in this module, so that the link alone decides the time
between attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from redis.asyncio import Redis

from router.peering.clients import (
    BAD_REPLY_ERRORS,
    FAILURES,
    DedicatedConnection,
    TlsFiles,
    connect,
    dedicated,
    failure,
    some_found,
)
from router.peering.session import Entry, Page, StoreFailed, StreamId
from router.peering.store_url import StoreAddress

MESSAGES_MAX = 4_096  # messages in the stream: more than three seconds of the largest fleet
READ_MAX = 64  # messages that are read at once, and as many owners
OWNERS_READ_MAX = 256  # owners that are read at once if no message is
BLOCK_S = 1.0  # longest wait of a read for the next message
ROUTERS_MAX = 256  # names of routers that are read
MESSAGE = b"m"  # field of an entry: a message, or a parcel
# The store's reply to XADD after a forged id. Without the stream, ids follow the clock again.
NO_MORE_IDS = "last possible ID"
FIELDS = (b"i", b"r", b"t", b"m")  # fields of an owner: id of the response, replica, tenant, mark of its router

_T = TypeVar("_T")


@asynccontextmanager
async def open_session(
    address: StoreAddress, name: str, timeout_s: float, tls: TlsFiles
) -> AsyncIterator[RedisSession]:
    """Open a session, until the block ends. No step waits longer than `timeout_s`. Raises StoreFailed."""
    async with AsyncExitStack() as stack:
        base = f"warmroute:{{{name}}}:"
        try:
            await some_found(address, timeout_s)
            client = await connect(address, base, timeout_s, 2 * (BLOCK_S + timeout_s), tls, stack)
            adding, reading = await dedicated(client, stack), await dedicated(client, stack)
        except FAILURES as error:
            failed = failure(error)
            if address.tls and failed.kind == "timeout":  # a server without TLS waits for the end of the first line
                failed = StoreFailed(
                    "timeout", "no answer in time; check that the port uses TLS, which rediss:// requires"
                )
            raise failed from error
        yield RedisSession(client, adding, reading, base, timeout_s)


class RedisSession:
    """One session with the store. Every method raises StoreFailed."""

    def __init__(
        self, client: Redis, adding: DedicatedConnection, reading: DedicatedConnection, base: str, timeout_s: float
    ) -> None:
        """`base` begins all keys. Messages are added and read on connections of their own: this is most of what a
        session does."""
        self._client: Any = client  # in redis-py's types, each command may or may not be awaitable
        self._client.set_response_callback("XREAD", _as_it_is)
        self._adding, self._reading = adding, reading
        self._timeout_s, self._base = timeout_s, base
        self._messages, self._owners, self._routers = f"{base}messages", f"{base}responses", f"{base}routers"
        self._messages_key = self._messages.encode()
        block_ms, keys = int(BLOCK_S * 1_000), (self._messages, self._owners)
        self._add = ("XADD", self._messages, "MAXLEN", "~", MESSAGES_MAX, "*", MESSAGE)
        self._read = ("XREAD", "COUNT", READ_MAX, "BLOCK", block_ms, "STREAMS", *keys)

    # -- messages and owners -----------------------------------------------------------------------------------------

    async def add(self, message: bytes) -> StreamId:
        """Add a message to the stream that all routers read. Returns its id."""
        try:
            reply = await self._adding.ask(*self._add, message, within_s=2 * self._timeout_s)
        except StoreFailed as failed:
            if NO_MORE_IDS in failed.text:
                await self._try(self._client.delete, self._messages)
            raise
        return _checked(_id_of, reply)

    async def read(self, messages_at: StreamId, owners_at: StreamId) -> Page:
        """Return the next messages and owners after these ids. Waits for at most BLOCK_S if there is none."""
        words = *self._read, _text_of(messages_at), _text_of(owners_at)
        reply = await self._reading.ask(*words, within_s=BLOCK_S + 2 * self._timeout_s)
        return _checked(self._page, reply, messages_at, owners_at)

    async def read_owners(self, owners_at: StreamId) -> Page:
        """Return the next owners after this id, without a wait."""
        reply = await self._try(self._client.xread, {self._owners: _text_of(owners_at)}, count=OWNERS_READ_MAX)
        return _checked(self._page, reply, owners_at, owners_at)

    def _page(self, reply: Any, messages_at: StreamId, owners_at: StreamId) -> Page:  # noqa: ANN401 - any reply
        messages, owners = list[tuple[StreamId, bytes]](), list[Entry]()
        for key, entries in reply or ():
            if key == self._messages_key:
                for text, fields in entries:
                    messages_at = _id_of(text)
                    message = _fields(fields).get(MESSAGE, b"")
                    messages.append((messages_at, message if isinstance(message, bytes) else b""))
            else:
                for text, fields in entries:
                    owners_at = _id_of(text)
                    if (owner := _owner(_fields(fields))) is not None:
                        owners.append(owner)
        return Page(messages, owners, messages_at, owners_at)

    async def write_owners(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Store owners of stored responses, about `owners_max` in all; the oldest are dropped."""
        pipe = self._client.pipeline(transaction=False)
        for owner, mark in entries:
            reply = dict(zip(FIELDS if mark else FIELDS[:-1], (*owner, mark) if mark else owner, strict=True))
            pipe.xadd(self._owners, reply, maxlen=owners_max, approximate=True)
        try:
            await self._try(pipe.execute)
        except StoreFailed as failed:
            if NO_MORE_IDS in failed.text:  # routers that are listed anew write their owners again
                await self._try(self._client.delete, self._owners, self._routers)
            raise

    # -- states ------------------------------------------------------------------------------------------------------

    async def put_state(self, router: str, state: bytes, for_s: float) -> bool:
        """Store the complete state of this router for `for_s` seconds. Returns True if the router is listed anew."""
        pipe = self._client.pipeline(transaction=False)
        pipe.set(f"{self._base}state:{router}", state, px=int(for_s * 1_000))
        pipe.sadd(self._routers, router)
        reply = await self._try(pipe.execute)
        return _checked(lambda: bool(reply[1] == 1))

    async def states(self) -> AsyncGenerator[bytes, None]:
        """Yield the state of each router, this one included. A router without a state is no longer listed."""
        names = await self._try(self._client.smembers, self._routers)
        for name in _checked(lambda: sorted(map(bytes.decode, names))[:ROUTERS_MAX]):
            state = await self._try(self._client.get, f"{self._base}state:{name}")
            if isinstance(state, bytes):
                yield state
            else:
                await self._try(self._client.srem, self._routers, name)

    async def leave(self, router: str) -> None:
        """Remove this router's state."""
        await self._try(self._client.delete, f"{self._base}state:{router}")
        await self._try(self._client.srem, self._routers, router)

    # -- parcels -----------------------------------------------------------------------------------------------------

    async def offer(self, key: str, parcel: bytes, waiting_max: int, for_s: float) -> bool:
        """Append a parcel for another router to a stream of a limited lifetime. Returns False if as many wait there."""
        key = self._base + key
        if await self._try(self._client.xlen, key) >= waiting_max:
            return False
        pipe = self._client.pipeline(transaction=False)
        pipe.xadd(key, {MESSAGE: parcel})
        pipe.pexpire(key, int(for_s * 1_000))
        await self._try(pipe.execute)
        return True

    async def take(self, key: str, wait_s: float) -> bytes | None:
        """Remove and return the next parcel; None if none comes in time."""
        key = self._base + key
        wait_s = min(wait_s, BLOCK_S)
        reply = await self._try(
            self._client.xread, {key: "0"}, count=1, block=int(wait_s * 1_000) or 1, within_s=wait_s
        )
        if not reply:
            return None
        id_, parcel = _checked(lambda: (reply[0][1][0][0], _fields(reply[0][1][0][1])[MESSAGE]))
        if not isinstance(parcel, bytes):
            raise StoreFailed("answer", "an invalid Redis answer: a parcel that is not a string")
        await self._try(self._client.xdel, key, id_)
        return parcel

    async def drop(self, key: str) -> None:
        """Remove a stream of parcels."""
        await self._try(self._client.delete, self._base + key)

    async def _try(
        self,
        command: Callable[..., Awaitable[Any]],
        *arguments: Any,  # noqa: ANN401 - any command
        within_s: float = 0.0,
        **named: Any,  # noqa: ANN401 - also
    ) -> Any:  # noqa: ANN401 - also
        try:
            # redis-py's own limits are for each read and write
            async with asyncio.timeout(within_s + 2 * self._timeout_s):
                return await command(*arguments, **named)
        except FAILURES as error:
            raise failure(error) from error


def _as_it_is(response: Any, **_: Any) -> Any:  # noqa: ANN401 - any reply
    return response


def _fields(words: Any) -> dict[Any, Any]:  # noqa: ANN401 - any reply
    """Return the fields of an entry, which are a list of names and values in turn."""
    return dict(zip(words[::2], words[1::2], strict=False)) if words else {}


def _checked(read: Callable[..., _T], *arguments: Any) -> _T:  # noqa: ANN401 - any reply
    """Read a reply, which may have any shape. Raises StoreFailed."""
    try:
        return read(*arguments)
    except BAD_REPLY_ERRORS as error:
        raise failure(error) from error


def _id_of(text: bytes) -> StreamId:
    ms, _, number = text.partition(b"-")
    return int(ms), int(number)


def _text_of(id_: StreamId) -> str:
    return f"{id_[0]}-{id_[1]}"


def _owner(fields: Any) -> Entry | None:  # noqa: ANN401 - any content of the stream
    """Decode an owner; None for an entry that no router wrote."""
    try:
        response_id, replica, tenant = (fields[name].decode() for name in FIELDS[:-1])
        mark = fields.get(FIELDS[-1], b"")
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return None
    return ((response_id, replica, tenant), mark) if isinstance(mark, bytes) else None
