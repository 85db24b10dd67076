"""Forecasts of the next use of prompts, on their page of evidence."""

from __future__ import annotations

from typing import Any

from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.reuse_forecast.recordings import RECORDINGS
from loadtest.reuse_forecast.scoring import heads, lines

COMMAND = "python -m loadtest forecasts --json forecasts.json"


def forecasts_block(document: dict[str, Any]) -> str:
    """Return the tables of `loadtest forecasts`, one for each recording. Raises PageError."""
    rows = [row for row in rows_of(document) if row.workload in RECORDINGS and row.case and row.got is not None]
    said = [
        f"Computed on {document['date'][:10]} with `{COMMAND}` on {describe_machine(document)}. Losses are in nats."
    ]
    for name in RECORDINGS:
        of = lines(rows, name)
        if not of:
            raise PageError(f"not the JSON of a whole run of `loadtest forecasts`: {name} is missing")
        said += ["", f"`{name}`:", "", table(heads(rows), of)]
    return "\n".join(said)
