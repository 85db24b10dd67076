"""Tables of the race: policies down, workloads across, one table for each load and figure.

The figures are the judged ones. A cell has one of them and a related figure, each the median over seeds. Policies are
in the order of their geometric mean over the workloads. Upper bounds are above them, because they are no rivals. The
best of the others is marked in each column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from rich.console import Console
from rich.table import Table

from loadtest.common.report import Row, build_table
from loadtest.simulate.results.claims import (
    E2E,
    FIGURES,
    OUTPUT,
    TTFT,
    WARM,
    WITHIN,
    Figure,
    got_text,
    list_missed,
    worst,
)
from loadtest.simulate.scenarios.registry import LOADS

BOUND = " (bound)"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure as text."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """One load, one figure. `lines` has a policy's name and its cells, under `heads`."""

    load: str
    shows: str
    """Description of a cell."""
    heads: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Return a grid for each figure of each load, in the order of LOADS; rows are over seeds (`figures.over_seeds`)."""
    rows = [row for row in rows if row.seeds is not None and row.goal is None and row.case is None]
    return [
        _grid(load, figure, [row for row in rows if (row.load_name or "") == load])
        for load in loads_in(rows)
        for figure in FIGURES
    ]


def loads_in(rows: Iterable[Row]) -> list[str]:
    """Return the names of the rows' loads in the order of LOADS; those that are numbers come last."""
    found = dict.fromkeys(row.load_name or "" for row in rows)
    return [*(name for name in LOADS if name in found), *(name for name in found if name not in LOADS)]


def names_in(found: Iterable[str | None]) -> list[str]:
    """Return each name once, in their order; None is no name."""
    return [name for name in dict.fromkeys(found) if name is not None]


def _grid(load: str, figure: Figure, rows: Sequence[Row]) -> Grid:
    workloads = tuple(dict.fromkeys(row.workload or "" for row in rows))
    by_policy: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_policy.setdefault(row.policy or "", {})[row.workload or ""] = row
    bounds = {row.policy for row in rows if row.bound}
    means = {name: mean_of(found.values(), figure) for name, found in by_policy.items()}
    whole = {name for name, found in by_policy.items() if len(found) == len(workloads)}
    columns = [
        {name: found[workload] for name, found in by_policy.items() if workload in found} for workload in workloads
    ]
    sign = -1 if figure.more_is_better else 1
    bests = [
        min((sign * figure.get_value(row) for name, row in column.items() if name not in bounds), default=None)
        for column in columns
    ]
    lines = []
    for name in sorted(by_policy, key=lambda name: (name not in bounds, sign * means[name])):
        cells = [
            _cell(column.get(name), figure, None if name in bounds or best is None else sign * best)
            for column, best in zip(columns, bests, strict=True)
        ]
        if means.get(WARM):
            cells.append(Cell(f"{means[name] / means[WARM]:.2f} x" if name in whole else "-"))
        lines.append((name + (BOUND if name in bounds else ""), tuple(cells)))
    heads = (*workloads, f"mean, {WARM} = 1") if means.get(WARM) else workloads
    return Grid(load, SHOWS[figure.name], heads, tuple(lines))


def mean_of(rows: Iterable[Row], figure: Figure) -> float:
    """Return the geometric mean of a figure over rows."""
    return exp(fmean(log(figure.get_value(row)) for row in rows))


SHOWS = {
    TTFT.name: "p90 TTFT, requests in time",
    E2E.name: "p90 end-to-end, p90 time per output token",
    OUTPUT.name: "output tokens/s",
}


def _cell(row: Row | None, figure: Figure, best: float | None) -> Cell:
    if row is None or getattr(row, figure.field) is None:
        return Cell("-")
    return Cell(_text(row, figure), figure.get_value(row) == best)


def _text(row: Row, figure: Figure) -> str:
    if figure is OUTPUT:
        return f"{row.output_tokens_per_s or 0:,.0f}"
    if figure is E2E:
        return seconds(row.e2e_p90_s or 0.0) + ("" if row.tpot_p90_ms is None else f", {row.tpot_p90_ms:.0f} ms")
    return seconds(row.ttft_p90_s or 0.0) + ("" if row.goodput_share is None else f", {100 * row.goodput_share:.0f} %")


def seconds(value: float) -> str:
    """Return seconds as text with at most three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} s"


@dataclass(frozen=True, slots=True)
class Ranking:
    """A policy over all workloads, loads and seeds."""

    policy: str
    p90_s: float
    """Geometric mean of p90 TTFT; the two figures after it are geometric means as well."""
    e2e_p90_s: float
    output_tokens_per_s: float
    goodput_share: float
    near: int
    """Number of workloads and loads in which its p90 TTFT is within WITHIN of the best policy that can be built."""
    bound: bool


STANDING_HEADS = (
    "policy",
    "mean p90 TTFT",
    f"{WARM} = 1",
    "mean p90 end-to-end",
    f"{WARM} = 1",
    f"output tokens/s, {WARM} = 1",
    "requests in time",
    f"p90 TTFT within {100 * WITHIN:.0f} % of the best",
)


def standings(rows: Sequence[Row]) -> list[Ranking]:
    """Return the standing of all policies that ran in every cell, bounds first, then the best; rows are single runs."""
    rows = [row for row in rows if row.seed is not None and row.goal is None and row.case is None]
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row.policy or "", []).append(row)
    runs = len({(row.workload, row.load_name, row.seed) for row in rows})
    near = _count_near_best(rows)
    found = [
        Ranking(
            name,
            mean_of(same, TTFT),
            mean_of(same, E2E),
            mean_of(same, OUTPUT),
            fmean(row.goodput_share or 0.0 for row in same),
            near[name],
            bool(same[0].bound),
        )
        for name, same in by_policy.items()
        if len(same) == runs
    ]
    return sorted(found, key=lambda standing: (not standing.bound, standing.p90_s))


def _count_near_best(rows: Sequence[Row]) -> Counter[str]:
    """Count, by policy, the cells in which it is near the best; upper bounds do not count as best."""
    cells: dict[tuple[str | None, str | None], dict[str, list[Row]]] = {}
    for row in rows:
        if not row.bound:
            cells.setdefault((row.workload, row.load_name), {}).setdefault(row.policy or "", []).append(row)
    near: Counter[str] = Counter()
    for policies in cells.values():
        means = {name: mean_of(same, TTFT) for name, same in policies.items()}
        most = (1 + WITHIN) * min(means.values())
        near.update(name for name, mean in means.items() if mean <= most)
    return near


def standing_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the standings as lines of a table, under STANDING_HEADS."""
    found = standings(rows)
    cells = len({(row.workload, row.load_name) for row in rows if row.seed is not None and row.goal is None})
    warm = next((each for each in found if each.policy == WARM), None)
    return [
        (
            each.policy + (BOUND if each.bound else ""),
            seconds(each.p90_s),
            f"{each.p90_s / warm.p90_s:.2f} x" if warm else "-",
            seconds(each.e2e_p90_s),
            f"{each.e2e_p90_s / warm.e2e_p90_s:.2f} x" if warm else "-",
            f"{each.output_tokens_per_s / warm.output_tokens_per_s:.2f} x" if warm else "-",
            f"{100 * each.goodput_share:.1f} %",
            "-" if each.bound else f"{each.near} of {cells}",
        )
        for each in found
    ]


def print_standings(console: Console, rows: Sequence[Row]) -> None:
    """Print one table over everything."""
    console.print(build_table(STANDING_HEADS, standing_lines(rows), "all workloads, loads and seeds"))


def print_grids(console: Console, rows: Sequence[Row]) -> None:
    """Print the tables, each cut into pieces that fit the console."""
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
    texts = [
        (name, *(f"[bold]{cell.text}[/bold]" if cell.best else cell.text for cell in cells[first:last]))
        for name, cells in grid.lines
    ]
    return build_table(("policy", *grid.heads[first:last]), texts, f"load: {grid.load}; {grid.shows}")


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of rows over seeds as Markdown, load by load."""
    parts = []
    for grid in grids(rows):
        parts += [f"Load: {grid.load}; {grid.shows}", "", f"| policy | {' | '.join(grid.heads)} |"]
        parts.append("| --- |" + " ---: |" * len(grid.heads))
        for name, cells in grid.lines:
            texts = [f"**{cell.text}**" if cell.best else cell.text for cell in cells]
            shown = f"`{name.removesuffix(BOUND)}`" + (BOUND if name.endswith(BOUND) else "")
            parts.append(f"| {shown} | {' | '.join(texts)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def verdict_lines(judged: Sequence[Row], *, missed_too: bool = True) -> list[str]:
    """Return a line for each kind of claim: the number that hold, and the worst row. With `missed_too`, each missed
    claim has a line as well. Claims that are reported and not judged have no count."""
    lines = []
    for goal in dict.fromkeys(row.goal or "" for row in judged):
        same = [row for row in judged if row.goal == goal]
        kept = sum(bool(row.ok) for row in same)
        count = "not judged" if same[0].ok is None else f"{kept} of {len(same)} hold"
        last = worst(same)
        lines.append(f"{goal}: {count}; the worst is {got_text(last)} ({last.workload}, {last.load_name})")
    return [*lines, *(f"missed: {line}" for line in list_missed(judged))] if missed_too else lines
