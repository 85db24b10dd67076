"""`python -m loadtest agree`: the same slice over HTTP and in the simulation, side by side.

Over HTTP, a run has `loadtest engine` replicas, a router (ours under a policy, or a rival as its maker ships it) and
`loadtest.replay.command`, all fresh and on loopback. In the simulation, the same requests run in the same loop, on
replicas of the same names, with the policy or the reimplemented rule. The real time of client, router and HTTP counts
times the time scale. So it is measured as the clients' wait beyond the engines' reported times, and added to each
simulated request.

With `--peers` the simulation is left out: a race of real routers on one slice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console

from loadtest.common import flags, rivals
from loadtest.common.answer_limits import COMMON, FLAG, HELP, LimitsAction
from loadtest.common.client import ReplayError
from loadtest.common.processes import ProcessError, run_until_signal
from loadtest.common.report import Row, build_table, progress_bar, report_console, write_json
from loadtest.common.traces import TraceError
from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.sim_vs_http.cases import PEERS, POLICIES, RULES, SLICES, AgreeCase, cases_of, load_slice_trace
from loadtest.sim_vs_http.over_http import HttpRun, over_http
from loadtest.sim_vs_http.race_table import TABLE, judge_rows, median_row, table_cells, verdict_lines
from loadtest.sim_vs_http.report import (
    HEADS,
    HTTP,
    SIMULATED,
    Comparison,
    Pooled,
    agreement_table,
    markdown,
    peer_cells,
    pool_runs,
)
from loadtest.sim_vs_http.slices import Cluster, simulate_slice, workload_of
from loadtest.simulate.engine.workload import Workload
from loadtest.simulate.policies import ROWS
from router.config.schema import ProbeSettings

PAGE_WIDTH = 160


class Agreement:
    """All runs of one invocation."""

    def __init__(self, cases: Sequence[AgreeCase], options: argparse.Namespace, errors: Console) -> None:
        self._cases, self._options, self._errors = cases, options, errors
        self._runs: dict[int, list[HttpRun]] = {number: [] for number in range(len(cases))}
        self._prepared: dict[str, Workload] = {}

    async def replay_all(self) -> None:
        """Run rounds over all cases, so that other load on the machine affects all cases equally."""
        for round_n in range(self._options.runs):
            for number, case in enumerate(self._cases):
                title = f"{case.settings.workload}, {case.settings.router} {case.settings.policy}, run {round_n + 1}"
                with progress_bar(self._errors, title, case.settings.requests_max) as progress:
                    trace = load_slice_trace(case.settings)
                    run = await over_http(trace, case.settings, case.behind, case.placed_by, progress)
                self._runs[number].append(run)

    def http(self, number: int) -> Pooled:
        """Return a case's runs over HTTP as one."""
        return pool_runs(self._runs[number], self._cases[number].settings, HTTP)

    def make_race_row(self, number: int) -> Row:
        """Return a case's runs as a row of the race of peers."""
        settings = self._cases[number].settings
        if settings.workload not in TABLE:
            return self.http(number).row
        runs, scale = self._runs[number], settings.time_scale
        return median_row([replace(run.row, case=HTTP, time_scale=scale, wire_s=run.wire_s) for run in runs])

    def compare(self, number: int) -> Comparison:
        """Compare a case's runs with `--simulations` simulated ones, in front of replicas of the same names."""
        case, runs = self._cases[number], self._runs[number]
        name = case.settings.workload or ""
        workload = self._prepared.get(name) or workload_of(load_slice_trace(case.settings), case.settings)
        self._prepared[name] = workload
        wire_s = median(run.wire_s for run in runs)
        parts = []
        for seed in range(self._options.simulations):
            cluster = Cluster(
                CALIBRATIONS[case.behind.calibration],
                case.behind.kv_tokens,
                runs[seed % len(runs)].urls,
                ProbeSettings().interval_s * case.settings.time_scale,
                wire_s,
            )
            parts.append(simulate_slice(workload, case.settings, cluster, ROWS[case.rule].make, seed))
        settings = replace(case.settings, time_scale=1.0, replicas=runs[0].urls)
        return Comparison(self.http(number), pool_runs(parts, settings, SIMULATED), wire_s)


# The command


async def agree(options: argparse.Namespace, command: str) -> int:
    """Run all cases and print the table. With --check, returns 1 if the two sides disagree."""
    console, errors = report_console(PAGE_WIDTH), Console(stderr=True)
    if options.install_rivals:
        rivals.install(options.rivals)
    cases = cases_of(options, errors)
    agreement = Agreement(cases, options, errors)
    await agreement.replay_all()
    if options.peers:
        rows = [agreement.make_race_row(number) for number in range(len(cases))]
        rows += judge_rows([row for row in rows if row.workload in TABLE])
        status = _tell(console, rows, as_markdown=options.markdown)
    else:
        comparisons = [agreement.compare(number) for number in range(len(cases))]
        console.print(agreement_table(comparisons))
        rows = [row for each in comparisons for row in (each.http.row, each.simulated.row, *each.verdicts())]
        status = 0 if all(each.ok for each in comparisons) else 1
    if options.json:
        there = {row.router for row in rows}
        versions = rivals.versions(options.rivals)
        write_json(options.json, command, rows, {name: v for name, v in versions.items() if name in there})
    return status if options.check else 0


def _tell(console: Console, rows: Sequence[Row], *, as_markdown: bool) -> int:
    """Print both kinds of races of peers; 1 if warm misses a goal in either."""
    of_table = [row for row in rows if row.workload in TABLE]
    status = 0
    if peers := [row for row in rows if row.workload not in TABLE]:
        status = _tell_peers(console, peers, as_markdown=as_markdown)
    if of_table:
        _print(console, table_cells(of_table), as_markdown=as_markdown)
        console.print("\n".join(verdict_lines(of_table)), highlight=False, markup=False, soft_wrap=True)
    return 1 if any(row.ok is False for row in of_table) else status


def _print(console: Console, cells: Sequence[Sequence[str]], *, as_markdown: bool) -> None:
    if as_markdown:
        console.print(markdown(cells), highlight=False, markup=False, soft_wrap=True)
        return
    console.print(build_table(cells[0], cells[1:]))


def _tell_peers(console: Console, rows: Sequence[Row], *, as_markdown: bool) -> int:
    """Print the race of peers; 1 if a request failed, or a rival was faster than warm."""
    _print(console, [HEADS, *peer_cells(rows)], as_markdown=as_markdown)
    ours = {row.workload: row.ttft_p90_s or 0.0 for row in rows if row.policy == "warm"}
    slower = [row for row in rows if (row.ttft_p90_s or 0.0) < ours.get(row.workload, 0.0)]
    return 1 if slower or any(row.errors or row.rejected for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; with --check 1 if the two sides disagree, with --peers and --check also if a rival is faster."""
    arguments = list(sys.argv[2:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    options.rows = options.rows or (PEERS if options.peers else (*POLICIES, *RULES))
    try:
        return uvloop.run(run_until_signal(agree(options, " ".join(["python -m loadtest agree", *arguments]))))
    except (ProcessError, ReplayError, TraceError, rivals.RivalError, OSError) as error:
        print(f"agree: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest agree", description="Compare the same slice over HTTP and in the simulation."
    )
    add, rows, count = parser.add_argument, (*POLICIES, *RULES), flags.integer(1, 10_000)
    slices = (*SLICES, *TABLE)
    add(
        "--workloads",
        type=flags.make_choices_parser(slices),
        default=tuple(SLICES),
        metavar="NAMES",
        help=f"of {','.join(slices)}",
    )
    add("--table", dest="workloads", action="store_const", const=tuple(TABLE), help=f"all of {','.join(TABLE)}")
    add("--rows", type=flags.make_choices_parser(rows), metavar="NAMES", help=f"of {','.join(rows)}")
    add(
        "--peers",
        action="store_true",
        help="compare real routers over HTTP only, with p90 TTFT as multiples of warmroute's",
    )
    add("--runs", type=count, default=5, metavar="N", help="combined runs over HTTP (5)")
    add("--simulations", type=count, default=15, metavar="N", help="combined simulated runs (15)")
    add("--requests", type=count, metavar="N", help="requests of each run (default: from the slice)")
    add("--replicas", type=count, metavar="N", help="engines (default: from the slice)")
    scale = flags.positive(1_000)
    add("--time-scale", type=scale, metavar="X", help="simulated seconds per wall second (default: from the slice)")
    add(FLAG, nargs="+", action=LimitsAction, default=COMMON, metavar="N", help=HELP)
    add(
        "--foreknowledge",
        action="store_true",
        help="set `max_tokens` to the recorded length of each answer: an upper bound",
    )
    add(
        "--rivals",
        type=Path,
        default=rivals.ENVIRONMENT,
        metavar="DIR",
        help="environment of other routers (.venv-rivals)",
    )
    add("--install-rivals", action="store_true", help="first install missing routers from PyPI")
    add(
        "--check",
        action="store_true",
        help="exit with 1 if simulation and HTTP disagree, or another router is better than warm",
    )
    add("--markdown", action="store_true", help="print the comparison of routers as a Markdown table")
    add("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser
