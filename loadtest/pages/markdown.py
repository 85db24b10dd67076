"""What all rendered parts of the pages are made with: tables of Markdown, places between markers, rows of a JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loadtest.common.report import Row


class ReadmeError(ValueError):
    """A part cannot be rendered or has no place; the message says why."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_block(text: str, name: str, body: str) -> str:
    """The text with what stands between the markers of `name` replaced. Raises ReadmeError."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ReadmeError(f"README has no one place {begin} ... {end}")
    return f"{text[: text.index(begin)]}{begin}\n{body}\n{text[text.index(end) :]}"


def where(document: dict[str, Any]) -> str:
    """The machine of a run."""
    machine = document["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, Python {machine['python']}"


def rows_of(document: dict[str, Any]) -> list[Row]:
    """Raises ReadmeError."""
    try:
        return [msgspec.convert(row, Row) for row in document["rows"]]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ReadmeError(f"not the JSON of an instrument: {error}") from error
