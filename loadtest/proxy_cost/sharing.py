"""Cost of shared state between several warmroute routers: CPU per request, with and without sharing.

A number of routers without sharing, and as many with a real store between them, run in front of the same upstream. They
get the same load alternately: conversations of 16 KB, each through any of the routers, with answers that stream 100
events. The figure is the CPU per request of all routers of one kind. It includes probes and messages between requests.
It is the median of the ratios of two consecutive windows.

One more row has the delay of requests by a failing store. Short streams start at a steady rate through routers that
share. The store is first healthy and is then killed, frozen, emptied and filled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from statistics import median

from loadtest.common import rivals
from loadtest.common.processes import Process
from loadtest.common.report import Row, percentile
from loadtest.common.stores import FAULTS, RunningStore, store
from loadtest.common.usage import subtract_usage, usage
from loadtest.proxy_cost import bodies, load
from loadtest.proxy_cost.report import ratio_row

ROUTERS = (2, 4)
LANES, EVENTS = 100, 100  # streams of all routers together, and events of each
RATIO_MAX = 1.05
NUMBERS = 1_000_000  # numbers of requests for one measurement: no router receives one twice
PAIRS = 2  # pairs of windows in a round
SETTLE_S = 3.0  # until streams begin and end evenly
FAILING, FAILING_ROUTERS = "sharing_failing", 2
ADDED_P99_MAX_MS = 2.0
# time before each failure, and its duration: routers continue without the store within a second
BETWEEN_S, DOWN_S = 0.5, 1.0
TEXT = {
    f"sharing_{number}": (
        f"{LANES} streams of {EVENTS} events through {number} routers, with a store between them and without"
    )
    for number in ROUTERS
} | {FAILING: f"short streams through {FAILING_ROUTERS} routers, while the store is {', '.join(FAULTS)}"}

EngineSequence = Callable[[rivals.Rival], AbstractAsyncContextManager[tuple[load.Address, Process]]]
Group = tuple[list[load.Address], list[int]]
"""Addresses and pids of routers."""


def steps(rounds: int) -> int:
    """Return the number of pairs of windows that `rows` needs."""
    return PAIRS * rounds * len(ROUTERS) + rounds


async def rows(
    running: EngineSequence,
    folder: Path,
    rounds: int,
    window_s: float,
    slack: float,
    told: Callable[[], None],
) -> list[Row]:
    """Return a row for each number of routers, and one of a failing store. Raises ProcessError without a store program.

    - `running`: runs one router.
    - The progress callback is called after each pair.
    """
    found = []
    for number in ROUTERS:
        pairs: list[tuple[load.CpuSample, load.CpuSample]] = []
        async with (
            store(folder) as shared,
            _group(running, number, None) as alone,
            _group(running, number, shared.url) as sharing,
        ):
            for turn in range(PAIRS * rounds):
                if turn % 2:  # the order affects a pair, so it alternates
                    second, first = await sharing(window_s), await alone(window_s)
                else:
                    first, second = await alone(window_s), await sharing(window_s)
                pairs.append((first, second))
                told()
        goal = f"CPU per request of {number} routers that share at most {RATIO_MAX:g} x that of as many alone"
        found.append(ratio_row(f"sharing_{number}", pairs, goal, RATIO_MAX, slack))
    return [*found, await _measure_failing_store(running, folder, rounds, slack, told)]


async def _measure_failing_store(
    running: EngineSequence, folder: Path, rounds: int, slack: float, told: Callable[[], None]
) -> Row:
    """Measure the delay of first events while the store fails: the median of the rounds' differences of p99."""
    tally, numbers = load.Tally(), count(NUMBERS, NUMBERS)
    well_ms, later_ms = list[float](), list[float]()
    async with store(folder) as shared, _routers(running, FAILING_ROUTERS, shared.url) as (addresses, _):
        lasts_s = len(FAULTS) * (BETWEEN_S + DOWN_S)
        for _ in range(rounds):
            well = await load.probes(addresses, lasts_s, tally, next(numbers))
            async with asyncio.TaskGroup() as both:
                both.create_task(_fail_in_turn(shared))
                failing = await load.probes(addresses, lasts_s, tally, next(numbers))
            well_ms.append(1e3 * (percentile(well, 99) or 0.0))
            later_ms.append(1e3 * (percentile(failing, 99) or 0.0) - well_ms[-1])
            told()
    got, errors = median(later_ms), tally.errors
    goal = f"p99 of first events while the store fails, ms beyond {median(well_ms):.2f} with one that is well"
    return Row(
        workload=FAILING,
        requests=tally.done,
        errors=errors.total(),
        errors_by_kind=dict(errors),
        goal=goal,
        expected=ADDED_P99_MAX_MS,
        got=round(got, 3),
        ok=not errors and got <= ADDED_P99_MAX_MS * (1 + slack),
    )


async def _fail_in_turn(shared: RunningStore) -> None:
    for fault in FAULTS:
        await asyncio.sleep(BETWEEN_S)
        await shared.fail(fault)
        await asyncio.sleep(DOWN_S)
        await shared.mend(fault)


@asynccontextmanager
async def _routers(
    running: EngineSequence, number: int, url: str | None
) -> AsyncIterator[tuple[list[load.Address], list[int]]]:
    """Run `number` routers, which share through the store at `url`."""
    flags = () if url is None else ("--set", f"peering.redis_url={url}")
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(running(rivals.ours(flags))) for _ in range(number)]
        yield [address for address, _ in routers], [process.pid for _, process in routers]


@asynccontextmanager
async def _group(
    running: EngineSequence, number: int, url: str | None
) -> AsyncIterator[Callable[[float], Awaitable[load.CpuSample]]]:
    """Yield a function that measures a window at `number` routers, which share through the store at `url`."""
    numbers = count(1)
    async with _routers(running, number, url) as (addresses, pids):

        async def measured(window_s: float) -> load.CpuSample:
            return await _conversations(addresses, pids, window_s, next(numbers) * NUMBERS)

        yield measured


async def _conversations(
    addresses: Sequence[load.Address], pids: Sequence[int], window_s: float, first: int
) -> load.CpuSample:
    """Run streams that restart as soon as they end. Returns the CPU of all these processes within a window."""
    tally, found = load.Tally(), load.CpuSample()
    made, going = bodies.streamed_conversations(EVENTS, first), True

    def ask(lane: load.Connection) -> None:
        if going and not lane.lost and tally.errors.total() < load.ERRORS_MAX:
            lane.ask(next(made), None)

    async with load.Connections(addresses, LANES, tally) as lanes:
        for lane in lanes:
            lane.done = lambda _, lane=lane: ask(lane)  # type: ignore[misc]
            ask(lane)
            await asyncio.sleep(SETTLE_S / LANES)  # they end as evenly as they begin
        before, begun_s, done = [usage(pid) for pid in pids], time.perf_counter(), tally.done
        await asyncio.sleep(window_s)
        for pid, earlier in zip(pids, before, strict=True):
            cost = subtract_usage(earlier, usage(pid))
            found.cpu_s += cost.cpu_s
            if cost.ended:
                found.errors["a process ended within the window"] += cost.ended
        found.window_s, found.requests = time.perf_counter() - begun_s, tally.done - done
        going = False
        await load.wait_until(
            lambda: not any(lane.busy for lane in lanes), load.ANSWER_TIMEOUT_S, "streams did not end"
        )
    found.errors += tally.errors
    return found
