"""Limits the bytes read from each client and engine before all others have had their turns of the event loop.

libuv reads up to 32 full buffers from one socket before it looks at the next one: 8 MB, which take 6 ms and more. A
connection is therefore not read further in this turn after TURN_BYTES, or if it has more to parse than one turn allows.
Waiting connections get one turn of the loop in eight (loop.Turns). A few of them continue in it, and fewer if they take
long. Bytes that refused clients continue to send are dropped, so that they read their refusal. They are dropped slowly,
because otherwise they would take the loop's time at the speed of the network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.eventloop import Turns

TURN_BYTES = 256_000  # bytes of a connection in one turn; a read of that size filled uvloop's buffer
CHUNK_BYTES = 96  # bytes added per chunk: it takes 0.3 us to parse, which is the time to relay 96 bytes
READS_A_TURN = 4  # connections that continue in such a turn; a full read takes about 0.1 ms
TURN_S = 0.001  # time in such a turn after which no other connection continues
# bytes dropped for all refused clients together in DROPPED_IN_S seconds
DROPPED_BYTES_MAX, DROPPED_IN_S = 1 << 20, 0.01


class ReadFairness:
    """Read scheduler of one server."""

    __slots__ = ("_dropped_bytes", "_loop", "_paused", "_timed", "clock", "turns")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` advances within a turn, unlike the loop's own."""
        self.clock = clock
        self.turns = Turns(loop, clock, calls_max=READS_A_TURN, turn_s=TURN_S)  # turns of reads that continue
        self._loop = loop
        self._dropped_bytes = 0  # since the timer was set
        self._paused: list[asyncio.Transport] = []
        self._timed = False

    def note_dropped(self, transport: asyncio.Transport, size: int) -> None:
        """Account for `size` dropped bytes of a refused client. It is not read for a moment if these are too many."""
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
