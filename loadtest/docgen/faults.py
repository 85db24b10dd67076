"""Outcome of requests under faults: the table of `loadtest faults`."""

from __future__ import annotations

from typing import Any

from loadtest.common.rivals import OURS
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.faults.matrix import GOALS
from loadtest.faults.report import compare_routers, format_met, index_by_case

COMMAND = "python -m loadtest faults --json faults.json"


def faults_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest faults`: the promises, and the result of each router. Raises PageError."""
    by_router = index_by_case(rows_of(document))
    if set(map(str, GOALS)) - {goal for goal, _ in by_router.get(OURS, {})}:
        raise PageError("not the JSON of a whole run of faults: some of its goals are missing")
    if loose := {"--slack", "--counts"} & set(document.get("command", "").split()):
        raise PageError(f"this run was judged with {min(loose)}: the documents' promises have none")
    routers = [OURS, *(name for name in by_router if name != OURS)]
    known = document["machine"].get("routers", {})
    versions = [f"{name} {known[name]}" for name in routers if name in known]
    about = f"Measured on {document['date'][:10]} with `{COMMAND}` on {describe_machine(document)}."
    return "\n".join(
        [
            f"{about} Versions: {', '.join(versions)}.",
            "",
            table(("goal", "case", "promised", *routers), compare_routers(by_router, routers)),
            "",
            *(f"- {name}: {format_met(by_router[name].values())} as promised." for name in routers),
        ]
    )
