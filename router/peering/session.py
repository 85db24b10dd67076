"""Interface of a session with the store, and its failures; it needs no client library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

ResponseOwnerEntry = tuple[str, str, str]  # owner of a stored response: id of the response, replica, tenant
Entry = tuple[
    ResponseOwnerEntry, bytes
]  # the same in the store, with the mark of the router that wrote it (message_auth.py)

REFUSALS = frozenset(("full", "read_only", "denied", "answer"))  # kinds of failures in which the store has answered


class StoreFailed(Exception):
    """The store did not do a requested operation. `kind` is one word of KINDS."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


ODD = "protocol"  # kind of a failure in which the peer does not speak the Redis protocol
KINDS = ("unreachable", "timeout", "refused", "silent", ODD, *sorted(REFUSALS))


class Session(Protocol):
    """An open session. Every method raises StoreFailed, and `listen` never returns otherwise."""

    def publish(self, message: bytes) -> None:
        """Publish a message to all routers, this one included, without a wait. If the store does not take it, `listen`
        fails."""

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Pass every message to `hear` as it arrives."""

    async def fetch_time_ms(self) -> int:
        """Return the store's clock in ms since 1970."""

    async def set_presence(self, router: str, about: bytes, for_s: float) -> bool:
        """Set this router's presence for `for_s` seconds. Returns True if it was already set."""

    async def leave(self, router: str) -> None:
        """Remove this router's presence."""

    async def write(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Store owners of stored responses."""

    async def put(self, key: str, value: bytes, for_s: float) -> None:
        """Store a value for `for_s` seconds, for the router that takes it."""

    async def take(self, key: str) -> bytes | None:
        """Return a value and remove it; None if it does not exist."""

    def read(self, since_ms: int, owners_max: int) -> AsyncIterator[Sequence[Entry]]:
        """Yield owners that were stored since then, a page at a time; about `owners_max` in all."""


Open = Callable[[], AbstractAsyncContextManager[Session]]
