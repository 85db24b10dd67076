"""The race as tables: policies down, workloads across, one table a load.

A cell has the p90 time to first token and the part of the requests that had theirs in time, each the median over
seeds. Policies stand in the order of their geometric mean over the workloads, upper bounds above them: those are no
rivals. The best of the others is marked in each column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from rich.console import Console
from rich.table import Table

from loadtest.report import Row
from loadtest.simulation.claims import GOODPUT, GOODPUT_NEVER, WARM, WITHIN, missed, p90_s
from loadtest.simulation.scenarios import LOADS

BOUND = " (bound)"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure as people read it."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """One load. `lines`: a policy's name and its cells, under `heads`."""

    load: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Of rows over seeds (see `figures.over_seeds`): a grid for each load, in the order of LOADS."""
    rows = [row for row in rows if row.seeds is not None and row.goal is None and row.case is None]
    loads = dict.fromkeys(row.load_name or "" for row in rows)
    order = [*(name for name in LOADS if name in loads), *(name for name in loads if name not in LOADS)]
    return [_grid(load, [row for row in rows if (row.load_name or "") == load]) for load in order]


def _grid(load: str, rows: Sequence[Row]) -> Grid:
    workloads = tuple(dict.fromkeys(row.workload or "" for row in rows))
    by_policy: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_policy.setdefault(row.policy or "", {})[row.workload or ""] = row
    bounds = {row.policy for row in rows if row.bound}
    means = {name: mean_p90_s(found.values()) for name, found in by_policy.items()}
    whole = {name for name, found in by_policy.items() if len(found) == len(workloads)}
    columns = [
        {name: found[workload] for name, found in by_policy.items() if workload in found} for workload in workloads
    ]
    least = [
        min((row.ttft_p90_s or 0.0 for name, row in column.items() if name not in bounds), default=None)
        for column in columns
    ]
    lines = []
    for name in sorted(by_policy, key=lambda name: (name not in bounds, means[name])):
        cells = [
            _cell(column.get(name), None if name in bounds else best)
            for column, best in zip(columns, least, strict=True)
        ]
        if means.get(WARM):
            cells.append(Cell(f"{means[name] / means[WARM]:.2f} x" if name in whole else "-"))
        lines.append((name + (BOUND if name in bounds else ""), tuple(cells)))
    heads = (*workloads, f"mean, {WARM} = 1") if means.get(WARM) else workloads
    return Grid(load, heads, tuple(lines))


def mean_p90_s(rows: Iterable[Row]) -> float:
    """The geometric mean."""
    return exp(fmean(log(p90_s(row)) for row in rows))


def _cell(row: Row | None, least_s: float | None) -> Cell:
    if row is None or row.ttft_p90_s is None:
        return Cell("-")
    share = "" if row.goodput_share is None else f", {100 * row.goodput_share:.0f} %"
    return Cell(f"{seconds(row.ttft_p90_s)}{share}", row.ttft_p90_s == least_s)


def seconds(value: float) -> str:
    """With three digits at most."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} s"


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy over all workloads, loads and seeds."""

    policy: str
    p90_s: float
    """Geometric mean of p90 TTFT."""
    goodput_share: float
    near: int
    """In how many workloads and loads it is within WITHIN of the best p90 TTFT of those that can be built."""
    bound: bool


STANDING_HEADS = (
    "policy",
    "mean p90 TTFT",
    f"{WARM} = 1",
    "requests in time",
    f"within {100 * WITHIN:.0f} % of the best",
)


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Of rows of single runs: all policies that ran everywhere, bounds first, then the best."""
    rows = [row for row in rows if row.seed is not None and row.goal is None and row.case is None]
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row.policy or "", []).append(row)
    runs = len({(row.workload, row.load_name, row.seed) for row in rows})
    near = _near(rows)
    found = [
        Standing(
            name, mean_p90_s(same), fmean(row.goodput_share or 0.0 for row in same), near[name], bool(same[0].bound)
        )
        for name, same in by_policy.items()
        if len(same) == runs
    ]
    return sorted(found, key=lambda standing: (not standing.bound, standing.p90_s))


def _near(rows: Sequence[Row]) -> Counter[str]:
    """Of each policy, cells in which it is near the best; upper bounds are nobody's best."""
    cells: dict[tuple[str | None, str | None], dict[str, list[Row]]] = {}
    for row in rows:
        if not row.bound:
            cells.setdefault((row.workload, row.load_name), {}).setdefault(row.policy or "", []).append(row)
    near: Counter[str] = Counter()
    for policies in cells.values():
        means = {name: mean_p90_s(same) for name, same in policies.items()}
        most = (1 + WITHIN) * min(means.values())
        near.update(name for name, mean in means.items() if mean <= most)
    return near


def standing_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """As people read it, under STANDING_HEADS."""
    found = standings(rows)
    cells = len({(row.workload, row.load_name) for row in rows if row.seed is not None and row.goal is None})
    warm = next((each.p90_s for each in found if each.policy == WARM), None)
    return [
        (
            each.policy + (BOUND if each.bound else ""),
            seconds(each.p90_s),
            f"{each.p90_s / warm:.2f} x" if warm else "-",
            f"{100 * each.goodput_share:.1f} %",
            "-" if each.bound else f"{each.near} of {cells}",
        )
        for each in found
    ]


def print_standings(console: Console, rows: Sequence[Row]) -> None:
    """One table over everything."""
    drawn = Table(title="all workloads, loads and seeds", title_justify="left")
    for i, head in enumerate(STANDING_HEADS):
        drawn.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for line in standing_lines(rows):
        drawn.add_row(*line)
    console.print(drawn)


def print_grids(console: Console, rows: Sequence[Row]) -> None:
    """The tables, cut into as many pieces as the console is too narrow for."""
    for grid in grids(rows):
        label = max(len(name) for name, _ in grid.lines)
        widths = [
            3 + max(len(head), *(len(cells[i].text) for _, cells in grid.lines)) for i, head in enumerate(grid.heads)
        ]
        first = 0
        while first < len(grid.heads):
            last, room = first + 1, console.width - label - 4 - widths[first]
            while last < len(grid.heads) and widths[last] <= room:
                room -= widths[last]
                last += 1
            console.print(_piece(grid, first, last))
            first = last


def _piece(grid: Grid, first: int, last: int) -> Table:
    drawn = Table(title=f"load: {grid.load}; p90 TTFT, requests in time", title_justify="left")
    drawn.add_column("policy", no_wrap=True)
    for head in grid.heads[first:last]:
        drawn.add_column(head, justify="right", no_wrap=True)
    for name, cells in grid.lines:
        texts = [f"[bold]{cell.text}[/bold]" if cell.best else cell.text for cell in cells[first:last]]
        drawn.add_row(name, *texts)
    return drawn


def markdown(rows: Sequence[Row]) -> str:
    """The tables for a page, load by load. Of rows over seeds."""
    parts = []
    for grid in grids(rows):
        parts += [f"Load: {grid.load}", "", f"| policy | {' | '.join(grid.heads)} |"]
        parts.append("| --- |" + " ---: |" * len(grid.heads))
        for name, cells in grid.lines:
            texts = [f"**{cell.text}**" if cell.best else cell.text for cell in cells]
            shown = f"`{name.removesuffix(BOUND)}`" + (BOUND if name.endswith(BOUND) else "")
            parts.append(f"| {shown} | {' | '.join(texts)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def verdict_lines(judged: Sequence[Row], *, missed_too: bool = True) -> list[str]:
    """What the claims came to: how many of each kind hold, where it is worst, and, unless only counts are wanted, each
    one that does not."""
    lines = []
    for goal in dict.fromkeys(row.goal or "" for row in judged):
        same = [row for row in judged if row.goal == goal]
        points = goal in {GOODPUT, GOODPUT_NEVER}
        worst = min(same, key=lambda row: row.got or 0.0) if points else max(same, key=lambda row: row.got or 0.0)
        got = f"{100 * (worst.got or 0.0):+.1f} points against" if points else f"{worst.got:.3f} x"
        where = f"{worst.workload}, {worst.load_name}"
        kept = sum(bool(row.ok) for row in same)
        lines.append(f"{goal}: {kept} of {len(same)} hold; the worst is {got} `{worst.policy}` ({where})")
    return [*lines, *(f"missed: {line}" for line in missed(judged))] if missed_too else lines
