"""Number and length of stalls of an event loop.

A timer is due every LOOK_S. Its delay is the time for which other code held the loop, or for which the machine gave the
process no CPU. A stalled loop serves no request, so this is the first metric to check if everything is slow. Only
delays of at least STALL_S count: smaller ones are within the resolution of the clock.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left

LOOK_S = 0.1
STALL_S = 0.005
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LoopLagMonitor:
    """Histogram of stalls. `series` has the buckets, the unbounded one last, then the sum in seconds."""

    def __init__(self) -> None:
        self.series = [0.0] * (len(BOUNDS_S) + 2)

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.late(loop.time() - due_s)

    def late(self, late_s: float) -> None:
        """Count a timer that the loop called `late_s` seconds late."""
        if late_s >= STALL_S:
            self.series[bisect_left(BOUNDS_S, late_s)] += 1
            self.series[-1] += late_s
