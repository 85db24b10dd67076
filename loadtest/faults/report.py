"""Table of the fault matrix: a line per row, with warmroute and the rivals next to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape

from loadtest.common.report import Row, build_table
from loadtest.common.rivals import OURS

Cases = dict[tuple[str, str], Row]


def verdict(row: Row) -> str:
    """Return the verdict on a row in one or two words."""
    if row.ok is None and row.timed and row.got is not None:
        return "not judged"
    return "n/a" if row.ok is None else "ok" if row.ok else "MISSED"


def number(value: float | None) -> str:
    """Return a number in its shortest form."""
    return "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """Print a table and the number of met rows per router; then warmroute's missed rows, a line each."""
    routers = list(dict.fromkeys(row.router or "" for row in rows))
    for router in sorted(routers, key=lambda name: name != OURS):
        own = sorted((row for row in rows if row.router == router), key=lambda row: int(row.goal or 0))
        heads = ("goal", "case", "expected", "got", "", "note")
        made = build_table(heads, (), f"{router}: faults, overload, abuse", left={"case", "", "note"}, no_wrap=False)
        for row, after in zip(own, [*own[1:], None], strict=True):
            note = "; ".join(part for part in (row.note, str(row.errors_by_kind) if row.errors_by_kind else "") if part)
            made.add_row(
                row.goal,
                escape(row.case or ""),
                number(row.expected),
                number(row.got),
                verdict(row),
                escape(note[:300]),
                end_section=after is None or after.goal != row.goal,
            )
        console.print(made)
    for router in routers:
        own = [row for row in rows if row.router == router]
        console.print(f"{router}: {format_met(own)} rows as promised", highlight=False)
    for row in rows:
        if row.ok is False and row.router == OURS:  # printed last, because logs are read from the end
            said = f"missed: goal {row.goal}: {row.case}: {number(row.got)} for {number(row.expected)}."
            console.print(f"{said} {row.note or ''}".rstrip(), highlight=False, markup=False, soft_wrap=True)


def format_met(rows: Iterable[Row]) -> str:
    """Return the number of met rows, of those that apply."""
    judged = [row.ok for row in rows if row.ok is not None]
    return f"{sum(judged)} of {len(judged)}"


def index_by_case(rows: Sequence[Row]) -> dict[str, Cases]:
    """Return the rows by router, then by goal and case in the order of the run.

    A case that continues the previous one (`...`) has both texts in its key.
    """
    found: dict[str, Cases] = {}
    head = ""
    for row in rows:
        case = row.case or ""
        head = head if case.startswith("...") else case
        found.setdefault(row.router or "", {})[row.goal or "", case if case == head else f"{head} {case}"] = row
    return found


def compare_routers(by_router: Mapping[str, Cases], routers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a line for each case of the first router: goal, case, promised value, and each router's value."""
    return [
        (row.goal or "", row.case or "", number(row.expected), *(_got(by_router[name].get(key)) for name in routers))
        for key, row in by_router[routers[0]].items()
    ]


def _got(row: Row | None) -> str:
    if row is None or row.ok is None:
        return "n/a"
    figure = number(row.got)
    return figure if row.ok else "missed" if row.got is None else f"{figure}, missed"
