"""Connection with bytes that are read as they arrive, without tasks and streams.

Dozens of messages go each second between routers, and each wakes all of them. A client library's streams also wake a
task for each message. With them, and with a task that publishes messages, sharing took a fourth more CPU
(docs/evidence/routers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from router.eventloop import SHARE_S, Turns


class ReplyReader(Protocol):
    """Parser of replies, as in hiredis, with limits (reply_limits.py)."""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""

    def gets(self) -> Any:  # noqa: ANN401 - any reply
        """Return the next reply; False if it is not complete yet. For invalid bytes it raises the error that it was
        created with."""


class RespProtocol(asyncio.Protocol):
    """Takes over an open, idle connection. Its earlier protocol is notified of its end."""

    def __init__(
        self,
        transport: asyncio.Transport,
        reader: ReplyReader,
        taken: Callable[[Any], None],
        ended: Callable[[Exception], None],
        turns: Turns | None = None,
    ) -> None:
        """Create the wire.

        - `taken`: called with each reply; must not raise.
        - `ended`: called once, with the reason.
        - `turns`: limits the time for replies that arrive without a break. None: turns of the running loop.
        """
        self._transport, self._taken, self._ended = transport, taken, ended
        # None once it is over: a session that has ended keeps no bytes, and no reference cycle of its parts.
        self._reader: ReplyReader | None = reader
        self._before = cast("asyncio.Protocol", transport.get_protocol())
        self._turns = turns or Turns(asyncio.get_running_loop())
        self._left_s = SHARE_S  # time for replies before the next turn; the last reply may exceed it
        self._waits = False
        transport.set_protocol(self)

    def write(self, data: bytes) -> None:
        """Send these bytes. The part that the system does not take at once is buffered."""
        self._transport.write(data)

    def abort(self) -> None:
        """Close the connection at once, without TLS's goodbye to a peer that may not answer. No callback is called any
        more."""
        self._let_go()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process received bytes (asyncio.Protocol)."""
        if self._reader is None:
            return
        begun_s = self._turns.clock()
        try:
            self._reader.feed(data)
        except Exception as error:
            self._end(error)
        else:
            if not self._waits:  # a transport may still deliver data that it had when it was paused
                self._take(begun_s)

    def _take(self, begun_s: float) -> None:
        """Process the complete replies, within the time left since `begun_s`."""
        while self._reader is not None:
            try:
                reply = self._reader.gets()
            except Exception as error:
                return self._end(error)
            if reply is not False:
                self._taken(reply)
            now_s = self._turns.clock()
            self._left_s -= now_s - begun_s
            if self._left_s < 0.0:
                self._waits = True
                self._transport.pause_reading()
                self._turns.enqueue(self._go_on)
                return None
            if reply is False:
                return None
            begun_s = now_s
        return None

    def _go_on(self) -> None:
        """Continue at the next turn."""
        self._waits, self._left_s = False, self._turns.share_s
        if not self._transport.is_closing():
            self._take(self._turns.clock())
        if not self._waits and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed (asyncio.Protocol)."""
        self._before.connection_lost(exc)
        self._end(exc or ConnectionError("the connection was closed"))

    def _end(self, error: Exception) -> None:
        if self._reader is not None:
            ended = self._ended
            self._let_go()
            ended(error)

    def _let_go(self) -> None:
        self._reader, self._taken, self._ended = None, _ignore_event, _ignore_event


def _ignore_event(_: object) -> None:
    """Ignore an event after the end."""
