"""First signs of troubles: the table of `loadtest faults --on-call`."""

from __future__ import annotations

import re
from typing import Any

from loadtest.common.rivals import OURS
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.faults.on_call.report import HEADS, QUIET, table_lines
from loadtest.faults.on_call.troubles import TROUBLES

PORT = re.compile(r"127\.0\.0\.1:\d+")  # of a replica, another one in each run


def on_call_block(document: dict[str, Any]) -> str:
    """Return the table of a run of all troubles. Raises PageError."""
    rows = rows_of(document)
    cases = list(dict.fromkeys(row.case or "" for row in rows))
    if not cases or not cases[0].startswith(QUIET) or cases[1:] != [trouble.name for trouble in TROUBLES]:
        raise PageError("not the JSON of a whole run of `loadtest faults --on-call`: some troubles are missing")
    version = document["machine"].get("routers", {}).get(OURS, "")
    command = f"python -m loadtest {document['command'].partition(' --json')[0]}"
    lines = [tuple(PORT.sub("REPLICA", cell).replace("|", "\\|") for cell in line) for line in table_lines(rows)]
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{command}` on {describe_machine(document)}."
                f" Version: {OURS} {version}."
            ),
            "",
            table(HEADS, lines),
        ]
    )
