"""The tables of engines that the simulated one can resemble: their differences, and the changes of their figures."""

from __future__ import annotations

from typing import Any

from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.simulate.results.zoo import HEADS, LOADS, PAIRS, SHARE, lines

COMMAND = "python -m loadtest simulate --zoo --check"


def zoo_table() -> str:
    """Return every member with its difference and the source."""
    rows = ((f"`{member.name}`", member.text, member.source) for member in MEMBERS.values())
    return table(("`--like`", "difference from the dense engine", "read in"), rows)


def figures_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest simulate --zoo`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in (*PAIRS, SHARE)]
    there = {(row.workload, row.load_name) for row in rows}
    lacking = [name for name in MEMBERS if any((name, load) not in there for load in LOADS)]
    if lacking:
        raise PageError(f"not the JSON of a whole `loadtest simulate --zoo`: without {', '.join(lacking)}")
    said = f"Simulated on {document['date'][:10]} with `{COMMAND}` on {describe_machine(document)}"
    size = f"{rows[0].requests} requests for each of {rows[0].seeds} seeds, {rows[0].replicas} replicas"
    met = sum(bool(row.ok) for row in rows)
    body = table(HEADS, ((f"`{name}`", *rest) for name, *rest in lines(rows)))
    return "\n".join([f"{said}. Size: {size}.", "", body, "", f"{met} of {len(rows)} figures are as they must be."])
