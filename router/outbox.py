"""Small writes, gathered over one turn of the event loop.

The dearest part of a small write is to wake whoever waits at the other end: some ten microseconds on a virtual
machine, where that is an interrupt to another core. A busy router that writes as it goes wakes the same few peers for
every message. Written together, one after the other, the messages of a turn wake each peer once: a fifth of the
processor time of a short request (loadtest overhead). A turn with little to do ends at once, so nothing waits.

Whoever writes to a transport past the outbox must `flush` first, or bytes change places.
"""

from __future__ import annotations

import asyncio


class Outbox:
    """One per event loop and edge."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[asyncio.Transport, tuple[bytes, ...]]] = []

    def put(self, transport: asyncio.Transport, *pieces: bytes) -> None:
        """Write this at the end of the turn, if the transport is still open then."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append((transport, pieces))

    def flush(self) -> None:
        """Write all that waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for transport, pieces in waiting:
                if not transport.is_closing():
                    transport.writelines(pieces)
