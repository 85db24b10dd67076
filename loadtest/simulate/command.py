"""`python -m loadtest simulate`: a race of placement policies in virtual time, without a GPU or a socket.

    simulate --list                                          scenarios, policies and calibrations
    simulate --scenario mooncake                             all policies, at capacity, seed 1
    simulate --scenario mooncake claude_code --load below at above --seed 6-15 --policy warm round_robin
    simulate --trace FILE --load below 1.2                   any trace file; loads are shares of the capacity
    simulate --race --seeds claim --json race.json --check   the whole race; exit 1 unless all claims hold
    simulate --sweep --json sweep.json                       is `warm` flat in its constants?
    simulate --ladder --json ladder.json --check             llm-d's ladder, stage by stage, beside published figures
    simulate --deadlines --seed 6-8 --check                  classes with deadlines and without, beside first come
    simulate --predictions --check                           first tokens against predictions, below and at saturation
    simulate --zoo --check                                   effect of odd engines' pages: predicted hits, shares
    simulate --several --seed 1-3 --json several.json        several routers that share their state, beside one

All times are simulated seconds. Limits of the simulation are listed in docs/evidence/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from loadtest.common.report import Row, progress_bar, report_console, table, write_json
from loadtest.common.traces import TraceError
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.simulate.engine.cluster_spec import SettingError
from loadtest.simulate.options import parser
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results import baseline, ladder, pulls, split, sweep, tiers
from loadtest.simulate.results import deadlines as of_deadlines
from loadtest.simulate.results import predictions as of_predictions
from loadtest.simulate.results import zoo as of_zoo
from loadtest.simulate.results.charts import write_charts
from loadtest.simulate.results.claims import OF_ALL, ClaimsError, beaten_bounds, judge, list_missed
from loadtest.simulate.results.metrics import over_seeds
from loadtest.simulate.results.multi_router import (
    OF_SEVERAL,
    VARIANTS,
    SeveralJob,
    print_several,
    run_several,
    verdicts,
)
from loadtest.simulate.results.race import AnyJob, Changes, PolicyEntry, RaceJob, race, run_job
from loadtest.simulate.results.tables import print_grids, print_standings, verdict_lines
from loadtest.simulate.scenarios import p2p
from loadtest.simulate.scenarios import split as of_split
from loadtest.simulate.scenarios.generated import STAGES
from loadtest.simulate.scenarios.priority_mix import LOAD, MIXES, REQUESTS
from loadtest.simulate.scenarios.registry import APART, GROUPS, LOADS, SCENARIOS, TUNE_SEEDS, loads_of

SAVED_EVERY_S = 60.0
CHANGED = (
    *("replicas", "kv_tokens", "routers", "share_delay_s", "share_partition"),
    *("grade", "unseen", "tier_told", "event_delay_s", "event_loss", "probe_interval_s", "answer_limits"),
)
"""Flags that are fields of the cluster's setting."""
WIDTH = 160  # width of tables without a terminal


class SimulateError(ValueError):
    """A request of the command line that cannot be run; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if `--check` finds a claim that does not hold, 2 if the command cannot run."""
    arguments = list(argv if argv is not None else sys.argv[1:])
    options = parser().parse_args(arguments)
    if options.list:
        _list()
        return 0
    try:
        _writable(options.json, options.svg, options.save_baseline)
        if options.ladder is not None:
            return _ladder(options, "simulate " + " ".join(arguments))
        if options.predictions:
            return _predictions(options)
        if options.zoo is not None:
            return _zoo(options, "simulate " + " ".join(arguments))
        if options.deadlines:
            return _deadlines(options, "simulate " + " ".join(arguments))
        earlier = [row for file in options.rows for row in read_rows(file)]
        if options.several is not None:
            return _compare_routers(options, earlier, "simulate " + " ".join(arguments))
        if options.tiers is not None:
            return _tiers(options, earlier, "simulate " + " ".join(arguments))
        if options.pulls is not None:
            return _pulls(options, earlier, "simulate " + " ".join(arguments))
        if options.split is not None:
            return _split(options, earlier, "simulate " + " ".join(arguments))
        jobs = [] if options.no_run else jobs_of(options)
        if options.missing:
            jobs = list(list_missing_jobs(jobs, earlier))
        rows = _run_race(jobs, options, "simulate " + " ".join(arguments), earlier)
        return _report(rows, options, "simulate " + " ".join(arguments))
    except (SimulateError, ClaimsError, baseline.BaselineError, SettingError, TraceError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2


def _writable(*files: Path | None) -> None:
    """Check that the output directories exist, because a race takes hours and its results must be kept. Raises
    SimulateError."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise SimulateError(f"{file}: directory {file.parent} does not exist")


# Jobs and earlier rows


def jobs_of(options: argparse.Namespace) -> list[RaceJob]:
    """Return the jobs that the options name. Raises SimulateError."""
    scenarios = _scenarios(options)
    if options.sweep:
        who = sweep.entrants()
    else:
        names = options.policy or sorted(ROWS, key=lambda name: not ROWS[name].bound)
        _check_names("policy", names, ROWS)
        who = tuple(PolicyEntry(name) for name in names)
    seeds = options.seed or (list(TUNE_SEEDS) if options.race or options.sweep else [1])
    changes, trace = changes_of(options), options.trace
    cells = [
        (name, load) for name in scenarios for load in options.load or (loads_of(name) if options.race else ["at"])
    ]
    return [RaceJob(name, load, seed, who, changes, trace) for seed in seeds for name, load in cells]


def _scenarios(options: argparse.Namespace) -> list[str]:
    named = [*options.scenario, *(name for group in options.group for name in GROUPS[group])]
    if options.trace is not None:
        if named:
            raise SimulateError("--trace, --scenario and --group: set only one of them")
        return [options.trace.name.split(".")[0]]
    _check_names("scenario", named, [*SCENARIOS, *APART])
    if not (named or options.race or options.sweep or options.several is not None):
        raise SimulateError("set --scenario, --group, --trace, --race or --sweep; see --list")
    return named or list(SCENARIOS)


def changes_of(options: argparse.Namespace) -> Changes:
    """Return the changes of the cluster that the flags make. Raises SimulateError."""
    given: dict[str, Any] = {name: value for name in CHANGED if (value := getattr(options, name)) is not None}
    if options.calibration is not None:
        _check_names("calibration", [options.calibration], CALIBRATIONS)
        given |= {"calibration": CALIBRATIONS[options.calibration], "others": ()}
    if options.fault:
        given["faults"] = tuple(options.fault)
    return Changes(tuple(given.items()), options.requests)


def _check_names(what: str, names: Sequence[str], known: Sequence[str] | dict[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise SimulateError(f"unknown {what} {name!r}: must be one of {', '.join(known)}")


def _goes_with(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Raises SimulateError if a flag is set that is not in `flags`, the flags that the first of them allows."""
    other = parser().parse_args([])
    for name, value in vars(options).items():
        if name not in flags and value != getattr(other, name):
            raise SimulateError(f"--{flags[0]} cannot be combined with --{name.replace('_', '-')}")


def _run_race(jobs: Sequence[RaceJob], options: argparse.Namespace, command: str, earlier: Sequence[Row]) -> list[Row]:
    """Return the rows of single runs: the earlier ones, except those that were run again, and the new ones. A long race
    is saved while it runs."""
    fresh: list[Row] = []
    saved_s = time.monotonic()
    total = sum(len(job.entrants) for job in jobs)
    with progress_bar(Console(stderr=True), "simulated runs", total) as progress:

        def done(rows: Sequence[Row]) -> None:
            nonlocal saved_s
            fresh.extend(rows)
            progress(len(fresh))
            if options.json and time.monotonic() - saved_s > SAVED_EVERY_S:
                write_json(options.json, command, _merge_rows(earlier, fresh))
                saved_s = time.monotonic()

        rows = race(jobs, options.jobs, done, run_job) if jobs else []
    return _merge_rows(earlier, rows)


def _merge_rows(earlier: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    rows = {_run_of(row): row for row in [*earlier, *fresh]}
    return list(rows.values())


def _run_of(row: Row) -> tuple[str | None, str | None, int | None, str | None, str | None]:
    """Return the key of a row's run: workload, load, seed, policy and case."""
    return row.workload, row.load_name, row.seed, row.policy, row.case


def list_missing_jobs(jobs: Iterable[RaceJob], earlier: Iterable[Row]) -> Iterator[RaceJob]:
    """Return the jobs without the entrants that have a row already, so that an interrupted race can continue. Rows do
    not record their flags or their code: the caller must make sure that these are the same."""
    there = {_run_of(row) for row in earlier}
    for job in jobs:
        run = job.scenario, job.load, job.seed
        if who := tuple(each for each in job.entrants if (*run, each.policy, each.label) not in there):
            yield replace(job, entrants=who)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of single runs in an earlier run's JSON. Raises SimulateError, OSError."""
    try:
        rows = [msgspec.convert(row, Row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise SimulateError(f"{path}: not the JSON of a simulation: {error}") from error
    return [row for row in rows if row.seed is not None and row.goal is None]


# Reports


def _report(rows: Sequence[Row], options: argparse.Namespace, command: str) -> int:
    console = report_console(WIDTH)
    merged = over_seeds(rows)
    if options.json:
        write_json(options.json, command, [*rows, *merged])  # before the claims, which may fail after hours of runs
    if options.save_baseline:
        baseline.write(options.save_baseline, rows)
        return 0
    before = baseline.read(options.baseline) if options.race and changes_of(options) == Changes() else None
    judged = judge(rows, before) if options.race or options.check else []
    if not options.race:
        judged = [row for row in judged if row.goal not in OF_ALL]
    if options.json and judged:
        write_json(options.json, command, [*rows, *merged, *judged])
    if not rows:
        raise SimulateError("no rows")
    if options.sweep:
        sweep.print_moves(console, sweep.moves(rows))
    elif options.race:
        print_grids(console, merged)
        print_standings(console, rows)
        print("\n".join(beaten_bounds(rows)) or "no row is better than an upper bound")
    else:
        console.print(table(merged, width=console.width))
    if options.svg:
        write_charts(options.svg, [row for row in merged if row.case is None], "Placement policies in simulated time")
    if judged:
        print("\n".join(verdict_lines(judged)))
    speeds = [row.requests_per_wall_minute for row in rows if row.requests_per_wall_minute]
    if speeds:
        print(f"{median(speeds):,.0f} requests a minute of wall time on one core (median over runs)", file=sys.stderr)
    return 1 if options.check and list_missed(judged) else 0


# llm-d's ladder


OF_LADDER = ("ladder", "policy", "seed", "calibration", "jobs", "json", "check")
"""Flags allowed with --ladder. Its cluster, except the calibration, and its loads are the published ones."""


def _ladder(options: argparse.Namespace, command: str) -> int:
    """Run both variants, stage by stage. Raises SimulateError."""
    _goes_with(options, OF_LADDER)
    _check_names("row of the ladder", options.policy, ladder.CONTENDERS)
    calibration = options.calibration or CALIBRATION
    _check_names("calibration", [calibration], CALIBRATIONS)
    stages = tuple(stage for stage in STAGES if stage in (options.ladder or STAGES))
    climbs = [
        ladder.LadderRun(name, policy, seed, stages, calibration)
        for seed in options.seed or [ladder.SEED]
        for name in (ladder.PUBLISHED, ladder.HONEST)
        for policy in options.policy or ladder.CONTENDERS
    ]
    runs = count(1)
    with progress_bar(Console(stderr=True), "simulated runs", len(climbs)) as progress:
        rows = race(climbs, options.jobs, lambda _: progress(next(runs)), ladder.climb)
    judged = ladder.judge(rows)
    if options.json:
        write_json(options.json, command, [*rows, *judged])
    ladder.print_ladders(report_console(WIDTH), rows)
    print("\n".join(ladder.verdict_lines(rows)))
    return 1 if options.check and not all(row.ok for row in judged) else 0


# Deadlines


OF_DEADLINES = ("deadlines", "policy", "load", "seed", "requests", "jobs", "json", "check")
"""Flags allowed with --deadlines, which has its own cluster and requests."""


def _deadlines(options: argparse.Namespace, command: str) -> int:
    """Run classes of requests on one fleet. Raises SimulateError."""
    _goes_with(options, OF_DEADLINES)
    _check_names("policy", options.policy, [of_deadlines.LLMD_SLO, *ROWS])
    who, requests = of_deadlines.entrants_of(options.policy), options.requests or REQUESTS
    seeds = options.seed or [1]
    jobs = [
        of_deadlines.DeadlineJob(mix, seed, who, requests, load)
        for load in options.load or [LOAD]
        for seed in seeds
        for mix in MIXES
    ]
    with progress_bar(Console(stderr=True), "mixes and seeds", len(jobs)) as progress:
        finished = count(1)
        rows = race(jobs, options.jobs, lambda _: progress(next(finished)), of_deadlines.run_deadlines)
    judged = of_deadlines.judge(rows)
    if options.json:
        write_json(options.json, command, [*rows, *judged])
    of_deadlines.print_deadlines(report_console(WIDTH), rows)
    return 1 if options.check and not all(row.ok for row in judged) else 0


# Predictions


OF_PREDICTIONS = ("predictions", "scenario", "load", "seed", "requests", "check")
"""Flags allowed with --predictions."""


def _predictions(options: argparse.Namespace) -> int:
    """Compare first tokens with the times that receipts predicted. Raises SimulateError."""
    _goes_with(options, OF_PREDICTIONS)
    _check_names("scenario", options.scenario, SCENARIOS)
    jobs = [
        of_predictions.PredictionJob(name, load, seed, options.requests or of_predictions.REQUESTS)
        for seed in options.seed or [1]
        for name in options.scenario or of_predictions.WORKLOADS
        for load in options.load or ("below", "at")
    ]
    found = list[of_predictions.Calibration]()
    with progress_bar(Console(stderr=True), "scenarios and loads", len(jobs)) as progress:
        for job in jobs:
            found.append(of_predictions.run_predictions(job))
            progress(len(found))
    of_predictions.print_predictions(report_console(WIDTH), found)
    return 1 if options.check and not all(each.ok for each in found) else 0


# Engines of the zoo


OF_ZOO = ("zoo", "load", "seed", "requests", "jobs", "json", "check")
"""Flags allowed with --zoo, which has its own fleets and requests."""


def _zoo(options: argparse.Namespace, command: str) -> int:
    """Compare predicted hits and shares of requests for each kind of engine. Raises SimulateError."""
    _goes_with(options, OF_ZOO)
    jobs = [
        of_zoo.ZooJob(name, load, tuple(options.seed or of_zoo.SEEDS), options.requests or of_zoo.REQUESTS)
        for name in options.zoo or MEMBERS
        for load in options.load or of_zoo.LOADS
    ]
    finished = count(1)
    with progress_bar(Console(stderr=True), "engines and loads", len(jobs)) as progress:
        rows = race(jobs, options.jobs, lambda _: progress(next(finished)), of_zoo.run_zoo)
    if options.json:
        write_json(options.json, command, rows)
    of_zoo.print_zoo(report_console(WIDTH), rows)
    return 1 if options.check and not all(row.ok for row in rows) else 0


# Several routers


def _compare_routers(options: argparse.Namespace, earlier: Sequence[Row], command: str) -> int:
    """Compare routers that share with one router, each scenario at its loads. Raises SimulateError."""
    if options.trace is not None or options.race or options.sweep:
        raise SimulateError("--several cannot be combined with --trace, --race or --sweep")
    changes, variants = changes_of(options), tuple(options.several or VARIANTS)
    jobs = [
        SeveralJob(RaceJob(name, load, seed, (), changes), variants)
        for seed in options.seed or [1]
        for name in _scenarios(options)
        for load in options.load or loads_of(name)
        if name not in OF_SEVERAL
    ]
    rows = _run_jobs(jobs, run_several, options, command, lambda fresh: _merge_rows(earlier, fresh))
    if not rows:
        raise SimulateError("no rows")
    if options.json:
        write_json(options.json, command, rows)
    print_several(report_console(WIDTH), rows)
    return 1 if options.check and any("; not " in line for line in verdicts(rows)) else 0


# Prices of a load from a tier


def _tiers(options: argparse.Namespace, earlier: Sequence[Row], command: str) -> int:
    """Compare prices of a load. Raises SimulateError."""
    if options.trace is not None or options.race or options.sweep or options.scenario:
        raise SimulateError("--tiers cannot be combined with --trace, --race, --sweep or --scenario")
    _check_names("price of a load", options.policy, tiers.PRICES)
    sizes = [options.replicas] if options.replicas else tiers.SIZES
    prices, requests = tuple(options.policy or tiers.PRICES), options.requests or tiers.REQUESTS
    jobs = [
        tiers.TierJob(link, replicas, load, seed, prices, requests)
        for seed in options.seed or [1]
        for replicas in sizes
        for load in options.load or tiers.SHARES
        for link in options.tiers or tiers.LINKS
    ]
    rows = _run_jobs(jobs, tiers.run_tiers, options, command, lambda fresh: [*earlier, *fresh])
    if options.json:
        write_json(options.json, command, rows)
    tiers.print_tiers(report_console(WIDTH), rows)
    return 0


# P2P KV transfers between replicas


def _pulls(options: argparse.Namespace, earlier: Sequence[Row], command: str) -> int:
    """Compare policies with and without P2P KV transfers. Raises SimulateError."""
    if options.trace is not None or options.race or options.sweep:
        raise SimulateError("--pulls cannot be combined with --trace, --race or --sweep")
    _check_names("row", options.policy, pulls.ROWS)
    _check_names("workload with pulls", options.scenario, p2p.WORKLOADS)
    entries, requests = tuple(options.policy or pulls.ROWS), options.requests or pulls.REQUESTS
    jobs = [
        pulls.PullJob(workload, link, load, seed, entries, options.replicas or pulls.SIZE, requests)
        for seed in options.seed or [1]
        for link in options.pulls or pulls.LINKS
        for workload in options.scenario or p2p.WORKLOADS
        for load in options.load or pulls.SHARES
    ]
    rows = _run_jobs(jobs, pulls.run_pulls, options, command, lambda fresh: [*earlier, *fresh])
    if options.json:
        write_json(options.json, command, rows)
    pulls.print_pulls(report_console(WIDTH), rows)
    return 0


# Disaggregated prefill


def _split(options: argparse.Namespace, earlier: Sequence[Row], command: str) -> int:
    """Compare policies and sets of prefill replicas. Raises SimulateError."""
    if options.trace is not None or options.race or options.sweep:
        raise SimulateError("--split cannot be combined with --trace, --race or --sweep")
    _check_names("row", options.policy, split.ROWS)
    _check_names("workload to be split", options.scenario, of_split.WORKLOADS)
    entries, requests = tuple(options.policy or split.ROWS), options.requests or split.REQUESTS
    jobs = [
        split.SplitJob(workload, link, load, seed, entries, options.replicas or split.SIZE, requests)
        for seed in options.seed or [1]
        for link in options.split or ["rdma"]
        for workload in options.scenario or of_split.WORKLOADS
        for load in options.load or split.SHARES
    ]
    rows = _run_jobs(jobs, split.run_split, options, command, lambda fresh: [*earlier, *fresh])
    if options.json:
        write_json(options.json, command, rows)
    split.print_split(report_console(WIDTH), rows)
    return 0


def _run_jobs(
    jobs: Sequence[AnyJob],
    run: Callable[[AnyJob], list[Row]],
    options: argparse.Namespace,
    command: str,
    merged: Callable[[Sequence[Row]], list[Row]],
) -> list[Row]:
    """Run these jobs, or no job with --no-run. `merged` joins new rows to earlier ones; the result is written after
    each job."""
    fresh, finished = list[Row](), count(1)
    with progress_bar(Console(stderr=True), "workloads", len(jobs)) as progress:

        def done(rows: Sequence[Row]) -> None:
            fresh.extend(rows)
            progress(next(finished))
            if options.json:
                write_json(options.json, command, merged(fresh))

        return merged([] if options.no_run else race(jobs, options.jobs, done, run))


def _list() -> None:
    print("scenarios:", *(f"  {name}" for name in [*SCENARIOS, *APART]), sep="\n")
    print("loads:", *(f"  {name:10} {share:g}" for name, share in LOADS.items()), sep="\n")
    print("policies:", *(f"  {name:28} {row}" for name, row in ROWS.items()), sep="\n")
    print("calibrations:", *(f"  {name}" for name in CALIBRATIONS), sep="\n")
