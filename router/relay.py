"""Bytes from engine to client: each piece is written as it came, and looked at as little as possible.

What must be known of a stream is known from cheap signs: events are counted by their blank lines, and usage is read
once, at the end, from the last few kilobytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from router.core.dialects import Dialect
from router.core.sse import EventSplitter

TAIL_BYTES = 8 << 10


class ClientLeft(Exception):
    """Writing to the client failed."""


@dataclass(slots=True)
class Relayed:
    """What was seen of an answer while it passed."""

    events: int = 0
    body_bytes: int = 0
    last_s: float = 0.0
    _tail: deque[bytes] = field(default_factory=deque)
    _tail_bytes: int = 0

    def see(self, piece: bytes) -> None:
        """Take note of a piece."""
        self.body_bytes += len(piece)
        self.events += piece.count(b"\n\n") or piece.count(b"\n\r\n")
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def tail(self) -> bytes:
        """At least the last TAIL_BYTES, if there were as many."""
        return b"".join(self._tail)


async def relay(
    head: bytes,
    pieces: AsyncIterator[bytes],
    response: web.StreamResponse,
    relayed: Relayed,
    clock: Callable[[], float],
    strip_usage: Dialect | None = None,
    begun: Callable[[bytes], bool] | None = None,
) -> None:
    """Write a body to the client: `head`, then `pieces`. With `strip_usage`, the event that we asked for is left out;
    `begun` is shown the pieces behind the head until it says True.

    Raises ClientLeft when the client does, and whatever `pieces` raises.
    """
    splitter = EventSplitter() if strip_usage else None

    async def pass_on(piece: bytes) -> None:
        relayed.see(piece)
        if splitter is not None and strip_usage is not None:
            piece = b"".join(e for e in splitter.feed(piece) if not strip_usage.is_usage_event(e))
        if piece:
            try:
                await response.write(piece)
            except ConnectionError as error:
                raise ClientLeft from error

    await pass_on(head)
    async for piece in pieces:
        if begun is not None and begun(piece):
            begun = None
        await pass_on(piece)
    relayed.last_s = clock()
    try:
        if splitter is not None and (rest := splitter.close()):
            await response.write(rest)
        await response.write_eof()
    except ConnectionError as error:
        raise ClientLeft from error
