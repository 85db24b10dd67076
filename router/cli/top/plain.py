"""A screen as plain text, without colours and without a maximum width."""

from __future__ import annotations

from collections.abc import Iterable

from router.cli.top.screen import Grid, Line


def render(parts: Iterable[Line | Grid]) -> str:
    """Return lines of text. Columns of tables are as wide as their widest cell, and numbers are right-aligned."""
    return "\n".join(line for part in parts for line in ([_line(part)] if isinstance(part, Line) else _grid(part)))


def _line(line: Line) -> str:
    return "".join(cell.text for cell in line.cells).rstrip()


def _grid(grid: Grid) -> list[str]:
    rows = [[column.name for column in grid.columns], *([cell.text for cell in row] for row in grid.rows)]
    widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, grid.columns, strict=True)
        padded = (text.rjust(width) if column.number else text.ljust(width) for text, width, column in cells)
        lines.append("  ".join(padded).rstrip())
    return lines
