"""Sweep of every constant of `warm` at a third and three times its value: is the result flat, or does it need tuning?

A constant that has to fit a cluster is a knob that operators leave as it is. So each constant must be physical, or
learned, or have no relevant effect over an order of magnitude. The sweep shows which of these applies. It runs on the
seeds for tuning, because its results may lead to another value, and claims must not rest on seeds that were tuned on.

Constants are defined in the modules that use them. A run with another value sets it there, in a process of its own that
runs no other work, and restores it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import exp, log
from statistics import fmean

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.simulate.results.claims import E2E, TTFT, WARM
from loadtest.simulate.results.race import PolicyEntry

FACTORS = (1 / 3, 3.0)

WARM_PACKAGE = "router.core.placement.policies.warm"


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant; `module` is the module that reads it. Those of `warm` are defined in its table of constants."""

    name: str
    module: str
    values: tuple[float, ...] = ()
    """Values to try in place of a third and three times the constant."""
    also: tuple[str, ...] = ()
    """Modules that import the constant by name and so have their own copy."""

    def get_value(self) -> float:
        """Return the value of the constant in the code."""
        value: float = getattr(import_module(self.module), self.name)
        return value

    def list_alternatives(self) -> tuple[float, ...]:
        """Return the values to try, without the constant's own value. For a whole number they are whole numbers."""
        own = self.get_value()
        tried = self.values or tuple(factor * own for factor in FACTORS)
        if isinstance(own, int):
            tried = tuple(max(1, round(value)) for value in tried) if not self.values else tried
        return tuple(value for value in dict.fromkeys(tried) if value != own)


CONSTANTS = (
    Constant("TIE_TOKENS", "router.core.estimators.model_speeds"),
    Constant("BACKLOG_TOKENS", "router.core.estimators.model_speeds"),
    Constant("DECODING", f"{WARM_PACKAGE}.cost", (0.25, 1.0)),
    Constant("WEIGHT_LEAST", f"{WARM_PACKAGE}.cost"),
    Constant("BUSY_UNITS", f"{WARM_PACKAGE}.warm_policy"),
    Constant("DEFER_RATIO", f"{WARM_PACKAGE}.warm_policy"),
    Constant("REUSE_PROBABILITY_MAX", "router.core.placement.eviction_cost", (0.9, 0.98)),
    Constant("SUMS_S", "router.core.placement.eviction_cost"),
    Constant("TOUCHES_MAX", "router.core.placement.eviction_cost"),
    Constant("ELSEWHERE_MIN", f"{WARM_PACKAGE}.warm_policy"),
    Constant(
        "RING_GUESS_PRIOR", "router.core.estimators.fleet_means", (0.3, 0.97)
    ),  # a chance: 1 in 3, or 1 in 30 wrong
    Constant("STRIDE", "router.core.fleet.kv_reservations"),
    Constant("SHARE_TOKENS_MIN", "router.core.fleet.engine_counters"),
    Constant("SHARE_ALL", "router.core.fleet.engine_counters", (0.7, 0.97), ("router.core.fleet.registry",)),
    Constant("LAST_REPLICA_SLACK", f"{WARM_PACKAGE}.tie_break", (0, 3)),
    Constant("RING_CHOICES", f"{WARM_PACKAGE}.tie_break", (1, 6)),
    Constant("SPREAD", f"{WARM_PACKAGE}.tie_break", (0, 6)),
    # Not all replicas can keep a bound below 1, so the part above the mean is varied.
    Constant("BOUND", "router.core.placement.ring", (1.08, 1.75)),
    Constant("PRIOR", "router.core.estimators.reuse"),
    Constant("TURN_BLOCKS_MAX", "router.core.estimators.reuse"),
    Constant(
        "WORK_FADE", "router.core.estimators.model_speeds", (0.85, 0.983), ("router.core.estimators.fleet_means",)
    ),
    Constant("FORGET", "router.core.estimators.prefill", (0.94, 0.993)),
    Constant("BAND", "router.core.estimators.speed_factor", (1.0, 1.6)),
    Constant("PRIOR", "router.core.estimators.speed_factor"),
    Constant("AVOIDED", "router.core.estimators.speed_factor", (1.3, 6.0)),  # 1 is the fleet's own speed
    Constant("FADE_S", "router.core.estimators.speed_factor"),
    Constant("BATCH_STEPS", "router.core.fleet.prefill_batches", (0.25, 0.9)),
    Constant("GUESS_TOKENS", "router.core.estimators.output_length"),
)


def entrants(constants: Sequence[Constant] = CONSTANTS) -> tuple[PolicyEntry, ...]:
    """Return `warm` as it is, and once for each other value."""
    return (
        PolicyEntry(WARM),
        *(
            PolicyEntry(WARM, f"{constant.name} = {value:g}, not {constant.get_value():g}", changed)
            for constant in constants
            for value in constant.list_alternatives()
            for changed in [tuple((module, constant.name, value) for module in (constant.module, *constant.also))]
        ),
    )


@dataclass(frozen=True, slots=True)
class ConstantChange:
    """Effect of another value on a workload at a load, as the mean over seeds."""

    case: str
    workload: str
    load: str
    p90_ratio: float
    """Geometric mean of p90 TTFT over that under the constant's own value."""
    e2e_ratio: float
    """The ratio of p90 end-to-end times."""


def moves(rows: Sequence[Row]) -> list[ConstantChange]:
    """Compare each other value with the constants as they are, on the same seed; rows are single runs."""
    own: dict[tuple[str | None, str | None, int | None], Row] = {}
    tried: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.seed is None:
            continue
        if row.case is None:
            own[row.workload, row.load_name, row.seed] = row
        else:
            tried.setdefault((row.case, row.workload or "", row.load_name or ""), []).append(row)
    found = []
    for (case, workload, load), same in tried.items():
        pairs = [(row, own[row.workload, row.load_name, row.seed]) for row in same]
        ratios = (
            exp(fmean(log(figure.get_value(row) / figure.get_value(base)) for row, base in pairs))
            for figure in (TTFT, E2E)
        )
        found.append(ConstantChange(case, workload, load, *ratios))
    return found


def lines(found: Sequence[ConstantChange]) -> list[tuple[str, ...]]:
    """Return a line for each value.

    It has the change of p90 TTFT and p90 end-to-end in each workload, as the mean over loads, and over all workloads.
    Last is the cell with the largest change of p90 TTFT, up or down.
    """
    workloads = list(dict.fromkeys(move.workload for move in found))
    texts = []
    for case in dict.fromkeys(move.case for move in found):
        same = [move for move in found if move.case == case]
        by_workload = [[move for move in same if move.workload == workload] for workload in workloads]
        most = max(same, key=lambda move: abs(log(move.p90_ratio)))
        where = f"{most.workload}, {most.load} {100 * (most.p90_ratio - 1):+.1f} %"
        texts.append((case, *(_format_changes(group) for group in by_workload), _format_changes(same), where))
    return texts


def _format_changes(group: Sequence[ConstantChange]) -> str:
    if not group:
        return "-"
    ttft = 100 * (exp(fmean(log(move.p90_ratio) for move in group)) - 1)
    e2e = 100 * (exp(fmean(log(move.e2e_ratio) for move in group)) - 1)
    return f"{ttft:+.1f} %, {e2e:+.1f} %"


def heads(found: Sequence[ConstantChange]) -> tuple[str, ...]:
    """Return the heads of `lines`."""
    return ("constant", *dict.fromkeys(move.workload for move in found), "all", "most")


def print_moves(console: Console, found: Sequence[ConstantChange]) -> None:
    """Print the moves as a table."""
    title = "p90 TTFT and p90 end-to-end against the value in the code"
    console.print(build_table(heads(found), lines(found), title, left={"constant"}, no_wrap=False))
