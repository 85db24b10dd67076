"""Tables of workloads on replicas with links between them: a row for each workload, link, load and figure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean

from loadtest.common.report import Row
from loadtest.simulate.scenarios.scenario import LOADS

Figures = Mapping[str, Callable[[Row], float | None]]
"""A figure's name -> its value in a row of one run."""
NAMES = ("workload", "link", "load", "figure")
"""Heads of the columns before those of the entries."""


def lines(
    rows: Sequence[Row],
    workloads: Collection[str],
    links: Collection[str],
    entries: Collection[str],
    figures: Figures,
) -> list[tuple[str, ...]]:
    """Return cells under NAMES and `entries`. They are means over the seeds that all entries with any row have in
    common."""
    order, made = [list(workloads), list(links), list(LOADS)], list[tuple[str, ...]]()
    of: dict[tuple[int, ...], dict[str, dict[int, Row]]] = {}
    for row in rows:
        named = row.workload or "", row.case or "", row.load_name or ""
        policy = row.policy or ""
        if policy in entries and all(name in known for name, known in zip(named, order, strict=True)):
            key = tuple(known.index(name) for name, known in zip(named, order, strict=True))
            of.setdefault(key, {}).setdefault(policy, {})[row.seed or 0] = row
    for key, ran in sorted(of.items()):
        seeds = set[int].intersection(*(set(each) for each in ran.values()))
        if not seeds:
            continue
        cells = [known[at] for known, at in zip(order, key, strict=True)]
        for name, figure in figures.items():
            means = {entry: fmean(figure(each[seed]) or 0.0 for seed in seeds) for entry, each in ran.items()}
            made.append((*cells, name, *[_format_number(means[entry]) if entry in means else "-" for entry in entries]))
    return made


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
