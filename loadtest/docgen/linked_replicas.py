"""Rows of workloads on linked replicas, on their pages of evidence: P2P KV transfer, and disaggregated prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.common.report import Row
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.simulate.results import pulls, split

COMMAND = "python -m loadtest simulate --{flag} {links} --scenario {workloads} --load {loads} --replicas {replicas}"
MORE = " --requests {requests} --seed {seeds}"


def pulls_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest simulate --pulls`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in pulls.LINKS and row.policy in pulls.ROWS]
    return _block(document, "pulls", rows, pulls.HEADS, pulls.lines(rows))


def split_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest simulate --split`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in pulls.LINKS and row.policy in split.ROWS]
    return _block(document, "split", rows, split.HEADS, split.lines(rows))


def _block(
    document: dict[str, Any], flag: str, rows: Sequence[Row], heads: Sequence[str], lines: Sequence[tuple[str, ...]]
) -> str:
    if not lines:
        raise PageError(f"not the JSON of `loadtest simulate --{flag}`")
    said = [f"Simulated on {document['date'][:10]} on {describe_machine(document)}, by these commands together:", ""]
    runs: dict[tuple[str, int, int, tuple[int, ...]], dict[str, dict[str, None]]] = {}
    for workload, link, load, *_ in dict.fromkeys(tuple(line[:3]) for line in lines):
        of = [row for row in rows if (row.workload, row.case, row.load_name) == (workload, link, load)]
        replicas, requests = of[0].replicas or 1, of[0].requests or 0
        seeds = tuple(sorted({row.seed for row in of if row.seed is not None}))
        key = link, replicas, requests // replicas, seeds
        runs.setdefault(key, {}).setdefault(workload, {})[load] = None
    for (link, replicas, requests, seeds), loads_of in runs.items():
        for loads in dict.fromkeys(tuple(each) for each in loads_of.values()):
            workloads = " ".join(name for name, each in loads_of.items() if tuple(each) == loads)
            shown = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
            command = COMMAND.format(
                flag=flag, links=link, workloads=workloads, loads=" ".join(loads), replicas=replicas
            )
            said.append(f"- `{command}{MORE.format(requests=requests, seeds=shown)}`")
    return "\n".join([*said, "", table(heads, lines)])
