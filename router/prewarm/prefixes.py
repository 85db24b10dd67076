"""Prompts for prewarming replicas: requests as clients would send them, from a file or a call.

A file has one per line, `{"path": "/v1/chat/completions", "body": {...}}`. Every problem is reported, by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Raw

from router.config.file_contents import content
from router.core.dialects import PATHS, InvalidBody, prefill_only
from router.core.prompts.json_fields import UNREADABLE

FILE_BYTES_MAX, PREFIXES_MAX = 16 << 20, 1_024
PROBLEMS_MAX = 20  # problems reported at once


class WarmupPrompt(msgspec.Struct, frozen=True, gc=False):
    """Request with a prompt that should be cached. For a learned template, `key` is the chain key of the shared part,
    and `messages` the number of shared messages."""

    path: str
    body: bytes
    key: int = 0
    messages: int = 0


class PrefixRow(msgspec.Struct, forbid_unknown_fields=True):
    """Request in a file or a call."""

    path: str
    body: Raw


class PrefixesError(ValueError):
    """Raised for invalid prefixes; `problems` has a line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


_decode_row = msgspec.json.Decoder(PrefixRow).decode


def read(file: Path) -> list[WarmupPrompt]:
    """Read all requests of a file, in order. Raises PrefixesError."""
    try:
        text = content(file, FILE_BYTES_MAX)
    except OSError as error:
        raise PrefixesError([f"{file}: {error.strerror or error}"]) from error
    if len(text) > FILE_BYTES_MAX:
        raise PrefixesError([f"{file}: is longer than {FILE_BYTES_MAX >> 20} MiB"])
    rows, problems = list[tuple[str, PrefixRow]](), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            rows.append((where, _decode_row(line)))
        except UNREADABLE as error:
            problems.append(f'{where}: is no {{"path": ..., "body": {{...}}}}: {error}')
    if len(rows) > PREFIXES_MAX:
        raise PrefixesError([f"{file}: has more than {PREFIXES_MAX} prefixes"])
    return _validate_rows(rows, problems)


def prompts_from_request(rows: Sequence[PrefixRow]) -> list[WarmupPrompt]:
    """Check the requests of a call. Raises PrefixesError."""
    return _validate_rows([(f"requests[{number}]", row) for number, row in enumerate(rows)], [])


def file_problems(key: str, file: str) -> list[str]:
    """Return the problems of the file that a setting names; an empty list if it names no file."""
    try:
        if file:
            read(Path(file))
    except PrefixesError as error:
        return [f"'{key}': {problem}" for problem in error.problems]
    return []


def _validate_rows(rows: Sequence[tuple[str, PrefixRow]], problems: list[str]) -> list[WarmupPrompt]:
    prefixes = []
    for where, row in rows:
        body = bytes(row.body)
        try:
            prefill_only.prefill_only(row.path, prefill_only.fields_of(body))
            PATHS[row.path].parse(row.path, body, keep=False)
        except (prefill_only.NotWarmable, InvalidBody) as error:
            problems.append(f"{where}: {error}")
        else:
            prefixes.append(WarmupPrompt(row.path, body))
    if problems:
        raise PrefixesError(problems[:PROBLEMS_MAX])
    return prefixes
