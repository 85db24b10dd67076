"""Memory over many requests, no two alike: the table of `loadtest faults --requests`."""

from __future__ import annotations

from typing import Any

from loadtest.common.rivals import OURS
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table

SHOWN = 10  # samples of the table, evenly by requests


def curve_block(document: dict[str, Any]) -> str:
    """Return the curve, and the growth of its second half. Raises PageError."""
    rows = rows_of(document)
    samples = [row for row in rows if row.rss_mb is not None and row.requests is not None]
    judged = [row for row in rows if row.ok is not None]
    if len(samples) <= SHOWN or len(judged) != 2 or judged[0].got is None:
        raise PageError("not the JSON of `loadtest faults --requests`")
    shown = [samples[round(n * (len(samples) - 1) / SHOWN)] for n in range(SHOWN + 1)]
    grown, errors = judged
    version = document["machine"].get("routers", {}).get(OURS, "")
    command = f"python -m loadtest {document['command'].partition(' --json')[0]} --json curve.json"
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{command}`"
                f" on {describe_machine(document)}. Version: {OURS} {version}."
            ),
            "",
            table(
                ("requests", "memory, MB"),
                [(f"{row.requests or 0:,}", f"{row.rss_mb or 0.0:,.0f}") for row in shown],
            ),
            "",
            (
                f"In the second half memory grew by {grown.got:.1%}, of {grown.expected:.0%} that are promised;"
                f" {errors.got:,.0f} requests had no good answer."
            ),
        ]
    )
