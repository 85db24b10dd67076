"""Costs of a load from a tier, on their page of evidence."""

from __future__ import annotations

from typing import Any

from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.simulate.results import tiers

COMMAND = "python -m loadtest simulate --tiers {links} --replicas {replicas} --load {loads} --seed {seeds}"


def tiers_block(document: dict[str, Any]) -> str:
    """Return the table of `loadtest simulate --tiers`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in tiers.LINKS]
    lines = tiers.lines(rows)
    if not lines:
        raise PageError("not the JSON of `loadtest simulate --tiers`")
    said = [f"Simulated on {document['date'][:10]} on {describe_machine(document)}, by these commands together:", ""]
    runs: dict[tuple[int, tuple[int, ...]], dict[str, dict[str, None]]] = {}
    for link, replicas, load, *_ in lines:
        of = [row for row in rows if (row.case, f"{row.replicas}", row.load_name) == (link, replicas, load)]
        seeds = tuple(sorted({row.seed for row in of if row.seed is not None}))
        runs.setdefault((int(replicas), seeds), {}).setdefault(link, {})[load] = None
    for (size, seeds), loads_of in runs.items():
        for loads in dict.fromkeys(tuple(each) for each in loads_of.values()):
            links = " ".join(link for link, each in loads_of.items() if tuple(each) == loads)
            shown = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
            said.append(f"- `{COMMAND.format(links=links, replicas=size, loads=' '.join(loads), seeds=shown)}`")
    return "\n".join([*said, "", table(tiers.HEADS, lines)])
