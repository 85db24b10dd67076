"""Prices of a load from a tier, on their page of evidence."""

from __future__ import annotations

from typing import Any

from loadtest.pages.markdown import PageError, rows_of, table, where
from loadtest.simulate.results import tiers

COMMAND = "python -m loadtest simulate --tiers {links} --seed {seeds} --json tiers.json"


def tiers_block(document: dict[str, Any]) -> str:
    """The table of `loadtest simulate --tiers`. Raises PageError."""
    rows = [row for row in rows_of(document) if row.case in tiers.LINKS]
    lines = tiers.lines(rows)
    if not lines:
        raise PageError("not the JSON of `loadtest simulate --tiers`")
    seeds = sorted({row.seed for row in rows if row.seed is not None})
    shown = f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    links = " ".join(dict.fromkeys(line[0] for line in lines))
    command = COMMAND.format(links=links, seeds=shown)
    return "\n".join(
        [
            f"Simulated on {document['date'][:10]} with `{command}` on {where(document)}.",
            "",
            table(tiers.HEADS, lines),
        ]
    )
