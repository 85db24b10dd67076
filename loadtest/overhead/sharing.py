"""What it costs warmroute that several routers share what they know: CPU per request, with it and without.

So many routers that share nothing, and as many with a real store between them, are in front of the same upstream. They
take turns to have the same load: conversations of 16 KB, each asked through any of the routers, and answers that stream
100 events. The figure is the CPU of all routers of one kind for a request, in which probes and what is said while
nobody asks have their part. It is the median of the ratios of two windows, one behind the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

from loadtest.common import rivals, store
from loadtest.common.processes import Process
from loadtest.common.report import Row
from loadtest.common.usage import spent, usage
from loadtest.overhead import bodies, load
from loadtest.overhead.report import ratio_row

ROUTERS = (2, 4)
LANES, EVENTS = 100, 100  # streams of all routers together, and events of each
RATIO_MAX = 1.05
PAIRS = 2  # pairs of windows in a round
SETTLE_S = 3.0  # until streams begin and end evenly
TEXT = {
    f"sharing_{number}": (
        f"{LANES} streams of {EVENTS} events through {number} routers, with a store between them and without"
    )
    for number in ROUTERS
}

Running = Callable[[rivals.Rival], AbstractAsyncContextManager[tuple[load.Address, Process]]]


def steps(rounds: int) -> int:
    """The number of pairs of windows that `rows` needs."""
    return PAIRS * rounds * len(ROUTERS)


async def rows(
    running: Running,
    server: str,
    folder: Path,
    rounds: int,
    window_s: float,
    slack: float,
    told: Callable[[], None],
) -> list[Row]:
    """A row for each number of routers; `running` runs one, and `server` is the store's program. `told` after each
    pair."""
    found = []
    for number in ROUTERS:
        pairs: list[tuple[load.Measured, load.Measured]] = []
        async with (
            store.serving(server, folder) as url,
            _group(running, number, ()) as alone,
            _group(running, number, ("--set", f"shared.url={url}")) as sharing,
        ):
            for turn in range(PAIRS * rounds):
                if turn % 2:  # the first of a pair has an advantage or a disadvantage, so they take turns
                    second, first = await sharing(window_s), await alone(window_s)
                else:
                    first, second = await alone(window_s), await sharing(window_s)
                pairs.append((first, second))
                told()
        goal = f"CPU per request of {number} routers that share at most {RATIO_MAX:g} x that of as many alone"
        found.append(ratio_row(f"sharing_{number}", pairs, goal, RATIO_MAX, slack))
    return found


@asynccontextmanager
async def _group(
    running: Running, number: int, flags: Sequence[str]
) -> AsyncIterator[Callable[[float], Awaitable[load.Measured]]]:
    """Measures a window of this length at so many routers with these flags."""
    numbers = count(1)
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(running(rivals.ours(None, flags))) for _ in range(number)]
        addresses, pids = [address for address, _ in routers], [process.pid for _, process in routers]

        async def measured(window_s: float) -> load.Measured:
            return await _conversations(addresses, pids, window_s, next(numbers) * 1_000_000)

        yield measured


async def _conversations(
    addresses: Sequence[load.Address], pids: Sequence[int], window_s: float, first: int
) -> load.Measured:
    """Streams that begin again as soon as they end; CPU of all these processes within a window."""
    tally, found = load.Tally(), load.Measured()
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
            cost = spent(earlier, usage(pid))
            found.cpu_s += cost.cpu_s
            if cost.ended:
                found.errors["a process ended within the window"] += cost.ended
        found.window_s, found.requests = time.perf_counter() - begun_s, tally.done - done
        going = False
        await load.until(lambda: not any(lane.busy for lane in lanes), load.ANSWER_TIMEOUT_S, "streams did not end")
    found.errors += tally.errors
    return found
