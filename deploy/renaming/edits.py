"""Changes of a file's text by place: what stands there is replaced, and must be what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Edit:
    """Replace `old` at `line` (from 1) and `column` (bytes of UTF-8, from 0) by `new`."""

    line: int
    column: int
    old: str
    new: str


def apply_edits(source: bytes, edits: Iterable[Edit]) -> bytes:
    """The changed text. Raises ValueError where a place does not have what is replaced, or two edits overlap."""
    lines = source.splitlines(keepends=True)
    last: tuple[int, int] | None = None
    for edit in sorted(set(edits), reverse=True):
        line = lines[edit.line - 1]
        end = edit.column + len(edit.old.encode())
        if line[edit.column : end] != edit.old.encode():
            raise ValueError(f"{edit} is not in {line!r}")
        if last is not None and last[0] == edit.line and end > last[1]:
            raise ValueError(f"{edit} overlaps what stands behind it: {line!r}")
        lines[edit.line - 1] = line[: edit.column] + edit.new.encode() + line[end:]
        last = (edit.line, edit.column)
    return b"".join(lines)
