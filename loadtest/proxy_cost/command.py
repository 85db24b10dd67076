"""`python -m loadtest overhead`: cost of a router, compared with nginx and the LLM routers that are installed here.

Routers run one at a time in front of the same cheap upstream, in rotation. Every round restarts each of them, in
another order, so that other load on the machine affects all equally. Figures are medians of the rounds. CPU is user +
system of a router's whole process tree within a window of steady load. With --check, a case that misses its goal is
measured again in the same number of rounds before the miss counts. The cases before it are repeated too, because a
router must search all it has learned.

All run with their cache-aware policy (nginx has none). warmroute runs with its defaults: warm policy, metrics, and the
log line of each request. The log goes to a file, like the output of all routers. Added TTFT is the percentile through
the router minus the percentile of the same streams directly to the upstream, in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import pstats
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest.common import envoy, rivals, stores
from loadtest.common.processes import READY, Process, ProcessError, free_port, run_process, wait_until_ready
from loadtest.common.report import Row, progress_bar, report_console, write_json
from loadtest.common.usage import rss_mb
from loadtest.proxy_cost import answers, bodies, extremes, failover, load, observatory, picker, sharing
from loadtest.proxy_cost.options import parser
from loadtest.proxy_cost.report import CASES, EXTRAS, Case, CaseRun, goals, print_report, row_of, write_chart

READY_EVERY_S = 0.05
WARM_S, IDLE_S = 0.5, 0.3
PROBES_S = 1.5  # times to the first event, 160 a second
LONG_PROMPTS_S = 4.0
PAGE_WIDTH = 120  # columns of the table without a terminal
NUMBERS_A_CASE = 10_000_000  # requests have unique numbers


@dataclass(frozen=True, slots=True)
class Plan:
    """The measured cases and routers, and the durations."""

    cases: tuple[str, ...]
    routers: tuple[rivals.Rival, ...]
    rounds: int
    replicas: int
    window_s: float
    rate_per_s: float
    flags: tuple[str, ...] = ()
    """Flags of `warmroute serve` if it is started separately from `routers`."""
    slack: float = 0.0
    again: bool = False
    """True if a case that misses its goal is measured again in the same number of rounds."""


class OverheadBench:
    """The running upstream, and the measurements so far."""

    def __init__(self, plan: Plan, folder: Path, urls: Sequence[str]) -> None:
        self._plan, self._folder, self.urls = plan, folder, urls
        self._numbers = count(NUMBERS_A_CASE, NUMBERS_A_CASE)
        self._direct: dict[tuple[int, str], load.CpuSample] = {}
        self.turns: dict[tuple[str, str], list[CaseRun]] = {}
        self.extras: list[Row] = []
        self.absent: dict[str, str] = {}

    @property
    def replicas(self) -> list[load.Address]:
        """The addresses at which the upstream listens."""
        return [("127.0.0.1", int(url.rpartition(":")[2])) for url in self.urls]

    @property
    def steps(self) -> int:
        """The total number of measured cases."""
        plan, extras = self._plan, self._extras
        of_observatory = observatory.steps(plan.rounds) - 1 if "observatory" in extras else 0
        of_sharing = sharing.steps(plan.rounds) - 1 if "sharing" in extras else 0
        of_continuing = failover.steps(plan.rounds) - 1 if "continuing" in extras else 0
        extra = len(extras) + of_observatory + of_sharing + of_continuing
        return plan.rounds * len(plan.routers) * len(self._cases) + extra

    @property
    def _cases(self) -> list[Case]:
        return [case for name, case in CASES.items() if name in self._plan.cases]

    @property
    def _extras(self) -> list[str]:
        ours = any(router.name == rivals.OURS for router in self._plan.routers)
        return [name for name in EXTRAS if name in self._plan.cases and ours]

    async def run(self, told: Callable[[int], None]) -> None:
        """Run all rounds, then the measurements of warmroute alone. `told` is called with the number of finished
        cases."""
        rounds, also = self._plan.rounds, count(1)
        for turn in range(rounds if self._cases else 0):
            await self._round(turn, self._cases, lambda: told(next(also)))
        missed = {row.case for row in self.rows() if row.ok is False} if self._plan.again else set()
        last = max((at + 1 for at, case in enumerate(self._cases) if case.name in missed), default=0)
        for turn in range(rounds, 2 * rounds if last else rounds):
            await self._round(turn, self._cases[:last], lambda: None)  # the case comes after the same cases as before
        for name in self._extras:
            self.extras += await self._extra(name, lambda: told(next(also)))

    async def _round(self, turn: int, cases: Sequence[Case], told: Callable[[], None]) -> None:
        """Measure these cases at all routers, with a rotating start, and call the callback after each."""
        for case in cases:
            if case.streams:
                self._direct[turn, case.name] = await self.measure(case, self.replicas, None)
        at, routers = turn % len(self._plan.routers), self._plan.routers
        for router in (*routers[at:], *routers[:at]):
            await self._turn(router, turn, cases)
            for _ in cases:
                told()

    async def _extra(self, name: str, told: Callable[[], None]) -> list[Row]:
        """Run one measurement of warmroute alone."""
        plan = self._plan
        if name == "continuing":
            return await failover.rows(self._run_observed, plan.rounds, plan.slack, told)
        if name == "observatory":
            return await observatory.rows(self._run_observed, plan.rounds, plan.slack, told, again=plan.again)
        if name == "picker":
            return await self._picker(told)
        if name == "sharing":
            return await self._measure_sharing(told)
        router = next(r for r in plan.routers if r.name == rivals.OURS)
        async with self.run_router(router) as (address, process):
            if name == "slow_reader":
                row = await extremes.slow_reader(address, process.pid, self.replicas, plan.rate_per_s)
            else:
                row = await extremes.long_prompts(address, self._folder, LONG_PROMPTS_S, self._plan.rounds)
        told()
        return [replace(row, replicas=len(self.urls))]

    async def _picker(self, told: Callable[[], None]) -> list[Row]:
        """Measure the cost of warmroute as the picker of a gateway, if Envoy is installed."""
        plan, program = self._plan, envoy.program()
        if program is None:
            self.absent["picker"] = f"Envoy is not installed in {envoy.ENVIRONMENT}: run python -m tests.envoy.install"
            told()
            return []
        async with picker.run_picker(program, self._folder, self.urls) as run:
            found = await picker.rows(run, self.replicas[0], plan.window_s, plan.rate_per_s, plan.slack, told)
        return [replace(row, replicas=len(self.urls)) for row in found]

    async def _measure_sharing(self, told: Callable[[], None]) -> list[Row]:
        """Measure the cost of a shared store for several routers, if this machine has a store."""
        plan = self._plan
        if not stores.programs():
            self.absent["sharing"] = stores.NO_PROGRAM
            told()
            return []
        found = await sharing.rows(self._run_sharing_router, self._folder, plan.rounds, plan.window_s, plan.slack, told)
        return [replace(row, replicas=len(self.urls)) for row in found]

    def _run_sharing_router(self, router: rivals.Rival) -> AbstractAsyncContextManager[tuple[load.Address, Process]]:
        return self.run_router(replace(router, command=(*router.command, *self._plan.flags)))

    @asynccontextmanager
    async def _run_observed(self, flags: Sequence[str]) -> AsyncIterator[observatory.Measure]:
        """Measure cases at a warmroute with these flags."""
        async with self.run_router(rivals.ours((*self._plan.flags, *flags))) as (address, process):
            yield lambda case: self.measure(CASES[case], [address], process)

    async def _turn(self, router: rivals.Rival, turn: int, cases: Sequence[Case]) -> None:
        """Measure these cases at one router in one round; a rival that does not start is omitted in later rounds."""
        if router.name in self.absent:
            return
        try:
            async with self.run_router(router) as (address, process):
                for case in cases:
                    measured = await self.measure(case, [address], process)
                    found = CaseRun(measured, self._direct.get((turn, case.name)), rss_mb(process.pid))
                    self.turns.setdefault((router.name, case.name), []).append(found)
        except (ProcessError, rivals.RivalError) as error:
            if router.name == rivals.OURS:
                raise
            self.absent[router.name] = str(error)

    async def measure(self, case: Case, addresses: Sequence[load.Address], process: Process | None) -> load.CpuSample:
        """Measure one case. Without a process there is no window, only times to the first event."""
        first, pid = next(self._numbers), process.pid if process else None
        window_s, rate_per_s = self._plan.window_s, self._plan.rate_per_s
        gc.collect()
        gc.disable()  # a collection here would be part of the times to the first event
        try:
            if case.streams:
                begun = load.StreamLoad(case.concurrency, window_s if process else 0.0, PROBES_S, rate_per_s)
                return await load.streams(addresses, begun, pid, first)
            asked = load.Loop(case.name, case.concurrency, WARM_S, window_s)
            return await load.closed_loop(addresses[0], asked, pid or 0, first)
        except load.LoadError as error:
            if process is not None and not process.running:
                raise process.error(f"ended in case {case.name}") from error
            failed = load.CpuSample()
            failed.errors[str(error)] += 1
            return failed
        finally:
            gc.enable()

    @asynccontextmanager
    async def run_router(self, router: rivals.Rival) -> AsyncIterator[tuple[load.Address, Process]]:
        """Run the router, and yield once it answers. Raises ProcessError, RivalError."""
        address = ("127.0.0.1", free_port())
        async with run_process(router.name, router.words(address[1], self.urls, self._folder), self._folder) as process:
            await self._ready(process, address)
            await asyncio.sleep(IDLE_S)
            yield address, process

    async def _ready(self, process: Process, address: load.Address) -> None:
        request = bodies.single(bodies.SHORT_BYTES).request(0)

        async def missing() -> str:
            tally = load.Tally()
            try:
                async with load.Connections([address], 1, tally) as [connection]:
                    connection.ask(request, answers.answer(bodies.SHORT_BYTES))
                    await load.wait_until(lambda: not connection.busy, 5.0, "does not answer")
            except load.LoadError as error:
                return str(error)
            return "" if tally.done else f"answers with {dict(tally.errors)}"

        await wait_until_ready(process, missing, READY_EVERY_S)

    def rows(self) -> list[Row]:
        """Return all rows: figures, goals, and the measurements of warmroute alone."""
        rows = [row_of(name, CASES[case], turns, len(self.urls)) for (name, case), turns in self.turns.items()]
        return [*rows, *goals(rows, self._plan.slack), *(replace(row, router=rivals.OURS) for row in self.extras)]


@asynccontextmanager
async def bench(plan: Plan) -> AsyncIterator[OverheadBench]:
    """Run a bench with its upstream; the end of the block stops both."""
    words = ["-m", "loadtest.proxy_cost.upstream", "--replicas", str(plan.replicas), "--rate", str(plan.rate_per_s)]
    with tempfile.TemporaryDirectory(prefix="warmroute-overhead-") as temporary:
        folder = Path(temporary)
        async with run_process("upstream", [sys.executable, *words], folder) as process:
            yield OverheadBench(plan, folder, [said[1] for said in await process.wait_for_output(READY, plan.replicas)])


async def measure(plan: Plan, console: Console) -> list[Row]:
    """Run all measurements. Raises LoadError, ProcessError, RivalError."""
    stop_when_told()
    async with bench(plan) as running:
        with progress_bar(console, "overhead", running.steps) as told:
            await running.run(told)
        for name, why in running.absent.items():
            console.print(f"{name} is omitted: {why}", highlight=False, markup=False, soft_wrap=True)
        return running.rows()


async def profile(plan: Plan, case: Case, flags: Sequence[str]) -> None:
    """Run one case at warmroute under cProfile, and print the profile. Raises the same exceptions as `measure`."""
    stop_when_told()
    with tempfile.TemporaryDirectory(prefix="warmroute-profile-") as temporary:
        file = Path(temporary) / "profile"
        ours = rivals.ours(flags=flags)
        words = ("-m", "loadtest.proxy_cost.profile", str(file), *ours.command[ours.command.index("router") + 1 :])
        # Python, even if there is native code: the profiler cannot see into that
        ours = replace(ours, command=(sys.executable, *words))
        async with bench(plan) as running, running.run_router(ours) as (address, process):
            measured = await running.measure(case, [address], process)
        units = measured.events or measured.requests
        print(f"{case.name}: {units} {'chunks' if case.streams else 'requests'} within the window,", end=" ")
        print(f"{measured.cpu_s * 1e6 / max(1, units):.1f} µs each under the profiler; {dict(measured.errors)}")
        pstats.Stats(str(file)).strip_dirs().sort_stats("tottime").print_stats(40)


def stop_when_told() -> None:
    """Make SIGTERM end the run like Ctrl-C, which stops all started processes."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status:

    - 1 if a response of warmroute was wrong; with --check also if a goal was missed.
    - 2 if a measurement failed.
    """
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        if options.install_rivals:
            rivals.install(options.rivals)
        plan = _plan(options)
        if options.profile:
            uvloop.run(profile(plan, CASES[options.profile], options.flag))
            return 0
        rows = uvloop.run(measure(plan, console))
    except (load.LoadError, ProcessError, rivals.RivalError, OSError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    command = shlex.join(["overhead", *arguments])
    print_report(report_console(PAGE_WIDTH), rows)
    kind = (
        "with native code, as in the image"
        if rivals.native()
        else "in pure Python, because `make compiled` was not run"
    )
    print(f"warmroute is measured {kind}")
    if options.json:
        write_json(options.json, command, rows, rivals.versions(options.rivals) | rivals.ours_version())
    if options.chart:
        note = f"python -m loadtest overhead: medians of {options.rounds} rounds of {options.seconds:g} s"
        write_chart(options.chart, rows, [note])
    wrong = any(row.errors and row.router == rivals.OURS for row in rows)
    return 1 if wrong or (options.check and any(row.ok is False for row in rows)) else 0


def _plan(options: argparse.Namespace) -> Plan:
    there = {rivals.OURS: rivals.ours(options.flag), **rivals.find_installed(options.rivals)}
    there |= rivals.pure(options.flag)
    there |= {router.name: router for router in map(rivals.custom, options.router)}
    names = options.routers.split(",") if options.routers else list(there)
    if unknown := [name for name in names if name not in there]:
        raise rivals.RivalError(
            f"{', '.join(unknown)}: must be one of {', '.join(there)} (see --install-rivals, --router)"
        )
    routers, sizes = tuple(there[name] for name in names), (options.replicas, options.seconds, options.rate)
    return Plan(options.cases, routers, options.rounds, *sizes, tuple(options.flag), options.slack, again=options.check)
