"""The matrix of faults as a table: a line a row, warmroute's and the rivals' beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.report import Row
from loadtest.rivals import OURS


def verdict(row: Row) -> str:
    """In a word."""
    return "n/a" if row.ok is None else "ok" if row.ok else "MISSED"


def number(value: float | None) -> str:
    """As short as it can be said."""
    return "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """A table a router, and how many rows each has met."""
    routers = list(dict.fromkeys(row.router or "" for row in rows))
    for router in sorted(routers, key=lambda name: name != OURS):
        own = sorted((row for row in rows if row.router == router), key=lambda row: int(row.goal or 0))
        drawn = Table(title=f"{router}: faults, overload, abuse", title_justify="left")
        for head in ("goal", "case", "expected", "got", "", "note"):
            right = head in {"goal", "expected", "got"}
            drawn.add_column(head, justify="right" if right else "left", overflow="fold", ratio=None)
        for row, after in zip(own, [*own[1:], None], strict=True):
            note = "; ".join(part for part in (row.note, str(row.errors_by_kind) if row.errors_by_kind else "") if part)
            drawn.add_row(
                row.goal,
                escape(row.case or ""),
                number(row.expected),
                number(row.got),
                verdict(row),
                escape(note[:300]),
                end_section=after is None or after.goal != row.goal,
            )
        console.print(drawn)
    for router in routers:
        own = [row for row in rows if row.router == router and row.ok is not None]
        met = sum(row.ok is True for row in own)
        console.print(f"{router}: {met} of {len(own)} rows as promised", highlight=False)
