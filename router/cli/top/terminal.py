"""A screen with colours, drawn by rich. Texts come from clients, so they are never parsed as rich's markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.cli.top.screen import Grid, Line

GAP_CELLS = 2  # cells between two columns
TEXT_CELLS_MIN = 8  # least width of a column of texts that is cut


def render(parts: Iterable[Line | Grid], *, width: int | None = None) -> Group:
    """Return the content for rich to print. With a `width` in cells each row takes one line, and texts that are too
    long are cut."""
    return Group(*(_line(part, width) if isinstance(part, Line) else _grid(part, width) for part in parts))


def _line(line: Line, width: int | None) -> Text:
    made = Text(no_wrap=width is not None, overflow="ellipsis" if width is not None else "fold")
    for cell in line.cells:
        made.append(cell.text, style=cell.style)
    return made


def _grid(grid: Grid, width: int | None) -> Table:
    if width is not None:
        grid = _without_minor(grid, width)
    table = Table(box=None, padding=(0, GAP_CELLS, 0, 0), pad_edge=False, header_style="bold")
    widths = _widths(grid, width) if width is not None else [None] * len(grid.columns)
    for column, cells in zip(grid.columns, widths, strict=True):
        folds = column.folds and width is None
        table.add_column(
            Text(column.name),
            justify="right" if column.number else "left",
            width=cells,
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for row in grid.rows:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    return table


def _without_minor(grid: Grid, width: int) -> Grid:
    """Return the grid without its minor columns, if texts would otherwise have less than their least width."""
    numbers = sum(
        max(len(column.name), *(len(row[place].text) for row in grid.rows))
        for place, column in enumerate(grid.columns)
        if column.number
    )
    texts = sum(not column.number for column in grid.columns)
    if width - GAP_CELLS * (len(grid.columns) - 1) - numbers >= texts * TEXT_CELLS_MIN:
        return grid
    kept = [place for place, column in enumerate(grid.columns) if not column.minor]
    return Grid(
        tuple(grid.columns[place] for place in kept), [tuple(row[place] for place in kept) for row in grid.rows]
    )


def _widths(grid: Grid, width: int) -> list[int | None]:
    """Return the widths of the columns. Number columns have their full width. Each text column before the last gets at
    most half of the remaining width. rich itself would take cells from numbers as well."""
    wanted = [
        max(len(column.name), *(len(row[place].text) for row in grid.rows)) for place, column in enumerate(grid.columns)
    ]
    texts = [place for place, column in enumerate(grid.columns) if not column.number]
    left = width - GAP_CELLS * (len(wanted) - 1) - sum(wanted) + sum(wanted[place] for place in texts)
    for number, place in enumerate(texts):
        most = left if number == len(texts) - 1 else max(TEXT_CELLS_MIN, left // 2)
        wanted[place] = max(1, min(wanted[place], most))
        left -= wanted[place]
    return [*wanted]
