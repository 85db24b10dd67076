"""How much is read from clients and engines before all others have had their turn of the event loop.

libuv reads up to 32 full buffers from one socket before it looks at the next, 8 MB, which take 6 ms and more. So a
connection that filled a buffer, or has more to parse than it may in one turn, is not read any further in this turn, and
of those that wait only a few go on in each turn, and fewer where that takes long. What refused clients go on sending is
dropped, so that they read their refusal, but slowly: it would take the loop's time as fast as the network is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

FULL_BYTES = 256_000  # a read of so many bytes filled uvloop's buffer; asyncio's own has 262,144
READS_A_TURN = 4  # such reads in a turn of the loop; one takes some 0.1 ms
TURN_S = 0.002  # time in a turn of the loop after which no other connection goes on
DROPPED_BYTES_MAX, DROPPED_IN_S = 1 << 20, 0.01  # dropped for all refused clients together in so many seconds


class Pace:
    """The pace of one server."""

    __slots__ = ("_dropped_bytes", "_loop", "_paused", "_timed", "_turns", "clock", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` goes on within a turn, as the loop's own does not."""
        self.clock = clock
        self._loop = loop
        self.waiting: deque[Callable[[], None]] = deque()  # reads of connections that wait for their turn
        self._dropped_bytes = 0  # since the timer was set
        self._paused: list[asyncio.Transport] = []
        self._timed = False
        self._turns = False  # the next turn of the loop calls `_turn`

    def later(self, read_on: Callable[[], None]) -> None:
        """Call `read_on`, which reads a connection again, in one of the next turns of the loop."""
        self.waiting.append(read_on)
        self._next()

    def _next(self) -> None:
        if self.waiting and not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Each of those that wait may wait again at once, for the turn after this one."""
        waiting, until_s = self.waiting, self.clock() + TURN_S
        try:
            for _ in range(min(READS_A_TURN, len(waiting))):
                waiting.popleft()()
                if self.clock() > until_s:
                    break
        finally:
            self._turns = False
            self._next()

    def dropped(self, transport: asyncio.Transport, size: int) -> None:
        """So many bytes of a refused client were dropped: it is not read for a moment where they are too many."""
        self._dropped_bytes += size
        if self._dropped_bytes > DROPPED_BYTES_MAX and not transport.is_closing():
            transport.pause_reading()
            self._paused.append(transport)
        if not self._timed:
            self._timed = True
            self._loop.call_later(DROPPED_IN_S, self._drop_on)

    def _drop_on(self) -> None:
        paused, self._paused = self._paused, []
        self._dropped_bytes, self._timed = 0, False
        for transport in paused:
            if not transport.is_closing():
                transport.resume_reading()
