"""Interface of a session with the store, and its failures; it needs no client library."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

StreamId = tuple[int, int]
"""Id of an entry of a stream: the store's clock in ms since 1970, and a number within that millisecond."""

ResponseOwnerEntry = tuple[str, str, str]  # owner of a stored response: id of the response, replica, tenant
Entry = tuple[
    ResponseOwnerEntry, bytes
]  # the same in the store, with the mark of the router that wrote it (message_auth.py)

ZERO_ID: StreamId = 0, 0  # before all entries
REFUSALS = frozenset(("full", "read_only", "denied", "answer"))  # kinds of failures in which the store has answered


class StoreFailed(Exception):
    """The store did not do a requested operation. `kind` is one word of KINDS."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


ODD = "protocol"  # kind of a failure in which the peer does not speak the Redis protocol
KINDS = ("unreachable", "timeout", "refused", "silent", ODD, *sorted(REFUSALS))


class Page(NamedTuple):
    """Entries that were read at once, and the id of the last entry of either stream, also if it is unreadable."""

    messages: list[tuple[StreamId, bytes]]
    owners: list[Entry]
    messages_at: StreamId
    owners_at: StreamId


class Session(Protocol):
    """An open session. Every method raises StoreFailed."""

    async def add(self, message: bytes) -> StreamId:
        """Add a message to the stream that all routers read. Returns its id."""

    async def read(self, messages_at: StreamId, owners_at: StreamId) -> Page:
        """Return the next messages and owners after these ids. Waits for a while if there is none."""

    async def read_owners(self, owners_at: StreamId) -> Page:
        """Return the next owners after this id, without a wait."""

    async def write_owners(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Store owners of stored responses, about `owners_max` in all; the oldest are dropped."""

    async def put_state(self, router: str, state: bytes, for_s: float) -> bool:
        """Store the complete state of this router for `for_s` seconds. Returns True if the router is listed anew."""

    def states(self) -> AsyncGenerator[bytes, None]:
        """Yield the state of each router, this one included."""

    async def leave(self, router: str) -> None:
        """Remove this router's state."""

    async def offer(self, key: str, parcel: bytes, waiting_max: int, for_s: float) -> bool:
        """Append a parcel for another router to a stream of a limited lifetime. Returns False if as many wait there."""

    async def take(self, key: str, wait_s: float) -> bytes | None:
        """Remove and return the next parcel; None if none comes in time."""

    async def drop(self, key: str) -> None:
        """Remove a stream of parcels."""


Open = Callable[[], AbstractAsyncContextManager[Session]]
