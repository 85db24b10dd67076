"""CPU cost of a request in the router's core by fleet size, on the page of overheads."""

from __future__ import annotations

from typing import Any

from loadtest.common.report import Row
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table

CASES = {
    "place_estimated_ms": "placed by estimate",
    "place_exact_ms": "placed exactly",
    "place_blip_ms": "after a blip",
    "join_ms": "a replica joins",
    "look_slice_ms": "slice of a look",
    "open_request_bytes": "bytes of an open request",
}
"""Case of `loadtest cost --replicas` -> head of its column."""


def growth_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest cost --replicas`: milliseconds of CPU, each with its goal. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in CASES]
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.replicas or 0, {})[row.case or ""] = row
    if not found or any(cells.keys() != CASES.keys() for cells in found.values()):
        raise PageError("not the JSON of `loadtest cost --replicas`")
    build = "pure Python" if rows[0].note else "native code"
    command = f"python -m loadtest {document['command'].partition(' --json')[0]} --json growth.json"
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{command}` on {describe_machine(document)}, {build}.",
            "",
            table(
                ("replicas", *CASES.values()),
                [(f"{size:,}", *(_cell(cells[case]) for case in CASES)) for size, cells in found.items()],
            ),
        ]
    )


def _cell(row: Row) -> str:
    """Return the result and the goal; bold if it was missed."""
    if row.got is None or row.expected is None:
        raise PageError(f"{row.case} has no figure")
    digits = ",.0f" if row.expected >= 100 else ".2f"
    shown = f"{row.got:{digits}} of {row.expected:{digits}}"
    return shown if row.ok else f"**{shown}**"
