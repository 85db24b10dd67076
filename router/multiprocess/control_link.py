"""Worker's connection to the hub, reopened after each break.

Messages of one iteration of the event loop leave in one frame at its end. Ends of leases could wait a millisecond to
share a frame with a placement. That would save the hub a third of its time. But a conversation's next turn may be
placed by another worker before the hub knows that the last one ended. Its placement would be worse than with one
process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from router.multiprocess import protocol

log = logging.getLogger(__name__)

AGAIN_S = 0.05  # pause before connecting again; doubled until a connection lasts LASTED_S
AGAIN_S_MAX = 1.0
LASTED_S = 1.0


class HubLink:
    """Sends messages while connected, and drops them otherwise."""

    def __init__(
        self,
        path: str,
        *,
        opened: Callable[[], list[protocol.FromWorker]],
        heard: Callable[[list[protocol.FromHub]], None],
        broken: Callable[[list[protocol.FromWorker]], None],
        in_flight: Callable[[], int],
        queue_bytes_max: int,
    ) -> None:
        """Create the link.

        - `opened`: returns the first messages of a connection.
        - `broken`: gets the messages that were not sent.
        - `in_flight`: its value is in every frame.
        - `queue_bytes_max`: a hub that leaves more bytes unread is disconnected.
        """
        self._path = path
        self._opened = opened
        self._heard = heard
        self._broken = broken
        self._in_flight = in_flight
        self._queue_bytes_max = queue_bytes_max
        self._out: list[protocol.FromWorker] = []
        self._told_in_flight = 0
        self._link: _Link | None = None
        self._flushing = False
        self.number = 0  # number of the connection, from 1

    @property
    def up(self) -> bool:
        """True if connected; the hub may not accept yet."""
        return self._link is not None

    async def open(self) -> None:
        """Begin to connect, and reconnect until `close`."""
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Send the remaining messages, and close."""
        self._connecting.cancel()
        with suppress(asyncio.CancelledError):
            await self._connecting
        self.flush()
        if self._link is not None:
            link = self._link
            link.transport.close()
            await link.closed.wait()

    async def _keep(self) -> None:
        again_s = AGAIN_S
        while True:
            with suppress(OSError):
                _, link = await self._loop.create_unix_connection(lambda: _Link(self), self._path)
                began_s = self._loop.time()
                await link.closed.wait()
                if self._loop.time() - began_s > LASTED_S:
                    again_s = AGAIN_S
            await asyncio.sleep(again_s)
            again_s = min(again_s * 2, AGAIN_S_MAX)

    def say(self, message: protocol.FromWorker) -> None:
        """Send a message at the end of this iteration. Without a connection it is dropped: the hub has returned all
        leases."""
        if self._link is None:
            return
        self._out.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the messages of this iteration, and the number of requests in progress if that changed."""
        self._flushing = False
        link, out, in_flight = self._link, self._out, self._in_flight()
        if link is None or (not out and in_flight == self._told_in_flight):
            return
        self._out, self._told_in_flight = [], in_flight
        try:
            link.transport.write(protocol.frame(protocol.WorkerFrame(in_flight, out)))
        except protocol.WireError as error:
            link.give_up(error)
            return
        if link.transport.get_write_buffer_size() > self._queue_bytes_max:
            link.transport.abort()

    # -- callbacks of the connection -----------------------------------------------------------------------------

    def on_connected(self, link: _Link) -> None:
        """Send the first messages of a connection."""
        self.number += 1
        self._link, self._out = link, self._opened()
        self.flush()

    def on_frame(self, answers: list[protocol.FromHub]) -> None:
        """Process one frame from the hub."""
        self._heard(answers)

    def on_disconnected(self, link: _Link) -> None:
        """Handle the loss of the hub, or of the connection to it."""
        if self._link is link:
            self._link = None
            unsaid, self._out = self._out, []
            self._broken(unsaid)


class _Link(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, line: HubLink) -> None:
        self._line = line
        self._frames = protocol.Frames()
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport has the methods, but is no subclass
        self._line.on_connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._line.on_frame(protocol.answers_of(body))
        except protocol.WireError as error:
            self.give_up(error)

    def give_up(self, error: protocol.WireError) -> None:
        """Close the connection, and log the reason."""
        log.error(
            "the hub is not understood, or cannot be told",
            extra={"event": "hub_not_understood", "fields": {"why": str(error)}},
        )
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._line.on_disconnected(self)
