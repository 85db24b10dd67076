from __future__ import annotations

import asyncio
import re
import time

import pytest

from router.telemetry.loop_lag import STALL_S, LoopLagMonitor, with_figures
from router.telemetry.process_totals import CPU_MS
from tests.support.fakes import FakeEngine, running


def test_what_is_late_is_counted_by_how_late() -> None:
    """Less than STALL_S is nothing; the rest is in the first bucket whose bound is not below it."""
    stalls = LoopLagMonitor()
    for late_s in (0.0, STALL_S / 2, 0.008, 0.03, 0.05, 9.0):
        stalls.late(late_s)
    assert stalls.series[:-1] == [1, 0, 2, 0, 0, 0, 0, 0, 1]
    assert round(stalls.series[-1], 6) == 9.088


def test_figures_of_workers_add_up() -> None:
    """What two processes tell is one histogram with our own."""
    ours, other = LoopLagMonitor(), LoopLagMonitor()
    ours.late(0.02)
    other.late(0.02)
    told = {name: 2 * count for name, count in other.figures().items()}
    assert with_figures(ours.series, told)[1] == 3
    assert round(with_figures(ours.series, told)[-1], 6) == 0.06


async def test_a_loop_that_is_held_up() -> None:
    """Whoever keeps the loop to himself is noticed."""
    stalls = LoopLagMonitor()
    watching = asyncio.create_task(stalls.watch())
    while not any(stalls.series[3:-1]):
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - that is the point
    watching.cancel()
    assert stalls.series[-1] >= 0.05


async def test_other_processes_count_on_the_page(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU and stalls that workers tell of are on the hub's page, the stalls with its own."""
    async with running(engine) as app:
        other = LoopLagMonitor()
        for _ in range(3):
            other.late(2.0)
        figures = app.edge.counters() | other.figures() | {CPU_MS: 2_000}
        monkeypatch.setattr(app.edge, "counters", lambda: figures)
        page = app.hub.metrics.page().decode()
    assert "\nwarmroute_worker_cpu_seconds_total 2.0\n" in page
    count = re.search(r"^warmroute_loop_stall_seconds_count (\S+)$", page, re.MULTILINE)
    quick = re.search(r'^warmroute_loop_stall_seconds_bucket{le="1.0"} (\S+)$', page, re.MULTILINE)
    assert count
    assert quick
    assert float(count[1]) - float(quick[1]) >= 3
