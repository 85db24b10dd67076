"""The race: scenarios x loads x seeds x policies, run in one process for each core.

A job is one workload at one load for one seed. Its preparation takes as long as one run, so all entrants of a job run
in the same process, one after the other. Jobs share no state and run in any order. A policy with other constants than
its own is an entrant like any other (see sweep.py).
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from loadtest.common.report import Row
from loadtest.common.traces import REQUESTS_MAX
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import Workload
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.scenarios.recorded import OUTPUT_TOKENS_MAX, trace_scenario
from loadtest.simulate.scenarios.registry import APART, LOADS, SCENARIOS, Scenario

AnyJob = TypeVar("AnyJob")
Done = Callable[[Sequence[Row]], None]
"""Callback for the rows of a finished job."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy in the race: a row's name and optionally other constants as (module, name, value)."""

    policy: str
    label: str | None = None
    """The difference from the row itself, as the `case` of its result rows."""
    constants: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the cluster that override the scenario."""

    setting: tuple[tuple[str, Any], ...] = ()
    """(field of Setting, value)"""
    requests_max: int | None = None


@dataclass(frozen=True, slots=True)
class RaceJob:
    """One workload at one load for one seed, and its entrants."""

    scenario: str
    load: str
    """A name in LOADS, or a number in the same unit: a share of the cluster's capacity."""
    seed: int
    entrants: tuple[PolicyEntry, ...]
    changes: Changes = Changes()
    trace: Path | None = None

    def build(self) -> Scenario:
        """Prepare the workload. Raises the errors of reading a trace."""
        if self.load not in LOADS:
            LOADS[self.load] = float(self.load)  # scenario functions look up loads by name
        changed, requests_max = dict(self.changes.setting), self.changes.requests_max
        if self.trace is not None:
            setting = replace(ClusterSpec(seed=self.seed), **changed)
            calibration = setting.calibration
            room = min(calibration.context_tokens_max, setting.kv_tokens_of(calibration))
            return trace_scenario(
                self.trace,
                self.load,
                setting,
                requests_max=requests_max or REQUESTS_MAX,
                input_tokens_max=max(1, room - OUTPUT_TOKENS_MAX),
            )
        scenario = {**SCENARIOS, **APART}[self.scenario](self.load, self.seed)
        workload = scenario.workload if requests_max is None else shorten_workload(scenario.workload, requests_max)
        return replace(scenario, workload=workload, setting=replace(scenario.setting, **changed))


def shorten_workload(workload: Workload, requests_max: int) -> Workload:
    """Return the workload with its warm-up and at most `requests_max` requests after it."""
    requests_max += workload.warm_up
    if workload.open:
        return replace(workload, sessions=workload.sessions[:requests_max])
    return replace(workload, requests_max=min(requests_max, workload.requests_max))


def run_job(job: RaceJob) -> list[Row]:
    """Return a row for each entrant, in their order."""
    scenario = job.build()
    with freeze_objects():
        return [_run(job, scenario, entrant) for entrant in job.entrants]


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Freeze the prepared objects, millions of them, for the garbage collector until the block ends.

    Repeated scans of these objects take a fifth of the time. If objects are frozen already, the outer block freezes and
    unfreezes the whole process and this block leaves the collector alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(job: RaceJob, scenario: Scenario, entrant: PolicyEntry) -> Row:
    source = ROWS[entrant.policy]
    began = time.perf_counter()
    try:
        with override_constants(entrant.constants):
            setting = replace(scenario.setting, foreknowledge=source.foreknowledge or scenario.setting.foreknowledge)
            result = Simulation(scenario.workload, setting, source.make).run()
    except Exception as error:
        error.add_note(f"{entrant.policy} on {job.scenario}, {job.load}, seed {job.seed}")
        raise
    wall_s = time.perf_counter() - began
    row = row_of(scenario, result)
    row.workload, row.policy, row.seed, row.case = job.scenario, entrant.policy, job.seed, entrant.label
    row.load_name = job.load
    row.bound = True if source.bound else None
    row.requests_per_wall_minute = 60 * len(result.sent) / wall_s
    return row


@contextmanager
def override_constants(constants: Sequence[tuple[str, str, float]]) -> Iterator[None]:
    """Run the block with these values in place of the modules' own; no other code may run in this process at that time.
    Raises ValueError for a module that is native code (deploy/compiled.py), which keeps its own values."""
    before = [(import_module(module), name) for module, name, _ in constants]
    if compiled := {module.__name__ for module, _ in before if not (module.__file__ or "").endswith(".py")}:
        raise ValueError(
            f"constants of {', '.join(sorted(compiled))} are compiled: run this in a clone, in pure Python"
        )
    own = [getattr(module, name) for module, name in before]
    try:
        for (module, name), (_, _, value) in zip(before, constants, strict=True):
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in zip(before, own, strict=True):
            setattr(module, name, value)


def race(jobs: Sequence[AnyJob], processes: int, done: Done, run: Callable[[AnyJob], list[Row]]) -> list[Row]:
    """Run all jobs with `run` and return their rows in the order of the jobs."""
    rows: dict[int, list[Row]] = {}
    if processes == 1 or len(jobs) == 1:
        for number, job in enumerate(jobs):
            rows[number] = run(job)
            done(rows[number])
    else:
        # Processes are spawned, not forked, because a progress bar has a thread.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(processes, len(jobs)), context) as pool:
            numbers = {pool.submit(run, job): number for number, job in enumerate(jobs)}
            try:
                for future in as_completed(numbers):
                    rows[numbers[future]] = future.result()
                    done(rows[numbers[future]])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [row for number in sorted(rows) for row in rows[number]]
