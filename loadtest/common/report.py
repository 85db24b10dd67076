"""Results of a benchmark: rows, the JSON envelope around them, a table and a chart.

Every benchmark reports rows of one shape, so that runs compare across benchmarks, routers and commits. Times in a row
are simulated seconds at any time scale. This module draws charts as text for the terminal, svg.py draws them as
pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router.telemetry import report_header as common


@dataclass(slots=True)
class Row:
    """One measurement; a field that does not apply stays None and is left out of the JSON."""

    workload: str | None = None
    policy: str | None = None
    router: str | None = None
    case: str | None = None
    replicas: int | None = None
    load: float | None = None
    load_unit: str | None = None
    """`sessions` active at a time, `requests/s` offered, `chunks/s` relayed, or `streams` open."""
    load_name: str | None = None
    """`below`, `at` or `above` the load that the replicas can sustain, or a fraction of it as a number."""
    seed: int | None = None
    seeds: int | None = None
    """The number of seeds, in place of `seed`: each figure is the median of their runs."""
    bound: bool | None = None
    """True if the policy is an upper bound that no router can reach."""
    requests: int | None = None
    errors: int | None = None
    """Requests that failed in any way except a rejection, timeouts included."""
    rejected: int | None = None
    """Requests refused because of load (429, 503)."""
    patience_s: float | None = None
    """The time for which clients wait for a first token before they close the attempt and retry."""
    held: int | None = None
    """Requests that the router deferred."""
    held_while_idle: int | None = None
    """The part of `held` that was deferred while the fleet's mean backlog was below one unit."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_p90_least_s: float | None = None
    """The smallest p90 of several seeds; `ttft_p90_most_s` is the largest."""
    ttft_p90_most_s: float | None = None
    ttft_limit_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p99_s: float | None = None
    tpot_p50_ms: float | None = None
    """Time per output token, from the first token of an answer to its last.

    It is divided by the number of tokens after the first. Only complete answers with at least two tokens count.
    """
    tpot_p90_ms: float | None = None
    output_tokens_per_s: float | None = None
    goodput: float | None = None
    """Requests per second with a first token within the run's limit."""
    goodput_share: float | None = None
    """Share of all requests that met the limit and got a complete answer: 0 to 1."""
    token_hit_rate: float | None = None
    genuine_hit_rate: float | None = None
    replay_hit_rate: float | None = None
    """The part of `token_hit_rate` from prompts that were already sent, byte for byte, in the same run."""
    imbalance: float | None = None
    """Computed prompt tokens of the busiest replica, divided by the mean."""
    preemptions: int | None = None
    """Requests that lost their KV blocks to other requests while they ran, and recomputed them."""
    cpu_us_per_request: float | None = None
    """User and system time of the router's whole process tree."""
    cpu_us_per_chunk: float | None = None
    """CPU time per event of a stream, with `load` streams open."""
    requests_per_s: float | None = None
    requests_per_wall_minute: float | None = None
    """Speed of the simulation itself."""
    added_ttft_p50_ms: float | None = None
    """Time to the first event through the router, less that of the same load without a router."""
    added_ttft_p99_ms: float | None = None
    rss_mb: float | None = None
    cpu_cores: float | None = None
    """User and system seconds of the router's whole process tree, per second."""
    index_mb: float | None = None
    """Memory of the router's prefix index, by its own count."""
    goal: str | None = None
    expected: float | None = None
    got: float | None = None
    ok: bool | None = None
    timed: bool | None = None
    """True if the figure is a time, which depends on the other load of the machine."""
    first_sign_s: float | None = None
    """Time from the beginning of a trouble to its first sign, whether or not that names the cause."""
    note: str | None = None
    """Any other remark on the row, such as the reason why it was not measured."""
    duration_s: float | None = None
    ttft_engine_p90_s: float | None = None
    """As `ttft_p90_s`, but from the engine's own time to first token plus the time in the router's queue.

    This is the part of the time to first token that depends on the placement.
    """
    ttft_life_p90_s: float | None = None
    """As `ttft_p90_s`, but the real time of client, router and HTTP counts once, not times `time_scale`."""
    wire_s: float | None = None
    """Mean time to first token beyond the time that the engines report.

    It is the real time of client, router and HTTP, times `time_scale`.
    """
    time_scale: float | None = None
    """Simulated seconds per wall-clock second."""
    hit_rate_source: str | None = None
    """`engines` (their counters) or `usage` (the usage in the answers)."""
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    requests_by_replica: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Failed requests, rejected ones included."""
        return (self.errors or 0) + (self.rejected or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that apply."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(self).items()
            if value is not None and value != {}
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, or None without values.

    It is always a measured value, never an interpolation.
    """
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def quantiles(name: str, values_s: Sequence[float]) -> dict[str, Any]:
    """Return the row fields for the median and the high percentiles of a time; `name` is `ttft` or `e2e`."""
    return {f"{name}_p{percent}_s": percentile(values_s, percent) for percent in (50, 90, 99)}


def merge_rows(rows: Sequence[Row], medians: Iterable[str], sums: Iterable[str], **more: Any) -> Row:  # noqa: ANN401 - fields
    """Merge several runs into one row, based on the first.

    - `medians`: fields that become the median of the rows that have them.
    - `sums`: fields that become the sum of the rows that have them.
    - `more`: further fields of the merged row.

    Counts by kind or by replica are left out.
    """
    made = replace(rows[0], **{"requests_by_replica": {}, "errors_by_kind": {}} | more)
    for names, of in ((medians, median), (sums, sum)):
        for name in names:
            values = [value for row in rows if (value := getattr(row, name)) is not None]
            setattr(made, name, of(values) if values else None)
    return made


# The envelope


def envelope(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the JSON document of a benchmark's run."""
    return common.document(command, [row.to_dict() for row in rows], Path(__file__).resolve().parent)


def write_json(path: Path, command: str, rows: Sequence[Row], routers: Mapping[str, str] | None = None) -> None:
    """Write the run's document. The versions of the compared routers are part of `machine`."""
    document = envelope(command, rows)
    if routers:
        document["machine"]["routers"] = dict(routers)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# Table and chart in the terminal


def report_console(width: int) -> Console:
    """Return the console for a report: as wide as the terminal, or `width` columns without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def build_table(
    heads: Iterable[str],
    lines: Iterable[Iterable[str]],
    title: str | None = None,
    *,
    left: Container[str] = ("workload", "router", "policy"),
    no_wrap: bool = True,
) -> Table:
    """Return a table of the lines under their heads.

    Columns in `left` are names and left-aligned, all others are figures and right-aligned.
    """
    made = Table(title=title, title_justify="left")
    for head in heads:
        side: JustifyMethod = "left" if head in left else "right"
        made.add_column(head, justify=side, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    for line in lines:
        made.add_row(*line)
    return made


@dataclass(frozen=True, slots=True)
class Column:
    """A field as a table or chart shows it."""

    name: str
    title: str
    form: str = "{}"
    scale: float = 1.0
    rank: int = 0
    """In a narrow terminal, columns of the highest rank are left out first; a column of rank 0 always stays."""


COLUMNS = (
    Column("workload", "workload"),
    Column("load_name", "load"),
    Column("policy", "policy"),
    Column("requests", "requests", "{:,}", rank=1),
    Column("errors", "errors", rank=1),
    Column("rejected", "rejected", rank=2),
    Column("token_hit_rate", "token hits", "{:.1f} %", 100),
    Column("ttft_p50_s", "TTFT p50", "{:.2f} s", rank=1),
    Column("ttft_p90_s", "TTFT p90", "{:.2f} s"),
    Column("ttft_p99_s", "TTFT p99", "{:.2f} s", rank=2),
    Column("e2e_p50_s", "e2e p50", "{:.1f} s", rank=3),
    Column("e2e_p90_s", "e2e p90", "{:.1f} s", rank=1),
    Column("e2e_p99_s", "e2e p99", "{:.1f} s", rank=4),
    Column("tpot_p50_ms", "TPOT p50", "{:.0f} ms", rank=4),
    Column("tpot_p90_ms", "TPOT p90", "{:.0f} ms", rank=2),
    Column("output_tokens_per_s", "output tok/s", "{:,.0f}", rank=1),
    Column("goodput", "goodput/s", "{:.2f}", rank=3),
    Column("goodput_share", "in time", "{:.1f} %", 100, rank=1),
    Column("imbalance", "imbalance", "{:.2f}", rank=2),
)


def format_field(row: Row, column: Column) -> str:
    """Return a field as text, or `-` if it does not apply."""
    value = getattr(row, column.name)
    if value is None:
        return "-"
    return column.form.format(value * column.scale if isinstance(value, float) else value)


def table(rows: Sequence[Row], title: str | None = None, width: int = 200) -> Table:
    """Return a table of the rows. It has the columns that any row fills and that fit into `width` characters."""
    columns = [c for c in COLUMNS if any(getattr(row, c.name) is not None for row in rows)]
    while _width(columns, rows) > width and (worst := max(columns, key=lambda c: c.rank)).rank > 0:
        columns.remove(worst)
    made = build_table((column.title for column in columns), (), title, left={"workload", "load", "policy"})
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following.workload != row.workload
        made.add_row(*(format_field(row, column) for column in columns), end_section=last)
    return made


def _width(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    frame = 3
    return 1 + sum(frame + max(len(c.title), *(len(format_field(row, c)) for row in rows)) for c in columns)


BAR_CHARACTERS = 40
CHARTED = (Column("token_hit_rate", "token hit rate", "{:.1f} %", 100), Column("ttft_p90_s", "p90 TTFT", "{:.2f} s"))


def chart_lines(rows: Sequence[Row]) -> list[str]:
    """Return the charted fields as text bars, one group per workload."""
    lines: list[str] = []
    for column in CHARTED:
        lines += ["", column.title]
        for workload, group in group_rows(rows):
            top = largest(group, column)
            for i, row in enumerate(group):
                value = getattr(row, column.name)
                bar = "█" * max(1, round(BAR_CHARACTERS * value / top)) if value and top else ""
                label = f"{workload if i == 0 else '':<14} {row.policy or '':<12}"
                lines.append(f"  {label} {bar} {format_field(row, column)}")
    return lines


def group_rows(rows: Sequence[Row], column: Column | None = None) -> list[tuple[str, list[Row]]]:
    """Group rows by workload or by case. Rows without this column are left out, because cases have different fields."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if column is None or row.workload or getattr(row, column.name) is not None:
            groups.setdefault(row.workload or row.case or "", []).append(row)
    return list(groups.items())


def largest(rows: Sequence[Row], column: Column) -> float:
    """Return the value of a full bar: 1.0 for a rate, otherwise the largest value of the group."""
    if column.name.endswith("_rate"):
        return 1.0
    return max((getattr(row, column.name) or 0.0 for row in rows), default=0.0)


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, and the chart if there are at least two rows."""
    console.print(table(rows, width=console.width))
    if len(rows) > 1:
        console.print("\n".join(chart_lines(rows)), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on the console while the block runs, or without a terminal a line for every tenth."""
    if not console.is_terminal:
        step = max(1, total // 10)

        def tell(done: int) -> None:
            if done % step == 0 or done == total:
                console.print(f"{title}: {done} of {total}", highlight=False)

        yield tell
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
