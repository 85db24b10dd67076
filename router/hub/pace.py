"""Long work on the event loop, a little at a time."""

from __future__ import annotations

import asyncio
import time

WORK_S = 0.0004  # work without a break, before the event loop goes on


class Pace:
    """`await pace.step()` after each small step of the work: requests go on in between once it took long enough."""

    def __init__(self, work_s: float = WORK_S) -> None:
        self._work_s, self._since_s = work_s, time.perf_counter()
        self.longest_s = 0.0  # longest work without a break, so far

    async def step(self) -> None:
        """A step is done."""
        worked_s = time.perf_counter() - self._since_s
        self.longest_s = max(self.longest_s, worked_s)
        if worked_s >= self._work_s:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
