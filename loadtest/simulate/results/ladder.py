"""llm-d's ladder, stage by stage, beside its published figures.

A run passes through all stages, and each stage is a row of its own. Its percentiles are over the requests that arrived
in it. Output tokens/s are counted from its first arrival to its last answer, the drain included, as inference-perf
counts them.

The published figures are of 8 replicas of two H100 with Qwen3-32B, and of the variant in which every request is a
replay. They come from three sources, each with that year's engines:

- llm-d's "KV-cache wins you can see" (2025-09; 307,328 tokens of KV cache each)
- its guide for precise prefix caches of 2026, which compares with a Service of Kubernetes
- its optimized baseline (2026-07)

llm-d's precise routers receive KV events, and its routers read metrics every 50 ms. Its rows have the same setting
here; all other rows have the race's own setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from rich.console import Console
from rich.markup import escape

from loadtest.common.report import Row, build_table
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.claims import WARM
from loadtest.simulate.results.metrics import over_seeds, row_of
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.results.tables import names_in, seconds
from loadtest.simulate.scenarios.generated import STAGES, ladder_of
from loadtest.simulate.scenarios.scenario import Scenario

PUBLISHED, HONEST = "ladder_full_published", "ladder_full_honest"
SEED = 6
"""First of the seeds that claims are made on."""


@dataclass(frozen=True, slots=True)
class LadderEntry:
    """Row of the ladder with the settings of its router. `published` is its name in llm-d's report."""

    published: str = ""
    grade: Literal["exact", "estimated", "none"] = "estimated"
    probe_interval_s: float = 1.0

    def __str__(self) -> str:
        return f"grade {self.grade}, metrics every {self.probe_interval_s:g} s"


CONTENDERS = {
    "llmd_weights_2025": LadderEntry("precise", "exact", 0.05),
    "llmd_default": LadderEntry("estimated", "estimated", 0.05),
    "random": LadderEntry("random"),
    "least_loaded": LadderEntry("load"),
    "llmd_weights": LadderEntry("precise, 2026", "exact", 0.05),
    "llmd_affinity": LadderEntry("affinity, 2026", "estimated", 0.05),
    "round_robin": LadderEntry("Service, 2026"),
    WARM: LadderEntry(),
}
P90_S = {
    15: {"precise": 0.40, "estimated": 0.40, "random": 2.30, "load": 7.00},
    20: {"precise": 0.60, "estimated": 0.60, "random": 70.3, "load": 77.7},
    30: {"precise": 0.51, "estimated": 0.71, "random": 86.2, "load": 83.8},
    40: {"precise": 0.49, "estimated": 43.0, "random": 101.0, "load": 101.0},
    60: {"precise": 0.50, "estimated": 50.2, "random": 106.0, "load": 110.0},
}
"""Published p90 TTFT by stage, in seconds, of 2025."""
P90_S_2026 = {
    15: {"precise, 2026": 0.225, "Service, 2026": 1.593},
    20: {"precise, 2026": 0.320, "Service, 2026": 35.3, "affinity, 2026": 4.2},
    30: {"precise, 2026": 0.193, "Service, 2026": 46.0, "affinity, 2026": 0.2},
    40: {"precise, 2026": 0.272, "Service, 2026": 126.2, "affinity, 2026": 0.3},
    60: {"precise, 2026": 0.300, "Service, 2026": 138.7, "affinity, 2026": 0.9},
}
"""Published p90 TTFT by stage, in seconds, of 2026."""
OUTPUT_TOKENS_PER_S = {60: {"precise": 10_497.0, "estimated": 7_248.0, "random": 4_835.0, "load": 4_745.0}}
"""Published output tokens a second, by rate and policy, of 2025."""
OUTPUT_TOKENS_PER_S_2026 = {
    15: {"precise, 2026": 6_887.0, "Service, 2026": 5_381.0, "affinity, 2026": 8_995.0},
    20: {"precise, 2026": 11_224.0, "Service, 2026": 6_205.0, "affinity, 2026": 6_656.0},
    30: {"precise, 2026": 13_507.0, "Service, 2026": 5_702.0, "affinity, 2026": 10_509.0},
    40: {"precise, 2026": 15_593.0, "Service, 2026": 6_336.0, "affinity, 2026": 14_134.0},
    60: {"precise, 2026": 15_733.0, "Service, 2026": 6_551.0, "affinity, 2026": 13_528.0},
}
"""Published output tokens a second, by rate and policy, of 2026."""
CLEARLY = 1.5
"""Least ratio of two published figures that makes their order a claim; 106 s and 110 s have no order."""
WARM_MOST_S, ROUND_ROBIN_LEAST_S, TOP_RPS = 1.0, 60.0, 60
"""Limits for the honest variant at its last stage."""
WARM_GOAL = f"seconds of p90 TTFT with {WARM}, at most"
ROUND_ROBIN_GOAL = "seconds of p90 TTFT with round_robin, at least"
ORDER_GOAL = f"pairs in the published order (p90 TTFT {CLEARLY:g} x apart), at least"


RATES = tuple(rate for rate, _ in STAGES)


@dataclass(frozen=True, slots=True)
class LadderRun:
    """One row on one ladder for one seed; `stages` are (requests a second, seconds), in order."""

    ladder: str
    policy: str
    seed: int
    stages: tuple[tuple[int, int], ...]
    calibration: str = CALIBRATION


def climb(job: LadderRun) -> list[Row]:
    """Return a row for each stage."""
    contender = CONTENDERS[job.policy]
    scenario = ladder_of(job.ladder, job.seed, job.stages, honest=job.ladder == HONEST)
    setting = replace(
        scenario.setting,
        calibration=CALIBRATIONS[job.calibration],
        grade=contender.grade,
        probe_interval_s=contender.probe_interval_s,
    )
    scenario = replace(scenario, setting=setting)
    with freeze_objects():
        result = Simulation(scenario.workload, setting, ROWS[job.policy].make).run()
    rows, first = [], scenario.workload.warm_up
    for rate, lasts_s in job.stages:
        row = _make_stage_row(scenario, result, first, rate, rate * lasts_s)
        row.workload, row.policy, row.seed, row.note = job.ladder, job.policy, job.seed, str(contender)
        rows.append(row)
        first += rate * lasts_s
    return rows


def _make_stage_row(scenario: Scenario, result: Result, first: int, rate: int, count: int) -> Row:
    sent = result.sent[first : first + count]
    end_s = max(each.due_s + (each.e2e_s or 0.0) for each in sent)
    workload = replace(scenario.workload, warm_up=0)
    row = row_of(replace(scenario, workload=workload, load=rate), Result(sent, end_s, result.computed_tokens))
    row.case, row.preemptions = case_of(rate), None  # engines count preemptions of the whole run
    return row


def case_of(rate: int) -> str:
    """Return the name of a stage in rows."""
    return f"{rate}/s"


# Judgement and tables


def judge(rows: Sequence[Row]) -> list[Row]:
    """Judge rows of single runs. A claim without rows is left out."""
    by_row = {(row.workload, row.policy, row.case): row for row in over_seeds(rows)}
    judged = []
    for policy, goal, bar_s, least in (
        (WARM, WARM_GOAL, WARM_MOST_S, False),
        ("round_robin", ROUND_ROBIN_GOAL, ROUND_ROBIN_LEAST_S, True),
    ):
        row = by_row.get((HONEST, policy, case_of(TOP_RPS)))
        if row is not None and (got := row.ttft_p90_s) is not None:
            ok = got >= bar_s if least else got <= bar_s
            judged.append(_make_goal_row(HONEST, policy, TOP_RPS, goal, bar_s, got, ok=ok))
    for rate, figures in P90_S.items():
        known = [
            (figures[contender.published], row.ttft_p90_s or 0.0)
            for policy, contender in CONTENDERS.items()
            if contender.published in figures and (row := by_row.get((PUBLISHED, policy, case_of(rate))))
        ]
        pairs = [(a[1], b[1]) for a, b in combinations(sorted(known), 2) if b[0] >= CLEARLY * a[0]]
        kept = sum(here < there for here, there in pairs)
        if pairs:
            judged.append(_make_goal_row(PUBLISHED, None, rate, ORDER_GOAL, len(pairs), kept, ok=kept == len(pairs)))
    return judged


def _make_goal_row(
    ladder: str, policy: str | None, rate: int, goal: str, expected: float, got: float, *, ok: bool
) -> Row:
    return Row(workload=ladder, policy=policy, case=case_of(rate), goal=goal, expected=expected, got=got, ok=ok)


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each claim on rows of single runs, and the range of ratios to the published figures."""
    lines = [
        f"`{row.workload}` at {row.case}: {row.goal} {row.expected:g}:"
        f" got {row.got:.3g}, {'seen' if row.ok else 'missed'}"
        for row in judge(rows)
    ]
    for what, name, figures, year in (
        ("p90 TTFT", "ttft_p90_s", P90_S_2026, 2026),
        ("output tokens/s", "output_tokens_per_s", OUTPUT_TOKENS_PER_S_2026, 2026),
        ("p90 TTFT", "ttft_p90_s", P90_S, 2025),
        ("output tokens/s", "output_tokens_per_s", OUTPUT_TOKENS_PER_S, 2025),
    ):
        ratios = sorted(
            (ratio, f"`{row.policy}` at {row.case}")
            for row in over_seeds(rows)
            if (ratio := _ratio(row, getattr(row, name), figures)) is not None
        )
        if ratios:
            (least, where), (most, there) = ratios[0], ratios[-1]
            lines.append(
                f"{what} is {least:.2f} x ({where}) to {most:.2f} x ({there}) of the figures published in {year}"
            )
    return lines


Figures = Mapping[int, Mapping[str, float]]
"""Figures by rate and by a policy's name in the report."""


def _find_published(row: Row, *reports: Figures) -> float | None:
    if row.workload != PUBLISHED or row.load is None:
        return None
    name, rate = CONTENDERS[row.policy or ""].published, round(row.load)
    return next((figures[rate][name] for figures in reports if name in figures.get(rate, ())), None)


def _ratio(row: Row, value: float | None, *reports: Figures) -> float | None:
    published = _find_published(row, *reports)
    return None if published is None or value is None else value / published


TOKENS_AT = (20, 40, 60)
"""Stages with output tokens/s in the table."""

Grid = tuple[str, list[str], list[list[str]]]
"""(title, heads, lines)"""


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Return rows of single runs as tables: rows down, the stages with published figures across. A cell with a
    published figure shows how many times that figure it is."""
    merged, found = over_seeds(rows), []
    for ladder in names_in(row.workload for row in merged):
        same = {(row.policy, row.case): row for row in merged if row.workload == ladder}
        cases = [case_of(rate) for rate in P90_S if any(case == case_of(rate) for _, case in same)]
        told = {case_of(rate) for rate in TOKENS_AT} | set(cases[-1:])
        lines = [
            [
                _label(policy),
                *(_seconds_cell(same[policy, case]) for case in cases),
                *(_tokens_cell(same[policy, case]) for case in cases if case in told),
            ]
            for policy in names_in(policy for policy, _ in same)
        ]
        heads = ["row", *(f"p90 TTFT at {case}" for case in cases)]
        heads += [f"output tok/s at {case}" for case in cases if case in told]
        found.append((ladder, heads, lines))
    return found


def _label(policy: str) -> str:
    published = CONTENDERS[policy].published
    return f"`{policy}` ({published})" if published else f"`{policy}`"


def _seconds_cell(row: Row) -> str:
    published, ratio = _find_published(row, P90_S, P90_S_2026), _ratio(row, row.ttft_p90_s, P90_S, P90_S_2026)
    here = seconds(row.ttft_p90_s or 0.0)
    return here if published is None else f"{here}, {ratio:.2f} x {seconds(published)}"


def _tokens_cell(row: Row) -> str:
    value = row.output_tokens_per_s or 0.0
    reports = (OUTPUT_TOKENS_PER_S, OUTPUT_TOKENS_PER_S_2026)
    published, ratio = _find_published(row, *reports), _ratio(row, value, *reports)
    return f"{value:,.0f}" if published is None else f"{value:,.0f}, {ratio:.2f} x {published:,.0f}"


def print_ladders(console: Console, rows: Sequence[Row]) -> None:
    """Print a table for each variant."""
    for title, heads, lines in grids(rows):
        texts = [[escape(cell.replace("`", "")) for cell in line] for line in lines]
        console.print(build_table(heads, texts, title, left={"row"}, no_wrap=False))
