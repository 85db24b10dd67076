"""Parts of all rendered blocks: Markdown tables, places between markers, rows of a JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loadtest.common.report import Row


class PageError(ValueError):
    """A block cannot be rendered or has no place in its page; the message names the reason."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a `|` within a cell is escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_block(text: str, name: str, body: str) -> str:
    """Return the page's text with `body` between the markers of the block `name`. Raises PageError."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise PageError(f"the page has no one place {begin} ... {end}")
    return f"{text[: text.index(begin)]}{begin}\n{body}\n{text[text.index(end) :]}"


def describe_machine(document: dict[str, Any]) -> str:
    """Return the machine of a run: processor, cores, memory and Python."""
    machine = document["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, Python {machine['python']}"


def rows_of(document: dict[str, Any]) -> list[Row]:
    """Return the rows of a benchmark's JSON. Raises PageError."""
    try:
        return [msgspec.convert(row, Row) for row in document["rows"]]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise PageError(f"not the JSON of an instrument: {error}") from error


def block_of(text: str, name: str) -> str:
    """Return the text between the markers of the block `name`. Raises PageError."""
    parts = text.split(f"<!-- {name}:begin -->\n")
    if len(parts) != 2 or f"<!-- {name}:end -->" not in parts[1]:
        raise PageError(f"the page has no one block {name}")
    return parts[1].split(f"<!-- {name}:end -->")[0]


def cells_of(text: str) -> list[list[str]]:
    """Return the cells of every row of the first Markdown table in the text, with its head and without its rule."""
    lines = [line for line in text.partition("\n\n| ")[2].partition("\n\n")[0].splitlines() if line]
    rows = [[cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")] for line in lines]
    return [row for row in rows if row[0] != "---"]
