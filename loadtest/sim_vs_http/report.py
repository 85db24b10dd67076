"""Results of `loadtest agree`: rows of one slice over HTTP and in the simulation, and the differences between them.

One replay is noisy: requests that were sent in the same millisecond arrive in any order, and the order decides which
ones wait. Also, the p90 lies at the boundary between cached and cold prompts. So a row pools the requests of several
runs, which is steadier than any of them. The spread of the single runs is part of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.table import Table

from loadtest.common.report import Row, build_table
from loadtest.common.rivals import OURS
from loadtest.replay.run import ReplaySettings, Sent, row_of

HTTP, SIMULATED = "http", "simulated"
"""Values of a row's `case`."""
TTFT_PERCENT_MAX = 20.0
HIT_POINTS_MAX = {True: 2.0, False: 3.0}
"""Points of the hit rate, for our policies and for reimplemented rules."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """Several runs of one case as one."""

    row: Row
    hit_range: float
    """Points between the smallest and the largest hit rate of the runs."""
    ttft_range: float
    """Percent between the smallest and the largest p90 TTFT, of their median."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One slice under one policy, over HTTP and in the simulation."""

    http: Pooled
    simulated: Pooled
    wire_s: float
    """Simulated seconds outside the engines that the simulation adds to each request, as measured over HTTP."""

    @property
    def ours(self) -> bool:
        """True if the policy is warmroute's."""
        return self.http.row.router == OURS

    @property
    def hit_points(self) -> float:
        """Difference of the simulation's hit rate from HTTP's, in points."""
        return 100 * ((self.simulated.row.token_hit_rate or 0.0) - (self.http.row.token_hit_rate or 0.0))

    @property
    def ttft_percent(self) -> float:
        """Difference of the simulation's p90 TTFT from HTTP's, in percent."""
        real = self.http.row.ttft_p90_s
        return 100 * ((self.simulated.row.ttft_p90_s or 0.0) / real - 1) if real else 0.0

    @property
    def ok(self) -> bool:
        """True if both sides agree, and every request over HTTP was answered."""
        close = abs(self.hit_points) <= HIT_POINTS_MAX[self.ours] and abs(self.ttft_percent) <= TTFT_PERCENT_MAX
        return close and not self.http.row.errors and not self.http.row.rejected

    def verdicts(self) -> list[Row]:
        """Return a row for each of the two goals."""
        http = self.http.row
        goals = (
            ("hit rate in points", HIT_POINTS_MAX[self.ours], self.hit_points),
            ("p90 TTFT in percent", TTFT_PERCENT_MAX, self.ttft_percent),
        )
        base = Row(workload=http.workload, router=http.router, policy=http.policy, case="agreement")
        return [
            replace(base, goal=f"simulated against http: {goal}", expected=most, got=got, ok=abs(got) <= most)
            for goal, most, got in goals
        ]


@dataclass(frozen=True, slots=True)
class AgreeRun:
    """One run, before it is pooled with others."""

    row: Row
    sent: Sequence[Sent]
    counted: Sequence[tuple[float, float]]
    """By replica: prompt tokens looked up in its cache, and tokens found there."""


def pool_runs(parts: Sequence[AgreeRun], settings: ReplaySettings, case: str) -> Pooled:
    """Pool the runs into one; `settings` are the settings by which their times are read."""
    counted = [pair for part in parts for pair in part.counted]
    sent = [each for part in parts for each in part.sent]
    first = parts[0].row
    duration_s = sum(part.row.duration_s or 0.0 for part in parts)
    row = row_of(first.workload or "", settings, sent, duration_s / settings.time_scale, counted)
    row.case, row.router, row.policy, row.replicas = case, first.router, first.policy, first.replicas
    row.load, row.load_unit, row.requests_by_replica = first.load, first.load_unit, {}
    row.imbalance = fmean([part.row.imbalance or 0.0 for part in parts])
    hits = [100 * (part.row.token_hit_rate or 0.0) for part in parts]
    ttfts = [part.row.ttft_p90_s or 0.0 for part in parts]
    middle = median(ttfts)
    spread = 100 * (max(ttfts) - min(ttfts)) / middle if middle else 0.0
    row.note = f"of {len(parts)} runs, {max(hits) - min(hits):.1f} points and {spread:.0f} % of p90 TTFT apart"
    return Pooled(row, max(hits) - min(hits), spread)


def agreement_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of both rows of each case, the differences between them, and the spread of single runs."""
    heads = ("token hits", "apart", "TTFT p50", "TTFT p90", "apart", "runs apart", "on the way", "")
    made = build_table(("workload", "router", "policy", *heads), (), "over HTTP / simulated")
    for each in comparisons:
        http, simulated = each.http.row, each.simulated.row
        made.add_row(
            http.workload,
            http.router,
            http.policy,
            f"{100 * (http.token_hit_rate or 0):.1f} / {100 * (simulated.token_hit_rate or 0):.1f} %",
            f"{each.hit_points:+.1f}",
            f"{http.ttft_p50_s or 0:.2f} / {simulated.ttft_p50_s or 0:.2f} s",
            f"{http.ttft_p90_s or 0:.2f} / {simulated.ttft_p90_s or 0:.2f} s",
            f"{each.ttft_percent:+.0f} %",
            f"{each.http.ttft_range:.0f} / {each.simulated.ttft_range:.0f} %",
            f"{each.wire_s:.2f} s",
            "ok" if each.ok else "missed",
        )
    return made


HEADS = ("workload", "router", "policy", "token hits", "TTFT p90", "to ours", "in time", "errors")


def peer_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the race over HTTP, a line per row: figures, and p90 TTFT as a multiple of ours on the same workload."""
    ours = {row.workload: row for row in rows if row.router == OURS and row.policy == "warm"}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        base = ours.get(row.workload)
        ratio = row.ttft_p90_s / base.ttft_p90_s if base and base.ttft_p90_s and row.ttft_p90_s else None
        lines.append(
            (
                row.workload or "",
                row.router or "",
                row.policy or "",
                f"{100 * (row.token_hit_rate or 0):.1f} %",
                f"{row.ttft_p90_s or 0:.2f} s",
                "-" if ratio is None else f"{ratio:.2f} x",
                "-" if (share := in_time(row)) is None else f"{100 * share:.1f} %",
                str(row.failed),
            )
        )
    return lines


def in_time(row: Row) -> float | None:
    """Return the share of the requests with a first token within the limit."""
    if row.goodput is None or not row.requests or row.duration_s is None:
        return None
    return row.goodput * row.duration_s / row.requests


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return heads and lines as a Markdown table; the first three cells of a line are names."""
    lines = [cells[0], ("---", "---", "---", *["---:"] * (len(cells[0]) - 3)), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
