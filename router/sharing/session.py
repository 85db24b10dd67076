"""What the link asks of a session with the store, and what may go wrong with it; no client library is needed for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

Written = tuple[str, str, str]  # owner of a stored response: id of the response, replica, tenant
Entry = tuple[Written, bytes]  # the same in the store, with the mark of the router that wrote it (seals.py)

REFUSALS = frozenset(("full", "read_only", "denied", "answer"))  # kinds of failures in which the store has answered


class StoreFailed(Exception):
    """The store did not do what it was asked. `kind` is one word of KINDS."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


ODD = "protocol"  # kind of a failure in which something answers that is no Redis
KINDS = ("unreachable", "timeout", "refused", "silent", ODD, *sorted(REFUSALS))


class Session(Protocol):
    """An open session. Every method raises StoreFailed, and `listen` never returns otherwise."""

    def say(self, message: bytes) -> None:
        """Publish a message to all routers, this one included, and wait for nothing. Where the store does not take it
        `listen` fails."""

    async def listen(self, hear: Callable[[bytes], None]) -> None:
        """Give every message to `hear` as it comes."""

    async def now_ms(self) -> int:
        """The store's clock in ms since 1970."""

    async def present(self, router: str, about: bytes, for_s: float) -> bool:
        """Say for so long that this router is there. Returns whether that was said already."""

    async def leave(self, router: str) -> None:
        """Say that this router is there no more."""

    async def write(self, entries: Iterable[Entry], owners_max: int) -> None:
        """Keep owners of stored responses."""

    async def put(self, key: str, value: bytes, for_s: float) -> None:
        """Leave something for so long, for whoever takes it."""

    async def take(self, key: str) -> bytes | None:
        """Take what was left, which is gone from then on; None where there is nothing."""

    def read(self, since_ms: int, owners_max: int) -> AsyncIterator[Sequence[Entry]]:
        """Owners that were kept since then, a page at a time; about `owners_max` in all."""


Open = Callable[[], AbstractAsyncContextManager[Session]]
