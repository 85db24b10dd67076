from __future__ import annotations

import asyncio
import time

from router.telemetry.loop_lag import STALL_S, LoopLagMonitor


def test_what_is_late_is_counted_by_how_late() -> None:
    """Less than STALL_S is nothing; the rest is in the first bucket whose bound is not below it."""
    stalls = LoopLagMonitor()
    for late_s in (0.0, STALL_S / 2, 0.008, 0.03, 0.05, 9.0):
        stalls.late(late_s)
    assert stalls.series[:-1] == [1, 0, 2, 0, 0, 0, 0, 0, 1]
    assert round(stalls.series[-1], 6) == 9.088


async def test_a_loop_that_is_held_up() -> None:
    """Whoever keeps the loop to himself is noticed."""
    stalls = LoopLagMonitor()
    watching = asyncio.create_task(stalls.watch())
    while not any(stalls.series[3:-1]):
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - that is the point
    watching.cancel()
    assert stalls.series[-1] >= 0.05
