"""Report of `python -m loadtest overhead`: medians of rounds, goals, a table with ratios, a chart.

A router is compared with nginx and with the best of the measured LLM routers, case by case. A router with errors is not
used for comparison. A goal without a router for comparison is neither met nor missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from loadtest.common.report import Column, Row, build_table, percentile
from loadtest.common.rivals import OURS, PURE, RIVALS, YARDSTICK
from loadtest.common.svg import svg_chart
from loadtest.proxy_cost.load import CpuSample

SLACK_TTFT_MS = 10.0  # allowance at a slack of 1: the p99 of a second of probes varies by milliseconds


@dataclass(frozen=True, slots=True)
class Case:
    """A case that is measured at every router."""

    name: str
    concurrency: int
    streams: bool = False
    text: str = ""


CASES = {
    case.name: case
    for case in (
        Case("short", 32, text="0.5 KB, each a text of its own"),
        Case("mid", 16, text="16 KB, 64 conversations of 8 messages, each time with another end"),
        Case("long", 8, text="200 KB, 16 conversations of 40 messages, likewise"),
        Case("stream100", 100, streams=True, text="streams of 30 events a second each"),
        Case("stream300", 300, streams=True, text="likewise"),
    )
}
PICKER = ("picker_short", "picker_mid", "picker_long", "picker_chunk", "picker_added")
"""Rows that exist only if an Envoy is installed."""
SHARING = ("sharing_2", "sharing_4", "sharing_failing")
"""Rows that exist only if a server of Redis' protocol is installed."""
EXTRAS = {
    "slow_reader": ("slow_reader",),
    "long_prompts": ("long_prompts",),
    "continuing": ("continued_chunk",),
    "observatory": ("observatory_short", "observatory_mid", "observatory_long"),
    "sharing": SHARING,
    "picker": PICKER,
}
"""Measurements of warmroute alone, and the workloads of their rows."""

# "What must be seen": case -> maximum ratio to nginx; limit of the ratio to the best LLM router.
NGINX_MAX = {"stream300": 1.15}
RIVALS_MAX = {"stream300": 0.7, "short": 0.6, "mid": 0.6, "long": 0.6}
PURE_MAX = {"short": 1.0, "mid": 1.0, "long": 1.0}  # without native code, maximum ratio to the best LLM router
TTFT_CASE = "stream100"


@dataclass(slots=True)
class CaseRun:
    """One case of one router in one round."""

    measured: CpuSample
    direct: CpuSample | None = None
    """The streams of the same round without a router."""
    rss_mb: float = 0.0


def cpu_us(row: Row) -> float | None:
    """Return a row's CPU, per chunk or per request."""
    return row.cpu_us_per_chunk if row.cpu_us_per_chunk is not None else row.cpu_us_per_request


def row_of(router: str, case: Case, turns: Sequence[CaseRun], replicas: int) -> Row:
    """Return the medians of all rounds; requests and errors are sums."""
    errors: Counter[str] = Counter()
    for turn in turns:
        errors += turn.measured.errors
    row = Row(
        router=router,
        case=case.name,
        replicas=replicas,
        requests=sum(turn.measured.requests for turn in turns),
        errors=errors.total(),
        errors_by_kind=dict(errors),
        rss_mb=_median(turns, lambda t: t.rss_mb),
        duration_s=sum(turn.measured.window_s for turn in turns),
    )
    if case.streams:
        row.cpu_us_per_chunk = _median(turns, lambda t: _per(t.measured.cpu_s, t.measured.events))
        row.load = _median(turns, lambda t: t.measured.events / max(1e-9, t.measured.window_s))
        row.load_unit = "chunks/s"
        row.added_ttft_p50_ms = _median(turns, lambda t: _added_ms(t, 50))
        row.added_ttft_p99_ms = _median(turns, lambda t: _added_ms(t, 99))
    else:
        row.cpu_us_per_request = _median(turns, lambda t: _per(t.measured.cpu_s, t.measured.requests))
        row.requests_per_s = _median(turns, lambda t: t.measured.requests / max(1e-9, t.measured.window_s))
    return row


def ratio_row(
    workload: str,
    pairs: Sequence[tuple[CpuSample, CpuSample]],
    goal: str,
    ratio_max: float,
    slack: float,
    *,
    chunks: bool = False,
) -> Row:
    """Return the ratio of CPU per request, or per chunk, of the second measurement of each pair to the first.

    The figure is the median, which must be at most `ratio_max`; `slack` is a part of that.
    """
    errors = sum((before.errors + after.errors for before, after in pairs), Counter[str]())
    row = Row(
        workload=workload,
        requests=sum(before.requests + after.requests for before, after in pairs),
        errors=errors.total(),
        errors_by_kind=dict(errors),
        goal=goal,
        expected=ratio_max,
        ok=False,
    )
    costs = [[_per(m.cpu_s, m.events if chunks else m.requests) for m in pair] for pair in pairs]
    known = [(before, after) for before, after in costs if before and after]
    if known:
        after_us = round(median(after for _, after in known), 3)
        row.cpu_us_per_chunk, row.cpu_us_per_request = (after_us, None) if chunks else (None, after_us)
        row.goal = f"{goal} ({median(before for before, _ in known):.1f} µs)"
        row.got = round(median(after / before for before, after in known), 3)
        row.ok = not errors and row.got <= ratio_max * (1 + slack)
    return row


def _median(turns: Sequence[CaseRun], of: Callable[[CaseRun], float | None]) -> float | None:
    found = [value for turn in turns if (value := of(turn)) is not None]
    return round(median(found), 3) if found else None


def _per(cpu_s: float, times: int) -> float | None:
    return cpu_s * 1e6 / times if times else None


def _added_ms(turn: CaseRun, percent: float) -> float | None:
    """Return the plain difference, which noise may make negative."""
    through = percentile(turn.measured.ttfts_s, percent)
    direct = percentile(turn.direct.ttfts_s, percent) if turn.direct else None
    return None if through is None or direct is None else 1e3 * (through - direct)


# Goals


def best(rows: Sequence[Row], case: str, of: Callable[[Row], float | None]) -> Row | None:
    """Return the best LLM router in this case."""
    there = [r for r in rows if r.case == case and r.router in RIVALS and not r.errors and of(r) is not None]
    return min(there, key=lambda row: of(row) or 0.0, default=None)


def goals(rows: Sequence[Row], slack: float) -> list[Row]:
    """Return a row for each goal with a measurement of warmroute in its case. Ratios may exceed the goal by `slack`, as
    a part of it."""
    found: list[Row] = []
    for case in CASES:
        ours = next((row for row in rows if row.case == case and row.router == OURS), None)
        if ours is None:
            continue
        nginx = next((r for r in rows if r.case == case and r.router == YARDSTICK and not r.errors), None)
        if case in NGINX_MAX:
            found.append(_ratio(ours, nginx, YARDSTICK, NGINX_MAX[case], slack, at_most=True))
        if case in RIVALS_MAX:
            found.append(_ratio(ours, best(rows, case, cpu_us), "the best LLM router", RIVALS_MAX[case], slack))
        if case == TTFT_CASE:
            found.append(_ttft(ours, best(rows, case, lambda row: row.added_ttft_p99_ms), slack))
        pure = next((row for row in rows if row.case == case and row.router == PURE), None)
        if pure is not None and case in PURE_MAX:
            rival = best(rows, case, cpu_us)
            found.append(_ratio(pure, rival, "the best LLM router", PURE_MAX[case], slack, at_most=True))
    return found


def _ratio(ours: Row, other: Row | None, name: str, limit: float, slack: float, *, at_most: bool = False) -> Row:
    without = "without native code: " if ours.router == PURE else ""
    goal = f"{without}CPU {'at most' if at_most else 'under'} {limit:g} x {name}"
    row = Row(router=OURS, case=ours.case, goal=goal, expected=limit, errors=ours.errors)
    own, its = cpu_us(ours), cpu_us(other) if other else None
    if other is None or not its:
        row.goal = f"{goal}: not judged, because there is none"
        return row
    if name != other.router:
        row.goal = f"{goal} ({other.router})"
    row.got = round((own or 0.0) / its, 3)
    allowed = limit * (1 + slack)
    row.ok = own is not None and not ours.errors and (row.got <= allowed if at_most or slack else row.got < allowed)
    return row


def _ttft(ours: Row, other: Row | None, slack: float) -> Row:
    goal = "added TTFT p99 in ms no higher than the best LLM router's"
    row = Row(router=OURS, case=ours.case, goal=goal, errors=ours.errors, got=ours.added_ttft_p99_ms)
    if other is None or other.added_ttft_p99_ms is None:
        row.goal = f"{goal}: not judged, because there is none"
        return row
    row.goal, row.expected = f"{goal} ({other.router})", other.added_ttft_p99_ms
    allowed_ms = other.added_ttft_p99_ms * (1 + slack) + SLACK_TTFT_MS * slack
    row.ok = row.got is not None and not ours.errors and row.got <= allowed_ms
    return row


# Table and chart

TITLE = (
    "cost of a router: CPU (user + system, whole process tree) per chunk of a stream or per request;"
    " chunks or requests per s; TTFT that it adds; x best: the cheapest LLM router that made no error"
)
HEADS = ("case", "router", "CPU, µs", "x nginx", "x best", "per s", "TTFT p50", "p99, ms", "MB", "errors")


def cells(rows: Sequence[Row], row: Row) -> list[str]:
    """Return a row for people, under HEADS."""
    own = cpu_us(row)
    nginx = next((r for r in rows if r.case == row.case and r.router == YARDSTICK), None)
    rate = row.load if row.cpu_us_per_chunk is not None else row.requests_per_s
    return [
        row.case or "",
        row.router or "",
        "-" if own is None else f"{own:,.1f}",
        _times(own, nginx),
        _times(own, best(rows, row.case or "", cpu_us)),
        "-" if rate is None else f"{rate:,.0f}",
        *("-" if ms is None else f"{ms:+.2f}" for ms in (row.added_ttft_p50_ms, row.added_ttft_p99_ms)),
        "-" if row.rss_mb is None else f"{row.rss_mb:,.0f}",
        str(row.errors or 0),
    ]


def _times(own: float | None, other: Row | None) -> str:
    its = cpu_us(other) if other else None
    return "-" if own is None or not its else f"{own / its:.2f}"


def select_measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a router's figures in a case, by case."""
    return [row for case in CASES for row in rows if row.case == case and row.goal is None]


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """Print tables of the figures and of the goals."""
    figures = select_measured(rows)
    made = build_table(HEADS, (), TITLE, left={"case", "router"})
    for row, after in zip(figures, [*figures[1:], None], strict=False):
        made.add_row(*cells(figures, row), end_section=after is not None and after.case != row.case)
    if figures:
        console.print(made)
    judged = build_table(("", "goal", "expected", "got", ""), (), "goals", left={"", "goal"}, no_wrap=False)
    for row in rows:
        if row.goal is not None:
            verdict = "not judged" if row.ok is None else "ok" if row.ok else "missed"
            numbers = ["-" if value is None else f"{value:.2f}" for value in (row.expected, row.got)]
            judged.add_row(row.case or row.workload, row.goal, *numbers, verdict)
    if judged.row_count:
        console.print(judged)
    for row in rows:
        if row.errors_by_kind:
            console.print(
                f"{row.router}, {row.case or row.workload}: {row.errors_by_kind}", highlight=False, soft_wrap=True
            )


def write_chart(path: Path, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Write CPU by case and router as SVG."""
    charted = (
        Column("cpu_us_per_chunk", "CPU per streamed chunk", "{:.1f} µs"),
        Column("cpu_us_per_request", "CPU per request", "{:,.0f} µs"),
    )
    title = "Cost of a router: user + system CPU"
    path.write_text(svg_chart(select_measured(rows), title, notes, charted), encoding="utf-8")
