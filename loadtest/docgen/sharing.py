"""Several routers on their page of evidence: the cost of sharing, and the comparison with one router."""

from __future__ import annotations

from typing import Any

from loadtest.core_cost.sharing import Figures
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.simulate.results import multi_router
from loadtest.simulate.scenarios.registry import SCENARIOS

COST_HEADS = ("replicas", "routers", *Figures.__slots__)
COST_COMMAND = "python -m loadtest cost --sharing {replicas} --routers {routers} --json sharing.json"
SEVERAL_COMMAND = "python -m loadtest simulate --several{only} --seed {seeds} --json several.json"


def cost_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest cost --sharing`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in Figures.__slots__]
    if not rows:
        raise PageError("not the JSON of `loadtest cost --sharing`")
    found: dict[tuple[int, str], dict[str, str]] = {}
    for row in rows:
        shown = f"{row.got or 0:,.0f}" if (row.got or 0) >= 100 else f"{row.got or 0:.2f}"
        found.setdefault((row.replicas or 0, row.router or ""), {})[row.case or ""] = shown
    build = "pure Python" if rows[0].note else "native code"
    lines = [
        (f"{replicas}", router.partition(" ")[0], *(cells.get(name, "-") for name in Figures.__slots__))
        for (replicas, router), cells in found.items()
    ]
    sizes, routers = (",".join(dict.fromkeys(line[at] for line in lines)) for at in (0, 1))
    command = COST_COMMAND.format(replicas=sizes, routers=routers)
    return "\n".join(
        [
            f"Measured on {document['date'][:10]} with `{command}` on {describe_machine(document)}, {build}.",
            "",
            table(COST_HEADS, lines),
        ]
    )


def multi_router_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest simulate --several`. Raises PageError."""
    rows = rows_of(document)
    lines = multi_router.lines(rows)
    if not lines:
        raise PageError("not the JSON of `loadtest simulate --several`")
    seeds = sorted({row.seed for row in rows if row.seed is not None})
    shown = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    raced = list(dict.fromkeys(workload for workload, *_ in lines))
    only = f" --scenario {' '.join(raced)}" if len(raced) < len(SCENARIOS) - len(multi_router.OF_SEVERAL) else ""
    command = SEVERAL_COMMAND.format(only=only, seeds=shown)
    return "\n".join(
        [
            f"Simulated on {document['date'][:10]} with `{command}` on {describe_machine(document)}.",
            "",
            table(multi_router.HEADS, lines),
            "",
            *(f"- {line}." for line in multi_router.verdicts(rows)),
            "",
            "Figures beyond the limit:",
            "",
            table(multi_router.BEYOND_HEADS, multi_router.lines_beyond(rows)),
        ]
    )
