"""`python -m loadtest faults`: outcome of requests under failures of replicas, clients or the machine.

Rows are numbered by the goals of "Nothing lost, nobody in". Each row starts its own replicas
(faults/upstream/process.py) and its own router, injects one fault, and reports the promised and the observed values.
warmroute runs first. Then come the installed LLM routers and those given with --rival, with their makers' defaults.
Only warmroute's rows decide the exit status. A row that does not apply to a router states the reason.

Counts and orders are exact. Times depend on other work of the machine. With --slack they may exceed the promise by that
factor, and the best of three tries counts. The printed figure is the measured one. With --counts times are not judged,
only the arrival of each expected event, and sizes are halved. That mode is for checks before a merge, which must not
depend on the load of the machine. Rows mostly wait for timers, so with --counts several may run in parallel (--jobs).
If times are judged, each row runs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop
from rich.console import Console

from loadtest.common import flags, rivals
from loadtest.common.processes import ProcessError
from loadtest.common.report import Row, report_console, write_json
from loadtest.faults.bench import Bench, CaseNotApplicable, Scale
from loadtest.faults.curve import REQUESTS, curve
from loadtest.faults.histories.rows import histories
from loadtest.faults.matrix import GOALS, Rows
from loadtest.faults.on_call.report import QUIET_S, on_call, print_on_call
from loadtest.faults.on_call.troubles import TROUBLES
from loadtest.faults.on_call.watch import LIMIT_S
from loadtest.faults.report import print_report
from loadtest.faults.soak import soak
from loadtest.proxy_cost.command import stop_when_told

TRIES = 3
ROW_TIMEOUT_S, FULL_TIMEOUT_S = 180.0, 1_800.0
PAGE_WIDTH, NOTE_CHARACTERS = 140, 300
SOAK_S, HISTORY_S = 1_800.0, 600.0
CURVE_MIN = 100  # requests: a smaller number has no curve
JOBS_MAX = 8


async def measure(
    bench: Bench, goals: Sequence[int], console: Console, matrix: Mapping[int, Sequence[Rows]], jobs: int = 1
) -> list[Row]:
    """Return all rows of one router, in the order of the goals, running `jobs` row functions at a time.

    A rival that does not start has rows that state this.
    """
    turns = asyncio.Semaphore(jobs)

    async def one(goal: int, rows: Rows) -> list[Row]:
        async with turns:
            began_s = time.monotonic()
            own = replace(bench, folder=Path(tempfile.mkdtemp(prefix=f"{goal}-", dir=bench.folder)))
            some = _label_rows(bench, await _tries(own, goal, rows))
            bad = sum(row.ok is False for row in some)
            told = f"{bench.router.name}: {goal} {rows.__name__}: {len(some)} rows, {bad} missed"
            console.print(f"{told}, {time.monotonic() - began_s:.0f} s", highlight=False)
            return some

    async with asyncio.TaskGroup() as group:  # cancellation or a failure stops the processes of every row
        tasks = [group.create_task(one(goal, rows)) for goal in goals for rows in matrix[goal]]
    return [row for task in tasks for row in task.result()]


def _label_rows(bench: Bench, rows: list[Row]) -> list[Row]:
    """Set the router's name on the rows. If times are not judged, a time row is neither met nor missed."""
    for row in rows:
        row.router = bench.router.name
        if bench.scale.counts and row.timed and row.ok:
            row.ok = None
    return rows


async def _tries(bench: Bench, goal: int, rows: Rows) -> list[Row]:
    """Return the rows of a goal. If only times were missed, repeat it, so that a short load peak is not a finding."""
    best = await _once(bench, goal, rows)
    for _ in range(TRIES - 1 if bench.ours else 0):
        missed = [row for row in best if row.ok is False]
        if not missed or not all(row.timed and row.got is not None for row in missed):
            break
        again = await _once(bench, goal, rows)
        if sum(row.ok is False for row in again) <= len(missed):
            best = again
    return best


async def _once(bench: Bench, goal: int, rows: Rows) -> list[Row]:
    try:
        async with asyncio.timeout(FULL_TIMEOUT_S if bench.scale.full or bench.scale.counts else ROW_TIMEOUT_S):
            return await rows(bench)
    except CaseNotApplicable as error:
        return [Row(goal=str(goal), case=rows.__name__, note=f"n/a: {error}")]
    except TimeoutError:
        return [Row(goal=str(goal), case=rows.__name__, ok=False, note="did not end in time")]
    except (ProcessError, rivals.RivalError, OSError) as error:
        if bench.ours:
            return [Row(goal=str(goal), case=rows.__name__, ok=False, note=str(error))]
        return [Row(goal=str(goal), case=rows.__name__, note=f"n/a: {' '.join(str(error).split())[:NOTE_CHARACTERS]}")]


async def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Run all selected rows. Raises RivalError."""
    stop_when_told()
    if options.on_call:
        numbers = list(map(int, options.troubles))
        return await on_call(numbers, options.quiet_s, options.sign_s, options.seed, console)
    scale = Scale(options.full, math.inf if options.counts else max(1.0, options.slack), options.counts)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="warmroute-faults-") as temporary:
        for router in _routers(options):
            folder = Path(temporary) / router.name
            folder.mkdir()
            bench = Bench(router, scale, folder)
            if options.soak is not None:
                found += _label_rows(bench, await soak(bench, options.soak, options.seed))
            elif options.histories is not None:
                found += _label_rows(bench, await histories(bench, options.histories, options.seed))
            elif options.requests is not None:
                found += _label_rows(bench, await curve(bench, options.requests, options.seed))
            else:
                found += await measure(bench, list(map(int, options.rows)), console, GOALS, options.jobs)
    return found


def _routers(options: argparse.Namespace) -> list[rivals.Rival]:
    """Return the routers to test, warmroute first. nginx has no LLM routing, and soaks are for warmroute alone."""
    ours = [] if options.only_rivals else [rivals.ours(flags=options.flag)]
    given = list(map(rivals.custom, options.rival))
    if options.no_rivals or any(each is not None for each in (options.soak, options.histories, options.requests)):
        return [*ours, *given]
    there = [router for name, router in rivals.find_installed(options.rivals).items() if name in rivals.RIVALS]
    return [*ours, *there, *given]


def parser() -> argparse.ArgumentParser:
    """Return the parser with all flags and their defaults."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest faults", description="Measure outcomes of requests under faults, overload and abuse."
    )
    add, goals = made.add_argument, list(map(str, GOALS))
    text = f"rows to run, of {','.join(goals)} (all)"
    add("--rows", type=flags.make_choices_parser(goals), default=goals, metavar="N,N", help=text)
    add("--full", action="store_true", help="run at full size, which takes an hour")
    add("--counts", action="store_true", help="check only counts and orders, at half the size")
    add("--jobs", type=flags.integer(1, JOBS_MAX), default=1, metavar="N", help="rows in parallel, with --counts (1)")
    text = "factor by which times may exceed their goals (1)"
    add("--slack", type=flags.number(), default=1.0, metavar="F", help=text)
    text = "additional argument of `warmroute serve`; repeat for each"
    add("--flag", action="append", default=[], metavar="WORD", help=text)
    text = "additional router; CMD contains {port} and {urls}"
    add("--rival", action="append", default=[], metavar="NAME=CMD", help=text)
    text = "environment of other routers (.venv-rivals)"
    add("--rivals", type=Path, default=rivals.ENVIRONMENT, metavar="DIR", help=text)
    add("--only-rivals", action="store_true", help="omit warmroute")
    add("--no-rivals", action="store_true", help="omit installed other routers")
    text = f"only the soak, for S seconds ({SOAK_S:g})"
    add("--soak", type=flags.positive(), nargs="?", const=SOAK_S, metavar="S", help=text)
    text = f"only a history of routers with a shared store, for S seconds ({HISTORY_S:g})"
    add("--histories", type=flags.positive(), nargs="?", const=HISTORY_S, metavar="S", help=text)
    text = f"only memory over N different requests ({REQUESTS:,})"
    add("--requests", type=flags.integer(CURVE_MIN), nargs="?", const=REQUESTS, metavar="N", help=text)
    add("--on-call", action="store_true", help="only the first signs of nine troubles on the page, in top, in alerts")
    numbers = [str(number) for number in range(1, len(TROUBLES) + 1)]
    text = f"with --on-call: troubles to run, of {','.join(numbers)} (all)"
    add("--troubles", type=flags.make_choices_parser(numbers), default=numbers, metavar="N,N", help=text)
    text = f"with --on-call: seconds without a trouble, in which nothing may be shown ({QUIET_S:g})"
    add("--quiet-s", type=flags.positive(), default=QUIET_S, metavar="S", help=text)
    text = f"with --on-call: seconds for which each trouble lasts ({LIMIT_S:g})"
    add("--sign-s", type=flags.positive(), default=LIMIT_S, metavar="S", help=text)
    add("--check", action="store_true", help="with --on-call: exit 1 if a cause is not named, or a sign is false")
    add("--seed", type=int, default=1, metavar="N", help="seed of all that is random (1)")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a row of warmroute was missed, with --on-call only if --check is given; 2 for an
    invalid command line."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = parser().parse_args(arguments)
    if options.jobs > 1 and not options.counts:
        print("faults: parallel rows disturb each other's times: use --jobs only with --counts", file=sys.stderr)
        return 2
    try:
        rows = uvloop.run(run(options, Console(stderr=True)))
    except (rivals.RivalError, ProcessError, TimeoutError, RuntimeError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    (print_on_call if options.on_call else print_report)(report_console(PAGE_WIDTH), rows)
    if options.json:
        versions = rivals.versions(options.rivals) | rivals.ours_version()
        write_json(options.json, shlex.join(["faults", *arguments]), rows, versions)
    if options.on_call and not options.check:
        return 0
    return 1 if any(row.ok is False and row.router == rivals.OURS for row in rows) else 0
