"""Several routers that share their state, against one router: `python -m loadtest simulate --several`.

All routers run `warm`. Every run of a workload has the same requests, which are sent to the routers by turns. The
figures of one router depend on chance as well, because rings place by the names of replicas. So it runs under three
sets of names. Several routers are compared with the mean of these runs, and the spread of the runs shows how large a
difference has to be. Several routers are judged by figures that are worse: fewer hits, later answers, less goodput.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.claims import WARM
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.race import RaceJob, freeze_objects
from loadtest.simulate.scenarios.registry import LOADS, SCENARIOS

OF_SEVERAL = ("two_routers", "four_routers")
"""Scenarios that are another one with several routers."""
NEAR_S, FAR_S = 0.005, 0.2
LEAST = 0.001  # least ratio in a geometric mean, in place of 0
NEAR_LIMIT, FAR_LIMIT = 0.03, 0.06  # parts of one router's figure by which several may be worse


@dataclass(frozen=True, slots=True)
class Variant:
    """A number of routers, and the channel between them."""

    label: str
    routers: int = 1
    delay_s: float | None = None
    names: str = ""
    """Prefix of the replicas' names; if empty, the names are the scenario's."""
    limit: float = 0.0

    def apply_to(self, setting: ClusterSpec) -> ClusterSpec:
        """Return the cluster with these routers."""
        names = tuple(f"http://{self.names}-{n}" for n in range(setting.replicas)) if self.names else setting.names
        return replace(setting, routers=self.routers, share_delay_s=self.delay_s, names=names)


ALONE = (Variant("1"), Variant("1, other names", names="a"), Variant("1, again others", names="b"))
TOGETHER = (
    *(Variant(f"{routers}", routers, NEAR_S, limit=NEAR_LIMIT) for routers in (2, 4, 8)),
    Variant("4, 200 ms late", 4, FAR_S, limit=FAR_LIMIT),
)
VARIANTS = {variant.label: variant for variant in (*ALONE, *TOGETHER)}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that several routers are judged by."""

    name: str
    of: Callable[[Row], float]
    more_is_better: bool


FIGURES = (
    Figure("hits", lambda row: row.token_hit_rate or 0.0, more_is_better=True),
    Figure("TTFT p90", lambda row: row.ttft_p90_s or 0.0, more_is_better=False),
    Figure("end-to-end p90", lambda row: row.e2e_p90_s or 0.0, more_is_better=False),
    Figure("goodput", lambda row: row.goodput or 0.0, more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class SeveralJob:
    """One workload, and the variants to run."""

    job: RaceJob
    variants: tuple[str, ...] = tuple(VARIANTS)


def run_several(several: SeveralJob) -> list[Row]:
    """Return a row for each variant, in their order."""
    job, rows = several.job, list[Row]()
    scenario = job.build()
    with freeze_objects():
        for variant in map(VARIANTS.__getitem__, several.variants):
            setting = variant.apply_to(scenario.setting)
            row = row_of(
                replace(scenario, setting=setting), Simulation(scenario.workload, setting, ROWS[WARM].make).run()
            )
            row.workload, row.policy, row.seed, row.load_name = job.scenario, WARM, job.seed, job.load
            row.case = variant.label
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Compared:
    """Figures of several routers, or of one under other names, relative to one router."""

    variant: Variant
    off: dict[str, float]
    """Difference by figure: 0.01 is one hundredth more."""
    apart: dict[str, float]
    """Largest difference between a run of one router and the mean of all such runs, by figure."""

    @property
    def beyond(self) -> list[str]:
        """Figures that are worse by more than the limit, and by more than other names of replicas make them."""
        limit = self.variant.limit
        return [
            each.name
            for each in FIGURES
            if (-1 if each.more_is_better else 1) * self.off[each.name] > max(limit, self.apart[each.name])
        ]


def compare_variants(rows: Sequence[Row]) -> dict[tuple[str, str], list[Compared]]:
    """Return all variants by workload and load, each over the seeds that one router ran too."""
    found: dict[tuple[str, str], list[Compared]] = {}
    for key, group in _groups(rows).items():
        alone = {variant.label: group[variant.label] for variant in ALONE if variant.label in group}
        if not alone:
            continue
        for label, of_seeds in group.items():
            seeds = set(of_seeds).intersection(*alone.values())
            if not seeds:
                continue
            means = [{each.name: _mean(each, alone[name], seeds) for each in FIGURES} for name in alone]
            base = {each.name: fmean(mean[each.name] for mean in means) for each in FIGURES}
            own = {each.name: _mean(each, of_seeds, seeds) for each in FIGURES}
            apart = {name: max(abs(_part(mean[name], base[name])) for mean in means) for name in base}
            off = {name: _part(own[name], base[name]) for name in base}
            found.setdefault(key, []).append(Compared(VARIANTS[label], off, apart))
    return found


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, dict[int, Row]]]:
    """Return (workload, load) -> variant -> seed -> row. Workloads and variants keep the order of their tables."""
    groups: dict[tuple[str, str], dict[str, dict[int, Row]]] = {}
    workloads, loads, labels = list(SCENARIOS), list(LOADS), list(VARIANTS)
    known = [row for row in rows if row.case in VARIANTS and row.workload in SCENARIOS and row.seed is not None]

    def place(row: Row) -> tuple[int, int, int]:
        return workloads.index(row.workload or ""), loads.index(row.load_name or ""), labels.index(row.case or "")

    for row in sorted(known, key=place):
        group = groups.setdefault((row.workload or "", row.load_name or ""), {})
        group.setdefault(row.case or "", {})[row.seed or 0] = row
    return groups


def _mean(figure: Figure, of_seeds: dict[int, Row], seeds: set[int]) -> float:
    return fmean(figure.of(of_seeds[seed]) for seed in seeds)


def _part(got: float, base: float) -> float:
    return got / base - 1 if base else 0.0


# Table and text

HEADS = ("workload", "load", "1 router, other names", *(variant.label for variant in TOGETHER))


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of the table for each workload and load, under HEADS."""
    made = []
    for (workload, load), all_ in compare_variants(rows).items():
        by_label = {each.variant.label: each for each in all_}
        apart = "/".join(f"±{100 * all_[0].apart[each.name]:.1f}" for each in FIGURES)
        cells = [_cell(by_label.get(variant.label)) for variant in TOGETHER]
        made.append((workload, load, apart, *cells))
    return made


def _cell(compared_: Compared | None) -> str:
    if compared_ is None:
        return "-"
    said = "/".join(f"{100 * compared_.off[each.name]:+.1f}" for each in FIGURES)
    return f"**{said}**" if compared_.beyond else said


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return a line for each variant: the number of workloads within the limit, and the mean differences."""
    said, found = [], compare_variants(rows)
    for variant in TOGETHER:
        cases = [each for all_ in found.values() for each in all_ if each.variant == variant]
        if cases:
            kept = sum(not each.beyond for each in cases)
            text = f"{kept} of {len(cases)} workloads within {100 * variant.limit:g} %"
            said.append(f"{variant.label} routers: {text}. Geometric means: {_means(cases)}")
    return said


BEYOND_HEADS = ("workload", "load", *(variant.label for variant in TOGETHER))


def lines_beyond(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the figures beyond the limit for each workload and load that has one, under BEYOND_HEADS."""
    made = []
    for (workload, load), all_ in compare_variants(rows).items():
        by_label = {each.variant.label: ", ".join(each.beyond) for each in all_}
        if any(by_label.values()):
            made.append((workload, load, *(by_label.get(variant.label, "") for variant in TOGETHER)))
    return made


def _means(cases: Sequence[Compared]) -> str:
    offs = {each.name: [max(1 + case.off[each.name], LEAST) for case in cases] for each in FIGURES}
    return ", ".join(f"{name} {100 * (geometric_mean(parts) - 1):+.1f} %" for name, parts in offs.items())


def print_several(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, and the verdicts on the limits."""
    names = ", ".join(each.name for each in FIGURES)
    title = f"connected routers, compared with one router: {names}, in % of its own; ** beyond the limit and the names"
    made = build_table(HEADS, (), title, left={"workload", "load"}, no_wrap=False)
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
    beyond = build_table(BEYOND_HEADS, (), "figures beyond the limit", left={"workload", "load"}, no_wrap=False)
    for cells in lines_beyond(rows):
        beyond.add_row(*cells)
    console.print(beyond)
    for line in verdicts(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
