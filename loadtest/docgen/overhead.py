"""CPU cost of routers beside each other: the table of `loadtest overhead` with its goals."""

from __future__ import annotations

from itertools import chain
from typing import Any

from loadtest.common.report import Row
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.proxy_cost.failover import TEXT as OF_CONTINUING
from loadtest.proxy_cost.observatory import TEXT as OF_OBSERVATORY
from loadtest.proxy_cost.report import CASES, EXTRAS, HEADS, PICKER, SHARING, cells, select_measured
from loadtest.proxy_cost.sharing import TEXT as OF_SHARING

COMMAND = "python -m loadtest overhead --install-rivals --json overhead.json"
OF_SHARED = "python -m loadtest overhead --routers warmroute --cases sharing --json shared.json"
GOAL_HEADS = ("case", "goal", "at most", "got", "")


def overhead_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest overhead`, with date, machine, versions, command and goals. Raises PageError."""
    rows = rows_of(document)
    figures = select_measured(rows)
    expected, there = {*CASES, *chain.from_iterable(EXTRAS.values())}, {row.workload for row in rows}
    if expected - {*PICKER, *SHARING} - {row.case for row in figures} - there:
        raise PageError("not the JSON of a whole run of overhead: some of its cases are missing")
    if "--slack" in document.get("command", ""):
        raise PageError("this run was judged with --slack: the documents' goals have none")
    versions = ", ".join(f"{name} {version}" for name, version in document["machine"].get("routers", {}).items())
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{COMMAND}`"
                f" on {describe_machine(document)}. Versions: {versions}."
            ),
            "",
            table(HEADS, [cells(figures, row) for row in figures]),
            "",
            *(f"- {case.name}: {case.text}, {case.concurrency} at a time." for case in CASES.values()),
            *(f"- {name}: {text}." for name, text in (OF_CONTINUING | OF_OBSERVATORY).items()),
            *(f"- {name}: {text}." for name, text in OF_SHARING.items() if name in there),
            "",
            table(GOAL_HEADS, [_goal(row) for row in rows if row.goal is not None]),
        ]
    )


def shared_block(document: dict[str, Any]) -> str:
    """Return the rows of `loadtest overhead --cases sharing`, for the page of routers that share. Raises PageError."""
    rows = [row for row in rows_of(document) if row.workload in SHARING]
    if [row.workload for row in rows] != list(SHARING):
        raise PageError("not the JSON of `loadtest overhead --cases sharing`")
    version = document["machine"].get("routers", {}).get("warmroute", "unknown")
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{OF_SHARED}`"
                f" on {describe_machine(document)}. Version: warmroute {version}."
            ),
            "",
            *(f"- {name}: {text}." for name, text in OF_SHARING.items()),
            "",
            table(GOAL_HEADS, [_goal(row) for row in rows]),
        ]
    )


def _goal(row: Row) -> tuple[str, ...]:
    numbers = ("-" if value is None else f"{value:.2f}" for value in (row.expected, row.got))
    verdict = "not judged" if row.ok is None else "met" if row.ok else "missed"
    return (row.case or row.workload or "", row.goal or "", *numbers, verdict)
