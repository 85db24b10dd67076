"""Several routers and a real store, small; and what is judged of them."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.common.report import Row, envelope
from loadtest.common.stores import FAULTS
from loadtest.docgen.markdown import PageError
from loadtest.docgen.replay import replayed_block
from loadtest.replay.demo import WORKLOADS
from loadtest.replay.routers import ALONE, FAILING, ONE, SHARING, cycle_store_faults, fleet, goals, run_way, slowest

PATIENCE_S = 120.0  # wall seconds that a client waits, since a busy machine is no failure
SCALE = 40.0


@pytest.mark.long
async def test_routers_share_a_run() -> None:
    """Requests go to routers in turn, and none fails, with a store and without."""
    part = WORKLOADS[0].replace_replay(
        requests_max=24, output_tokens_max=16, time_scale=SCALE, timeout_s=PATIENCE_S * SCALE
    )
    for way in (SHARING, ALONE):
        row, seen = await run_way(part, way, 2, Console(file=io.StringIO()))
        assert (row.requests, row.failed, seen) == (24, 0, [])


@pytest.mark.long
async def test_a_store_that_fails_comes_back(tmp_path: Path) -> None:
    """Each kind of failure is made and ended, and the routers are whole after each."""
    seen: list[Row] = []
    async with fleet(WORKLOADS[0], FAILING, 2, tmp_path) as at:
        assert at.store is not None
        work = asyncio.create_task(cycle_store_faults(at, at.store, seen, "agent"))
        while len(seen) < len(FAULTS) and not work.done():
            await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.wait((work,))
    assert [row.goal for row in seen] == [f"whole again after the store was {fault}, s" for fault in FAULTS]


@pytest.mark.parametrize(("share", "kept"), [(1.0, True), (0.953, True), (0.94, False), (None, False)])
def test_several_routers_are_held_against_one(share: float | None, kept: bool) -> None:
    """Within 5 % of one router's figures is as promised; worse, and what was not measured, is missed."""

    def row(way: str, worse: float | None) -> Row:
        times = dict.fromkeys(("ttft_p90_s", "e2e_p90_s"), worse and 1 / worse)
        rates = dict.fromkeys(("token_hit_rate", "output_tokens_per_s"), worse)
        return Row(workload="agent", policy=way, errors=0, rejected=0, **times, **rates)  # type: ignore[arg-type]  # fields

    judged = goals([row(ONE, 1.0), row(SHARING, share), row(FAILING, 1.0)])
    assert [each.ok for each in judged] == [kept] * 4 + [True]
    failed = Row(workload="agent", policy=FAILING, errors=1, rejected=0)
    assert goals([row(ONE, 1.0), row(SHARING, share), failed])[-1].ok is False


def test_the_slowest_return_counts() -> None:
    """Of several failures of one kind the slowest is told."""
    rows = [Row(workload="agent", goal=goal, got=got) for goal, got in (("a", 0.1), ("b", 0.3), ("a", 0.9), ("b", 0.2))]
    assert [(row.goal, row.got) for row in slowest(rows)] == [("a", 0.9), ("b", 0.3)]


def test_the_page_has_what_was_measured_and_what_was_missed() -> None:
    """The block has a line for each way, what was judged and missed, and the command; other rows are refused."""
    measured = [
        Row(workload="agent", policy=way, requests=24, errors=0, token_hit_rate=0.5, ttft_p90_s=1.0, e2e_p90_s=2.0)
        for way in (ONE, SHARING)
    ]
    judged = [
        Row(workload="agent", goal="the first", expected=1.05, got=1.01, ok=True),
        Row(workload="agent", goal="the second", expected=0.95, got=None, ok=False),
    ]
    text = replayed_block(envelope("routers --check --json somewhere.json", [*measured, *judged]))
    assert "`python -m loadtest routers --check --json replayed.json`" in text
    for way in (ONE, SHARING):
        assert f"| agent | {way} | 24 | 0 | 50.0 % |" in text
    assert text.endswith("| agent | the first | 1.05 | 1.010 | met |\n| agent | the second | 0.95 | - | missed |")
    for rows in (measured, judged, []):
        with pytest.raises(PageError):
            replayed_block(envelope("routers", rows))
