"""The demo's workloads through one router, through several that share a store, and through several independent ones.

Each run has fresh replicas, fresh router processes, and a fresh store; clients send each request to the next router in
rotation. Goals compare the medians of the sharing routers with those of one router: the hit rate by the engines' own
counters, the p90 of times to first token and of whole answers, and output tokens per second. In one more run of each
workload the store fails repeatedly: it is killed, frozen, emptied, and filled. No request may fail because of that, and
all routers must have complete state again within a second of the store's return.

The conversations run twice. Their trace has its times in whole multiples of 3 s, so that all requests of one such time
arrive at one moment, before the routers can have received each other's updates. `conversation-spread` spreads them over
these 3 s.

The engines' clock runs `--time-scale` times as fast as real time, and the store's does not: 5 ms on the way to the
store are 25 ms of the engines' time at the default scale.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console

from loadtest.common import flags
from loadtest.common.processes import ProcessError, engines, router
from loadtest.common.report import Row, merge_rows, progress_bar
from loadtest.common.stores import FAULTS, RunningStore, store
from loadtest.common.traces import shipped_trace
from loadtest.replay.demo import CALIBRATION, MODEL, REPLICAS, WORKLOADS, DemoWorkload
from loadtest.replay.run import run_replay
from loadtest.replay.shared import report_results, run_benchmark

ONE, SHARING, FAILING, ALONE = "one", "sharing", "failing", "alone"
WAYS = (ONE, SHARING, FAILING, ALONE)
LOSS_MAX = 0.05  # share of one router's figure by which several may be worse
WHOLE_MAX_S = 1.0  # longest time from the store's return until all routers have complete state
DOWN_S = 1.5  # time for which the store fails; routers notice within a second
BETWEEN_S = 2.0  # time between two failures
LOOK_S = 0.02
WHOLE_TIMEOUT_S = 30.0
TIMEOUT_S = 10.0
TIME_SCALE = 5.0
TRACE_CLOCK_S = 3.0  # times of Mooncake's traces are whole multiples of this
REQUESTS = 150  # requests of a run; with more, all runs together would take hours
RUNS_MAX = 25


@dataclass(frozen=True, slots=True)
class Fleet:
    """Target of a run: URLs of routers, of their admin listeners, and of replicas, and the routers' shared store."""

    urls: tuple[str, ...]
    admin_urls: tuple[str, ...]
    replicas: tuple[str, ...]
    store: RunningStore | None


@asynccontextmanager
async def fleet(workload: DemoWorkload, way: str, count: int, folder: Path) -> AsyncIterator[Fleet]:
    """Run fresh replicas and routers in front of them, with a shared store if `way` has one. Raises ProcessError."""
    async with AsyncExitStack() as stack:
        scale = workload.replay.time_scale
        at = await stack.enter_async_context(engines(REPLICAS, MODEL, CALIBRATION, workload.kv_tokens, scale))
        shared = await stack.enter_async_context(store(folder)) if way in (SHARING, FAILING) else None
        routers = [
            await stack.enter_async_context(router(at, policy="warm", settings=_settings(shared, number)))
            for number in range(1 if way == ONE else count)
        ]
        urls, admin_urls = zip(*routers, strict=True)
        found = Fleet(urls, admin_urls, tuple(at), shared)
        if shared is not None:
            await wait_until_connected(found)
        yield found


def _settings(shared: RunningStore | None, number: int) -> tuple[str, ...]:
    return () if shared is None else (f"peering.redis_url={shared.url}", f"peering.router_id=router-{number}")


async def wait_until_connected(fleet: Fleet) -> None:
    """Wait until each router has received the state of all others. Raises ProcessError after WHOLE_TIMEOUT_S."""
    async with aiohttp.ClientSession() as session:

        async def whole(url: str) -> bool:
            with suppress(aiohttp.ClientError, KeyError, TypeError):
                async with session.get(f"{url}/admin/replicas") as answer:
                    said = (await answer.json())["sharing"]
                    return bool(said["whole"]) and len(said["routers"]) + 1 == len(fleet.urls)
            return False

        deadline_s = time.monotonic() + WHOLE_TIMEOUT_S
        while not all(await asyncio.gather(*map(whole, fleet.admin_urls))):
            if time.monotonic() > deadline_s:
                raise ProcessError("the routers do not receive each other's messages")
            await asyncio.sleep(LOOK_S)


# The store fails


async def cycle_store_faults(fleet: Fleet, shared: RunningStore, rows: list[Row], workload: str) -> None:
    """Inject one store fault after the other, until cancelled. Each adds a row with the routers' recovery time."""
    number = 0
    while True:
        await asyncio.sleep(BETWEEN_S)
        fault = FAULTS[number % len(FAULTS)]
        number += 1
        await shared.fail(fault)
        try:
            await asyncio.sleep(DOWN_S)
        finally:
            await asyncio.shield(shared.mend(fault))
        back_s = time.monotonic()
        await wait_until_connected(fleet)
        got = time.monotonic() - back_s
        goal = f"whole again after the store was {fault}, s"
        rows.append(Row(workload=workload, goal=goal, expected=WHOLE_MAX_S, got=got, ok=got <= WHOLE_MAX_S, timed=True))


@asynccontextmanager
async def run_in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run the work until the block ends. If it fails, the end of the block raises its exception."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


# Runs


async def run_way(workload: DemoWorkload, way: str, count: int, console: Console) -> tuple[Row, list[Row]]:
    """Run one workload in one way. Returns its row, and the rows of the store's failures.

    Raises ReplayError, ProcessError, TraceError.
    """
    trace, settings = shipped_trace(workload.trace), workload.replay
    total = min(settings.requests_max, trace.request_count)
    seen: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="warmroute-routers-") as folder:
        async with fleet(workload, way, count, Path(folder)) as at:
            with progress_bar(console, f"{settings.workload}, {way}", total) as progress:
                asked = replace(settings, url=at.urls[0], more_urls=at.urls[1:], replicas=at.replicas, policy=way)
                if way != FAILING or at.store is None:
                    return await run_replay(trace, asked, progress), seen
                async with run_in_background(cycle_store_faults(at, at.store, seen, settings.workload or "")):
                    row = await run_replay(trace, asked, progress)
    return row, seen


FIGURES = (
    ("token hit rate, minimum relative to one router", "token_hit_rate", False),
    ("p90 TTFT, maximum relative to one router", "ttft_p90_s", True),
    ("p90 of complete answers, maximum relative to one router", "e2e_p90_s", True),
    ("output tokens per second, minimum relative to one router", "output_tokens_per_s", False),
)


def goals(rows: Sequence[Row], slack: float = 0.0) -> list[Row]:
    """Return judged rows that compare the medians of sharing routers with those of one router.

    A further row per workload requires that no request failed while the store failed.
    """
    by_name, found = {(row.workload, row.policy): row for row in rows}, list[Row]()
    for workload in dict.fromkeys(row.workload for row in rows):
        one, sharing = by_name[workload, ONE], by_name[workload, SHARING]
        for goal, name, most in FIGURES:
            before, after = getattr(one, name), getattr(sharing, name)
            got = after / before if before and after is not None else None
            expected = 1 + LOSS_MAX if most else 1 - LOSS_MAX
            allowed = expected * (1 + slack) if most else expected / (1 + slack)
            ok = got is not None and (got <= allowed if most else got >= allowed)
            found.append(Row(workload=workload, goal=goal, expected=expected, got=got, ok=ok, timed=True))
        lost = float((by_name[workload, FAILING].errors or 0) + (by_name[workload, FAILING].rejected or 0))
        goal = "requests that failed while the store did"
        found.append(Row(workload=workload, goal=goal, expected=0.0, got=lost, ok=not lost))
    return found


def slowest(rows: Sequence[Row]) -> list[Row]:
    """Return the slowest recovery for each kind of store failure."""
    found: dict[tuple[str | None, str | None], Row] = {}
    for row in rows:
        key = row.workload, row.goal
        if key not in found or (row.got or 0.0) > (found[key].got or 0.0):
            found[key] = row
    return list(found.values())


def workloads_replayed() -> list[DemoWorkload]:
    """Return the demo's workloads, and its conversations with spread arrivals."""
    agent, conversation = WORKLOADS[:2]
    name = f"{conversation.replay.workload}-spread"
    return [agent, conversation, conversation.replace_replay(workload=name, spread_s=TRACE_CLOCK_S)]


# The command


async def _routers(options: argparse.Namespace, command: str) -> int:
    console, errors = Console(), Console(stderr=True)
    scale = {"requests_max": options.requests, "time_scale": options.time_scale}
    workloads = [workload.replace_replay(**scale) for workload in workloads_replayed()]
    errors.print("\n".join(workload.describe() for workload in workloads), highlight=False, soft_wrap=True)
    rows, seen = list[Row](), list[Row]()
    for workload in workloads:
        runs: dict[str, list[Row]] = {way: [] for way in WAYS}
        for turn in range(options.runs):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                row, faults = await run_way(workload.replace_replay(seed=1 + turn), way, options.routers, errors)
                runs[way].append(row)
                seen += faults
        medians = ("token_hit_rate", "ttft_p50_s", "ttft_p90_s", "e2e_p90_s", "output_tokens_per_s")
        rows += [merge_rows(found, medians, ("errors", "rejected")) for found in runs.values()]
    judged = [*goals(rows, options.slack), *slowest(seen)]
    return report_results(console, rows, judged, options, command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a request failed, with --check also if a goal was missed; 2 if it could not measure."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    return run_benchmark("routers", _routers(options, " ".join(["routers", *arguments])))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest routers",
        description="Run the demo's workloads through one router, and through several with and without a store.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--routers", type=flags.integer(2, 16), default=4, help="number of routers")
    parser.add_argument("--runs", type=flags.integer(1, RUNS_MAX), default=3, help="runs of each workload and setup")
    parser.add_argument("--requests", type=flags.integer(1), metavar="N", default=REQUESTS, help="requests of each run")
    scale_help = "simulated seconds per wall second of the engines; the store runs in real time"
    parser.add_argument("--time-scale", type=flags.positive(), metavar="X", default=TIME_SCALE, help=scale_help)
    parser.add_argument("--slack", type=flags.number(), default=0.0, help="tolerance of figures, as a fraction")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser
