"""A connection on which bytes are read as they come, without tasks and streams.

Dozens of messages go each second between routers, and each wakes all of them. A client library's streams wake a task
besides for each message: with them, and a task that says messages, sharing took a fourth more CPU
(docs/evidence/routers.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

SLICE_S = 0.0005  # time that replies are taken for in one go, but for the last of them


class ReplyReader(Protocol):
    """Makes replies of bytes, as hiredis does, within limits of its own (bounded.py)."""

    def feed(self, data: bytes) -> None:
        """More bytes have come."""

    def gets(self) -> Any:  # noqa: ANN401 - whatever the other side says
        """The next reply; False where it is not whole yet. Raises what the reader was told to, for bytes that are
        none."""


class Wire(asyncio.Protocol):
    """Takes over an open connection on which nothing is under way. What it was read by before is told of its end."""

    def __init__(
        self,
        transport: asyncio.Transport,
        reader: ReplyReader,
        taken: Callable[[Any], None],
        ended: Callable[[Exception], None],
    ) -> None:
        """`taken` is called with each reply and must not raise; `ended` once, with the reason."""
        self._transport, self._taken, self._ended = transport, taken, ended
        # None once it is over: a session that has ended keeps no bytes, and no cycle of its parts.
        self._reader: ReplyReader | None = reader
        self._before = cast("asyncio.Protocol", transport.get_protocol())
        transport.set_protocol(self)

    def write(self, data: bytes) -> None:
        """Send these bytes; what the system does not take at once is kept."""
        self._transport.write(data)

    def abort(self) -> None:
        """Close the connection at once, without a goodbye of TLS to somebody who may not answer. Nothing is taken or
        told any more."""
        self._let_go()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """More bytes have come (asyncio.Protocol)."""
        if self._reader is None:
            return
        try:
            self._reader.feed(data)
        except Exception as error:
            self._end(error)
        else:
            self._take()

    def _take(self) -> None:
        """Take the replies that are whole; others have a turn where that takes long."""
        begun_s = time.monotonic()
        while self._reader is not None:
            try:
                reply = self._reader.gets()
            except Exception as error:
                return self._end(error)
            if reply is False:
                return None
            self._taken(reply)
            if time.monotonic() - begun_s > SLICE_S:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._go_on)
                return None
        return None

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._take()

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
        self._reader, self._taken, self._ended = None, _ignored, _ignored


def _ignored(_: object) -> None:
    """Take what nobody waits for."""
