"""Pulls between replicas, on their page of evidence."""

from __future__ import annotations

from typing import Any

from loadtest.pages.markdown import PageError, rows_of, table, where
from loadtest.simulate.results import pulls

COMMAND = "python -m loadtest simulate --pulls {links} --scenario {workloads} --load {loads} --replicas {replicas}"
MORE = " --requests {requests} --seed {seeds}"


def pulls_block(document: dict[str, Any]) -> str:
    """The table of `loadtest simulate --pulls`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in pulls.LINKS and row.policy in pulls.ROWS]
    lines = pulls.lines(rows)
    if not lines:
        raise PageError("not the JSON of `loadtest simulate --pulls`")
    said = [f"Simulated on {document['date'][:10]} on {where(document)}, by these commands together:", ""]
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
            command = COMMAND.format(links=link, workloads=workloads, loads=" ".join(loads), replicas=replicas)
            said.append(f"- `{command}{MORE.format(requests=requests, seeds=shown)}`")
    return "\n".join([*said, "", table(pulls.HEADS, lines)])
