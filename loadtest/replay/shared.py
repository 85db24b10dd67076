"""End of a run and exit statuses, for benchmarks that replay workloads in several ways."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import uvloop
from rich.console import Console

from loadtest.common.client import ReplayError
from loadtest.common.processes import ProcessError, run_until_signal
from loadtest.common.report import Row, print_report, write_json
from loadtest.common.traces import TraceError


def report_results(
    console: Console, rows: Sequence[Row], judged: Sequence[Row], options: argparse.Namespace, command: str
) -> int:
    """Print the rows and the judged goals, and write both to `options.json` if that is a file.

    Returns the exit status: 1 if a request failed, and with `options.check` also if a goal was missed.
    """
    print_report(console, rows)
    for row in judged:
        got = "nothing" if row.got is None else f"{row.got:.3f}"
        said = f"{row.workload}: {row.goal} ({row.expected:g}): {got}{'' if row.ok else ', missed'}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    if options.json:
        write_json(options.json, command, [*rows, *judged])
    wrong = any(row.failed for row in rows)
    return 1 if wrong or (options.check and not all(row.ok for row in judged)) else 0


def run_benchmark(name: str, work: Coroutine[Any, Any, int]) -> int:
    """Run a benchmark and return its exit status: 2 if it could not measure, 130 if it was interrupted."""
    try:
        return uvloop.run(run_until_signal(work))
    except (ProcessError, ReplayError, TraceError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
