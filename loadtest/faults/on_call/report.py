"""Rows and the table of the on-call run.

A row is one surface of one trouble: the seconds until the cause was named there, which may be at most LIMIT_S. A row of
the quiet time has the number of false signs. A surface that could not be read has a row without a verdict.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from loadtest.common.report import Row, build_table
from loadtest.common.rivals import OURS
from loadtest.faults.on_call.staged_cluster import REPLICAS
from loadtest.faults.on_call.troubles import TROUBLES, Trouble
from loadtest.faults.on_call.watch import LIMIT_S, SURFACES, Seen, watch

QUIET_S = 600.0
BASELINE_S = 120.0
"""Quiet time before each trouble. The usual figures are known after a minute."""
TEXT_CHARACTERS = 300
GOAL = "on call"
QUIET = "quiet"
NOT_EVALUATED = "not evaluated"
HEADS = ("trouble", "first sign, s", *SURFACES, "verdict")


async def on_call(numbers: Sequence[int], quiet_s: float, limit_s: float, seed: int, console: Console) -> list[Row]:
    """Return the rows of a quiet run and of these troubles (1 to 9), one cluster after the other."""
    rows = []
    for trouble in (None, *(TROUBLES[number - 1] for number in numbers)):
        own_s = quiet_s if trouble is None else min(quiet_s, BASELINE_S)
        with tempfile.TemporaryDirectory(prefix="warmroute-on-call-") as folder:
            seen = await watch(trouble, own_s, limit_s, Path(folder), seed)
        some = quiet_rows(seen, own_s) if trouble is None else trouble_rows(trouble, seen)
        missed = sum(row.ok is False for row in some)
        console.print(f"{seen.trouble}: {len(some)} rows, {missed} missed", highlight=False)
        for row in some:
            if row.ok is False:
                console.print(
                    f"  {row.workload}: {row.note or 'no sign'}", highlight=False, markup=False, soft_wrap=True
                )
        rows += some
    return rows


def quiet_rows(seen: Seen, quiet_s: float) -> list[Row]:
    """Return a row for each surface: its false signs in the quiet time, which must be none."""
    return [
        _row(f"{QUIET} for {quiet_s:g} s", surface, seen, 0.0, float(len(rows)), ok=not rows, note="; ".join(rows))
        for surface, rows in seen.false.items()
    ]


def trouble_rows(trouble: Trouble, seen: Seen) -> list[Row]:
    """Return a row for each surface: the time after which it named the cause."""
    rows = []
    for surface, found in seen.surfaces.items():
        ok = found.named_s is not None and found.named_s <= LIMIT_S if found.is_evaluated else None
        made = _row(trouble.name, surface, seen, LIMIT_S, found.named_s, ok=ok, note=found.text)
        made.first_sign_s = found.first_s
        if not found.is_evaluated:
            made.note = NOT_EVALUATED
        rows.append(made)
    return rows


def _row(case: str, surface: str, seen: Seen, expected: float, got: float | None, *, ok: bool | None, note: str) -> Row:
    return Row(
        router=OURS,
        goal=GOAL,
        case=case,
        workload=surface,
        replicas=REPLICAS,
        requests=seen.requests,
        errors=seen.failures,
        expected=expected,
        got=None if got is None else round(got, 1),
        ok=ok,
        note=note[:TEXT_CHARACTERS] or None,
    )


def table_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a line for each trouble: name, seconds to the first sign, a text for each surface, verdict."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case or "", {})[row.workload or ""] = row
    lines = []
    for case, by_surface in cases.items():
        signs = [row.first_sign_s for row in by_surface.values() if row.first_sign_s is not None]
        texts = [_text(by_surface.get(surface)) for surface in SURFACES]
        lines.append((case, f"{min(signs):.0f}" if signs else "-", *texts, _verdict(by_surface)))
    return lines


def _text(row: Row | None) -> str:
    if row is None or row.ok is None:
        return NOT_EVALUATED
    if not row.note:
        return "-"
    return row.note if row.got is None or row.expected == 0 else f"{row.got:.0f} s: {row.note}"


def _verdict(by_surface: dict[str, Row]) -> str:
    missed = [surface for surface, row in by_surface.items() if row.ok is False]
    unknown = [surface for surface, row in by_surface.items() if row.ok is None]
    is_quiet = all(row.expected == 0 for row in by_surface.values())
    words = [f"{'false' if is_quiet else 'missing'}: {', '.join(missed)}"] if missed else []
    words += [f"{NOT_EVALUATED}: {', '.join(unknown)}"] if unknown else []
    return "; ".join(words) or "ok"


def print_on_call(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, and the number of rows that are as promised."""
    left = {*HEADS} - {"first sign, s"}
    made = build_table(HEADS, (), "first signs for the person on call", left=left, no_wrap=False)
    for line in table_lines(rows):
        made.add_row(*map(escape, line), end_section=True)
    console.print(made)
    judged = [row.ok for row in rows if row.ok is not None]
    console.print(f"{sum(judged)} of {len(judged)} rows as promised", highlight=False)
