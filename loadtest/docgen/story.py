"""Cost of a changed prompt and benefit of the fix: the table of `python -m loadtest story --mend`."""

from __future__ import annotations

from typing import Any

from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table

STORY_TEXTS = {
    "before": "as it was",
    "broken": "a release of one agent begins its system prompt with the time of day",
    "fixed": "the next release puts the time at the end of the newest message",
}


def story_block(document: dict[str, Any]) -> str:
    """Return the results of `loadtest story --mend`, phase by phase. Raises PageError."""
    rows = {row.workload: row for row in rows_of(document)}
    if rows.keys() != STORY_TEXTS.keys():
        raise PageError("not the JSON of a complete run: use --mend")
    if any(row.errors for row in rows.values()):
        raise PageError("this run had errors")
    cells = [
        (phase, text, f"{100 * (row.token_hit_rate or 0):.1f} %", f"{row.ttft_p50_s:.2f} s", f"{row.ttft_p90_s:.2f} s")
        for phase, text in STORY_TEXTS.items()
        if (row := rows[phase])
    ]
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `python -m loadtest story --mend`"
                f" on {describe_machine(document)}:"
            ),
            f"{rows['before'].replicas} simulated replicas, agents in {rows['before'].load:g} conversations at a time.",
            "",
            table(("phase", "change", "token hits", "TTFT p50", "TTFT p90"), cells),
        ]
    )
