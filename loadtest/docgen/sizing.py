"""Size of machine that a router needs: the table of `loadtest sizing` and the rule that follows from it."""

from __future__ import annotations

from typing import Any

from loadtest.core_cost.memory import WORDS
from loadtest.core_cost.sizing_report import HEADERS, SizingError, cells, rule_lines
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table

COMMAND = "python -m loadtest sizing --json sizing.json"
MEMORY_COMMAND = "python -m loadtest cost --memory --json memory.json"


def sizing_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest sizing`, and the rule that follows from it. Raises PageError."""
    rows = rows_of(document)
    try:
        rules = rule_lines(rows)
    except SizingError as error:
        raise PageError(str(error)) from error
    if failed := [row for row in rows if row.errors]:
        raise PageError(f"this run had errors: {failed[0].case}, {failed[0].errors_by_kind}")
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{COMMAND}` on {describe_machine(document)}.",
            "",
            table(HEADERS, map(cells, rows)),
            "",
            *(f"- {line}." for line in rules),
        ]
    )


def memory_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest cost --memory`. Raises PageError."""
    rows = {row.case: row.got for row in rows_of(document)}
    if missing := WORDS.keys() - rows.keys():
        raise PageError(f"not the rows of a whole run: {min(missing)} is missing")
    shown = [(words, _amount(rows[case] or 0.0)) for case, words in WORDS.items()]
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{MEMORY_COMMAND}` on {describe_machine(document)}.",
            "",
            table(("item", "bytes, unless stated otherwise"), shown),
        ]
    )


def _amount(got: float) -> str:
    return f"{got:,.0f}" if got >= 10 else f"{got:.2f}"
