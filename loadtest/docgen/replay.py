"""Several real router processes beside one, on the page of evidence for routers that share."""

from __future__ import annotations

from typing import Any

from loadtest.common.report import COLUMNS, Row, format_field
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.replay.routers import WAYS

SHOWN = ("workload", "policy", "requests", "errors", "token_hit_rate", "ttft_p50_s", "ttft_p90_s", "e2e_p90_s")
RATE = "output_tokens_per_s"


def replayed_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest routers`, and its judged goals. Raises PageError."""
    rows = rows_of(document)
    measured = [row for row in rows if row.policy in WAYS and row.goal is None]
    judged = [row for row in rows if row.goal is not None]
    if not measured or not judged:
        raise PageError("not the JSON of `loadtest routers`")
    columns = [column for name in (*SHOWN, RATE) for column in COLUMNS if column.name == name]
    heads = ["routers" if column.name == "policy" else column.title for column in columns]
    command = f"python -m loadtest {document['command'].partition(' --json')[0]} --json replayed.json"
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{command}`"
                f" on {describe_machine(document)}. Figures are medians of the runs."
            ),
            "",
            table(heads, [[format_field(row, column) for column in columns] for row in measured]),
            "",
            table(("workload", "goal", "limit", "got", ""), [_goal(row) for row in judged]),
        ]
    )


def _goal(row: Row) -> tuple[str, ...]:
    got = "-" if row.got is None else f"{row.got:.3f}"
    return (row.workload or "", row.goal or "", f"{row.expected:g}", got, "met" if row.ok else "missed")
