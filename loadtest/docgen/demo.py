"""The demo's figures, and a check of the promises that the documents make about them.

The figures of several runs are medians: round robin meets a cache by chance, and its rate differs by a third from run
to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import median
from typing import Any

from loadtest.common.report import COLUMNS, Row, format_field
from loadtest.common.traces import shipped_trace
from loadtest.docgen.markdown import PageError, describe_machine, rows_of, table
from loadtest.replay.demo import FIXED, WORKLOADS, DemoWorkload, verdicts
from loadtest.replay.demo import POLICIES as COMPARED

COMMAND = 'make run ARGS="--exit --json demo.json"'
SHOWN = ("workload", "policy", "requests", "errors", "token_hit_rate", "ttft_p50_s", "ttft_p90_s", "e2e_p50_s")

AGENT_HIT_RATIO_MIN = 3.0  # warm over round robin, token hit rate
AGENT_TTFT_RATIO_MAX = 0.5  # warm over round robin, p90 time to first token


def median_rows(documents: Sequence[dict[str, Any]]) -> list[Row]:
    """Return one row per workload and policy, each figure the median of the runs. Raises PageError if rows differ."""
    runs = [rows_of(document) for document in documents]
    if len({tuple((row.workload, row.policy, row.requests) for row in run) for run in runs}) != 1:
        raise PageError("these are not runs of the same demo")
    merged = []
    for same in zip(*runs, strict=True):
        figures = {column.name: [getattr(row, column.name) for row in same] for column in COLUMNS}
        medians = {n: median(v) for n, v in figures.items() if all(isinstance(x, float) for x in v)}
        errors = sum(row.errors or 0 for row in same)
        merged.append(replace(same[0], **medians, errors=errors))
    return merged


def demo_block(documents: Sequence[dict[str, Any]]) -> str:
    """Return the demo's table, with date, machine, command and fixed parameters. Raises PageError, TraceError."""
    rows, document = median_rows(documents), documents[-1]
    sizes = {workload.replay.workload: workload.replay.requests_max for workload in WORKLOADS}
    for row in rows:
        if sizes.get(row.workload) != row.requests:
            raise PageError(f"{row.workload}, {row.policy}: {row.requests} requests are not the demo's own run")
    columns = [next(column for column in COLUMNS if column.name == name) for name in SHOWN]
    return "\n".join(
        [
            (
                f"Measured on {document['date'][:10]} with `{COMMAND}`"
                f" on {describe_machine(document)}. {_runs(len(documents))}"
            ),
            "",
            table([c.title for c in columns], [[format_field(row, c) for c in columns] for row in rows]),
            "",
            *(f"- {line}." for line in verdicts(rows)),
            *(
                f"- {w.replay.workload}: {100 * compute_ceiling(w):.0f} % of its prompt tokens,"
                " in the trace's own blocks, stood at the start of an earlier prompt;"
                " even a cache that forgets nothing would hardly find more."
                for w in WORKLOADS
                if not w.replay.think_max_s
            ),
            "",
            "Fixed parameters:",
            "",
            f"- {FIXED}.",
            *(f"- {workload.describe()}." for workload in WORKLOADS),
        ]
    )


def _runs(count: int) -> str:
    return "One run." if count == 1 else f"Each figure is the median of {count} runs; errors are added up."


def compute_ceiling(workload: DemoWorkload) -> float:
    """Return the share of prompt tokens that one unlimited cache would find, in whole blocks of the trace.

    Only for workloads that arrive by the clock: the requests of others depend on the speed of the answers.
    """
    trace = shipped_trace(workload.trace, workload.replay.requests_max)
    seen: set[tuple[str, int]] = set()
    found = total = 0
    for request in (request for session in trace.sessions for request in session.requests):
        ids = [(request.namespace, block) for first, count in request.runs for block in range(first, first + count)]
        found += sum(1 for _ in takewhile(seen.__contains__, ids)) * request.block_tokens
        total += request.input_tokens
        seen.update(ids)
    return found / max(1, total)


def broken_promises(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return the documents' promises on the demo that the medians of these runs did not keep, a line each.

    Raises PageError.
    """
    rows = {(row.workload, row.policy): row for row in median_rows(documents)}
    unwell = [row for row in rows.values() if row.errors or row.rejected]
    failed = [f"{row.workload}, {row.policy}: {row.errors} errors, {row.rejected} rejected" for row in unwell]
    for workload, hits_min, ttft_max in (
        ("agent", AGENT_HIT_RATIO_MIN, AGENT_TTFT_RATIO_MAX),
        ("conversation", 1.0, 1.0),
    ):
        before, after = (rows.get((workload, policy)) for policy in COMPARED)
        if before is None or after is None:
            failed.append(f"{workload}: no rows of both policies")
            continue
        hits = _ratio(after.token_hit_rate or 0.0, before.token_hit_rate)
        ttft = _ratio(after.ttft_p90_s or float("inf"), before.ttft_p90_s)
        better = hits_min == 1.0  # "both better" is strict, "at least 3 times" is not
        if hits < hits_min or (better and hits == hits_min):
            failed.append(f"{workload}: {hits:.2f} x round robin's token hit rate, promised {hits_min:g} x")
        if ttft > ttft_max or (better and ttft == ttft_max):
            failed.append(f"{workload}: {ttft:.2f} x round robin's p90 TTFT, promised {ttft_max:g} x")
    return failed


def _ratio(after: float, before: float | None) -> float:
    """Return the ratio to six digits, as in the JSON; it is very large if `before` is 0 or missing."""
    return round(after / max(before or 0.0, 1e-9), 6)
