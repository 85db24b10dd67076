"""How often, and how long, an event loop was kept from its turn.

A timer is due every LOOK_S; how late it is called is how long something else held the loop, or how long the machine
gave us no CPU. While a loop stalls nobody on it is served, so this is the first thing to look at when everything is
slow. Only what is late by STALL_S counts: below that is the grain of the clock, and nothing to act on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Mapping

LOOK_S = 0.1
STALL_S = 0.005
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STALLS = "stalls:"  # and a bucket's number: how an edge of another process tells the hub
STALLED_US = "stalled_us"


class Stalls:
    """`series` is a histogram's: its buckets, the one without bound last, then the sum in seconds."""

    def __init__(self) -> None:
        self.series = [0.0] * (len(BOUNDS_S) + 2)

    async def watch(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.late(loop.time() - due_s)

    def late(self, late_s: float) -> None:
        """The loop came so late to a timer."""
        if late_s >= STALL_S:
            self.series[bisect_left(BOUNDS_S, late_s)] += 1
            self.series[-1] += late_s

    def figures(self) -> dict[str, int]:
        """Whole numbers, to be added up over processes."""
        *counts, total_s = self.series
        return {f"{STALLS}{n}": int(count) for n, count in enumerate(counts)} | {STALLED_US: int(total_s * 1e6)}


def with_figures(series: list[float], figures: Mapping[str, int]) -> list[float]:
    """A series, and what others have told of theirs."""
    *counts, total_s = series
    return [
        *(count + figures.get(f"{STALLS}{n}", 0) for n, count in enumerate(counts)),
        total_s + figures.get(STALLED_US, 0) / 1e6,
    ]
