"""How much is read from clients and engines before all others have had their turns of the event loop.

libuv reads up to 32 full buffers from one socket before it looks at the next, 8 MB, which take 6 ms and more. So a
connection that has brought TURN_BYTES, or has more to parse than it may in one turn, is not read any further in this
turn. Those that wait have one turn of the loop in eight (loop.Turns), in which a few of them go on, and fewer where
that takes long. What refused clients go on sending is dropped, so that they read their refusal, but slowly: it would
take the loop's time as fast as the network is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.loop import Turns

TURN_BYTES = 256_000  # bytes of a connection in one turn; a read of so many filled uvloop's buffer
CHUNK_BYTES = 96  # what a chunk counts as besides: it takes 0.3 us to parse, which so many bytes take to pass
READS_A_TURN = 4  # connections that go on in such a turn; a full read takes some 0.1 ms
TURN_S = 0.001  # time in such a turn after which no other connection goes on
DROPPED_BYTES_MAX, DROPPED_IN_S = 1 << 20, 0.01  # dropped for all refused clients together in so many seconds


class Pace:
    """The pace of one server."""

    __slots__ = ("_dropped_bytes", "_loop", "_paused", "_timed", "clock", "turns")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` goes on within a turn, as the loop's own does not."""
        self.clock = clock
        self.turns = Turns(loop, clock, calls_max=READS_A_TURN, turn_s=TURN_S)  # of reads that go on
        self._loop = loop
        self._dropped_bytes = 0  # since the timer was set
        self._paused: list[asyncio.Transport] = []
        self._timed = False

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
