"""`python -m loadtest sizing`: cores and memory that warmroute needs for R replicas and S streams.

It runs with its defaults in front of the cheap upstream of `loadtest overhead`, fresh for each number of replicas. The
steps are: without requests (only probes), short requests at the highest rate, and an increasing number of streams.
Last, in front of the largest number of replicas, new prompts fill the prefix index. /metrics is scraped once in every
window. Figures are of the whole process tree: CPU within a window, and the largest memory seen in it. The rule for
numbers that were not measured is in sizing_report.py.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console

from loadtest.common import flags, rivals
from loadtest.common.processes import Process, ProcessError
from loadtest.common.report import Row, progress_bar, report_console, write_json
from loadtest.common.usage import rss_mb, subtract_usage, usage
from loadtest.core_cost.sizing_report import FULL, IDLE, SHORT, STREAMS, SizingError, print_report
from loadtest.proxy_cost import bodies, load
from loadtest.proxy_cost.command import OverheadBench, Plan, bench, stop_when_told
from loadtest.proxy_cost.upstream import RATE_PER_S
from router.config.schema import Settings

REPLICAS, STREAM_NUMBERS = (4, 32, 128), (100, 300, 1_000)
WINDOW_S = 5.0  # /metrics is scraped once in it: three times as often as usual
SHORT_LANES, SHORT_WARM_S = 32, 0.5
LOOK_EVERY_S = 0.2
STARTING_S, STARTING_PER_STREAM_S = 1.0, 0.003  # time until the last stream runs
PAGE_WIDTH = 100  # columns of the table without a terminal
FILL_LANES, FILL_BYTES, FILL_TIMEOUT_S = 8, 200 << 10, 60.0
FILL_ROUND_S = 1.0  # between two readings of the size of the index
# The index is full at this part of its limit, or once a round adds less than this part.
FULL_SHARE, STILL_SHARE = 0.95, 0.005
SCRAPE_TIMEOUT_S = 10.0
NUMBERS_A_CASE = 10_000_000  # each request has a unique number

_INDEX_BYTES = re.compile(r"^warmroute_index_bytes (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that are measured."""

    replicas: tuple[int, ...] = REPLICAS
    streams: tuple[int, ...] = STREAM_NUMBERS
    window_s: float = WINDOW_S
    rate_per_s: float = RATE_PER_S
    index_bytes_max: int = Settings().routing.index_bytes_max
    flags: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of rows of the run."""
        return len(self.replicas) * (2 + len(self.streams)) + 1


@dataclass(slots=True)
class MemorySample:
    """Memory and errors of a running router during a measurement."""

    rss_mb: float = 0.0
    errors: list[str] = field(default_factory=list)


async def scrape(address: load.Address) -> str:
    """Return the router's /metrics. Raises LoadError."""
    timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{address[0]}:{address[1]}/metrics") as response,
        ):
            if response.status != 200:
                raise load.LoadError(f"/metrics answered {response.status}")
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise load.LoadError(f"/metrics did not answer: {error}") from error


async def index_bytes(address: load.Address) -> int:
    """Return the size of the router's index in bytes, as it reports it. Raises LoadError."""
    found = _INDEX_BYTES.search(await scrape(address))
    if found is None:
        raise load.LoadError("/metrics does not contain the index size")
    return int(float(found[1]))


@asynccontextmanager
async def watch_router(address: load.Address, pid: int, every_s: float) -> AsyncIterator[MemorySample]:
    """Scrape the router at once and then every `every_s` seconds, and sample its memory, while the block runs."""
    seen = MemorySample()

    async def scrapes() -> None:
        while True:
            try:
                await scrape(address)
            except load.LoadError as error:
                seen.errors.append(str(error))
            await asyncio.sleep(every_s)

    async def looks() -> None:
        while True:
            seen.rss_mb = max(seen.rss_mb, rss_mb(pid))
            await asyncio.sleep(LOOK_EVERY_S)

    tasks = [asyncio.create_task(scrapes()), asyncio.create_task(looks())]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    seen.rss_mb = max(seen.rss_mb, rss_mb(pid))


# Measurements


class RouterUnderTest:
    """A running warmroute in front of `replicas` replicas."""

    def __init__(self, sizes: Sizes, replicas: int, address: load.Address, process: Process) -> None:
        self._sizes, self._replicas, self._address, self._process = sizes, replicas, address, process
        self._numbers = count(NUMBERS_A_CASE, NUMBERS_A_CASE)

    async def idle(self) -> Row:
        """Return the row without requests: probes and a scrape."""
        pid, window_s = self._process.pid, self._sizes.window_s
        async with watch_router(self._address, pid, window_s) as seen:
            before = usage(pid)
            await asyncio.sleep(window_s)
            measured = load.CpuSample(window_s=window_s)
            measured.close(subtract_usage(before, usage(pid)))
        return self._row(IDLE, measured, seen)

    async def short(self) -> Row:
        """Return the row of short requests at the highest rate."""
        return await self._short(SHORT)

    async def _short(self, case: str) -> Row:
        pid, window_s = self._process.pid, self._sizes.window_s
        asked = load.Loop("short", SHORT_LANES, SHORT_WARM_S, window_s)
        async with watch_router(self._address, pid, window_s) as seen:
            measured = await load.closed_loop(self._address, asked, pid, next(self._numbers))
        row = self._row(case, measured, seen)
        row.requests_per_s = measured.requests / max(1e-9, measured.window_s)
        row.cpu_us_per_request = measured.cpu_s * 1e6 / measured.requests if measured.requests else None
        return row

    async def streams(self, number: int) -> Row:
        """Return the row of `number` streams at a time."""
        sizes, pid = self._sizes, self._process.pid
        starting_s = STARTING_S + number * STARTING_PER_STREAM_S
        asked = load.StreamLoad(number, sizes.window_s, 0.0, sizes.rate_per_s, starting_s)
        async with watch_router(self._address, pid, sizes.window_s) as seen:
            measured = await load.streams([self._address], asked, pid, next(self._numbers))
        row = self._row(STREAMS, measured, seen)
        row.load, row.load_unit = float(number), "streams"
        row.cpu_us_per_chunk = measured.cpu_s * 1e6 / measured.events if measured.events else None
        return row

    async def full(self) -> Row:
        """Fill the index with new prompts, then send short requests; `rss_mb` of the row is with the full index."""
        before_mb = rss_mb(self._process.pid)
        size = await self._fill()
        row = await self._short(FULL)
        row.index_mb, row.expected = size / 1e6, self._sizes.index_bytes_max / 1e6
        row.got = (row.rss_mb or 0.0) - before_mb
        row.note = "expected: MB that the index may take; got: MB that the process grew while it was filled"
        return row

    async def _fill(self) -> int:
        """Send long prompts until the index stops growing. Returns its size in bytes; raises LoadError."""
        template, first, tally = bodies.single(FILL_BYTES), next(self._numbers), load.Tally()
        numbers, going = count(first), True
        async with load.Connections([self._address], FILL_LANES, tally) as lanes:

            def ask(lane: load.Connection) -> None:
                if going and not lane.lost:
                    lane.ask(template.request(next(numbers)), None)

            for lane in lanes:
                lane.done = lambda _, lane=lane: ask(lane)  # type: ignore[misc]
                ask(lane)
            deadline_s, size = asyncio.get_running_loop().time() + FILL_TIMEOUT_S, 0
            while asyncio.get_running_loop().time() < deadline_s:
                await asyncio.sleep(FILL_ROUND_S)
                before, size = size, await index_bytes(self._address)
                limit = self._sizes.index_bytes_max
                if size >= FULL_SHARE * limit or size - before < STILL_SHARE * limit:
                    break
            going = False
            await load.wait_until(
                lambda: not any(lane.busy for lane in lanes), load.ANSWER_TIMEOUT_S, "long prompts were not answered"
            )
        if tally.errors:
            raise load.LoadError(f"while the index was filled: {dict(tally.errors)}")
        return size

    def _row(self, case: str, measured: load.CpuSample, seen: MemorySample) -> Row:
        errors = measured.errors.copy()
        for said in seen.errors:
            errors[said] += 1
        return Row(
            router=rivals.OURS,
            case=case,
            replicas=self._replicas,
            requests=measured.requests,
            errors=errors.total(),
            errors_by_kind=dict(errors),
            rss_mb=seen.rss_mb,
            cpu_cores=measured.cpu_s / max(1e-9, measured.window_s),
            duration_s=measured.window_s,
        )


async def measure(sizes: Sizes, console: Console) -> list[Row]:
    """Run all measurements. Raises LoadError, ProcessError."""
    stop_when_told()
    rows: list[Row] = []
    with progress_bar(console, "sizing", sizes.steps) as told:
        for replicas in sizes.replicas:
            async with bench(Plan((), (), 1, replicas, sizes.window_s, sizes.rate_per_s)) as running:
                await _measure_fleet_size(running, sizes, replicas, rows, told)
    return rows


async def _measure_fleet_size(
    running: OverheadBench, sizes: Sizes, replicas: int, rows: list[Row], told: Callable[[int], None]
) -> None:
    """Measure all rows of one number of replicas."""

    def found(row: Row) -> None:
        rows.append(row)
        told(len(rows))

    limit = ("--set", f"routing.index_bytes_max={sizes.index_bytes_max}")
    router = rivals.ours((*limit, *sizes.flags))
    async with running.run_router(router) as (address, process):
        subject = RouterUnderTest(sizes, replicas, address, process)
        found(await subject.idle())
        found(await subject.short())
        for number in sizes.streams:
            found(await subject.streams(number))
    if replicas == max(sizes.replicas):
        async with running.run_router(router) as (address, process):
            found(await RouterUnderTest(sizes, replicas, address, process).full())


# The command


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(flags.make_list_parser(flags.integer(1, 4_096))(text))))


def parser() -> argparse.ArgumentParser:
    """Return a parser with all flags and their defaults."""
    made = argparse.ArgumentParser(prog="python -m loadtest sizing", description="CPU and memory that warmroute needs.")
    add, default = made.add_argument, Sizes()
    add("--replicas", type=_numbers, default=default.replicas, metavar="N,N", help="numbers of replicas (4,32,128)")
    add(
        "--streams",
        type=_numbers,
        default=default.streams,
        metavar="N,N",
        help="numbers of concurrent streams (100,300,1000)",
    )
    add(
        "--seconds",
        type=flags.positive(),
        default=default.window_s,
        metavar="S",
        help="length of a measurement window in seconds (5)",
    )
    add(
        "--rate",
        type=flags.positive(),
        default=default.rate_per_s,
        metavar="N",
        help="events per second of a stream (30)",
    )
    add(
        "--index-bytes-max",
        type=flags.integer(1),
        default=default.index_bytes_max,
        metavar="N",
        help="routing.index_bytes_max of `warmroute serve` (256 MiB)",
    )
    add(
        "--flag",
        action="append",
        default=[],
        metavar="WORD",
        help="additional argument of `warmroute serve`; repeat for each",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: 1 if requests failed, 2 if something could not be measured."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    more = (options.index_bytes_max, tuple(options.flag))
    sizes = Sizes(options.replicas, options.streams, options.seconds, options.rate, *more)
    try:
        rows = uvloop.run(measure(sizes, Console(stderr=True)))
    except (load.LoadError, ProcessError, rivals.RivalError, OSError) as error:
        print(f"sizing: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    try:
        print_report(report_console(PAGE_WIDTH), rows)
    except SizingError as error:
        print(f"sizing: {error}", file=sys.stderr)
        return 2
    if options.json:
        write_json(options.json, shlex.join(["sizing", *arguments]), rows)
    return 1 if any(row.errors for row in rows) else 0
