"""What an instrument found: rows, the JSON envelope around them, a table and a chart.

Every instrument reports rows of one shape, so that runs compare across instruments, routers and commits.
Times in a row are simulated seconds whatever the time scale was. Charts are drawn as text for the terminal here, and
as pictures in svg.py.
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

from router.telemetry import envelope as common


@dataclass(slots=True)
class Row:
    """One measurement; what does not apply to it stays None and is left out of the JSON."""

    workload: str | None = None
    policy: str | None = None
    router: str | None = None
    case: str | None = None
    replicas: int | None = None
    load: float | None = None
    load_unit: str | None = None
    """`sessions` active at a time, `requests/s` offered, `chunks/s` that were relayed, or `streams` open."""
    load_name: str | None = None
    """`below`, `at` or `above` what the replicas can sustain, or a part of it as a number."""
    seed: int | None = None
    seeds: int | None = None
    """The number of seeds, in place of `seed`: each figure is the median of their runs."""
    bound: bool | None = None
    """Whether the policy is an upper bound that no router can reach."""
    requests: int | None = None
    errors: int | None = None
    """Requests that failed in any way but a rejection, timeouts included."""
    rejected: int | None = None
    """Requests refused for load (429, 503)."""
    patience_s: float | None = None
    """How long clients wait for a first token before they close a try and ask again."""
    held: int | None = None
    """Requests that the router held back for a while."""
    held_while_idle: int | None = None
    """The part of `held` that was held back while the fleet's mean backlog was below one unit."""
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_p90_least_s: float | None = None
    """The least p90 of several seeds; `ttft_p90_most_s` is the greatest."""
    ttft_p90_most_s: float | None = None
    ttft_limit_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p99_s: float | None = None
    tpot_p50_ms: float | None = None
    """Time per output token: from the first token of an answer to its last, over the tokens after the first, of answers
    that came to their end and have two tokens or more."""
    tpot_p90_ms: float | None = None
    output_tokens_per_s: float | None = None
    goodput: float | None = None
    """Requests a second whose first token came within the run's limit."""
    goodput_share: float | None = None
    """The part of all requests that did so, and whose answer came to its end: 0 to 1."""
    token_hit_rate: float | None = None
    genuine_hit_rate: float | None = None
    replay_hit_rate: float | None = None
    """The part of token_hit_rate earned by prompts already sent, byte for byte, in the same run."""
    imbalance: float | None = None
    """Computed prompt tokens, the busiest replica's over the mean."""
    preemptions: int | None = None
    """Requests that lost their KV blocks to others while they ran, and computed them again."""
    cpu_us_per_request: float | None = None
    """User and system time of the router's whole process tree."""
    cpu_us_per_chunk: float | None = None
    """CPU per event of a stream, while so many streams run."""
    requests_per_s: float | None = None
    requests_per_wall_minute: float | None = None
    """Speed of the simulation itself."""
    added_ttft_p50_ms: float | None = None
    """Time to the first event through the router, less that of the same load without one."""
    added_ttft_p99_ms: float | None = None
    rss_mb: float | None = None
    cpu_cores: float | None = None
    """User and system seconds of the router's whole process tree, a second."""
    index_mb: float | None = None
    """What the router's prefix index takes of its memory, by its own count."""
    goal: str | None = None
    expected: float | None = None
    got: float | None = None
    ok: bool | None = None
    timed: bool | None = None
    """Whether the figure is a time, which depends on what else the machine does."""
    note: str | None = None
    """Anything else to know of the row, such as why it was not measured."""
    duration_s: float | None = None
    ttft_engine_p90_s: float | None = None
    """As `ttft_p90_s`, but what the engine says its own was, and what the router had the request wait: what is left of
    it for the placement to answer for."""
    ttft_life_p90_s: float | None = None
    """Like `ttft_p90_s`, but real time that client, router and HTTP took counts once, not times `time_scale`."""
    wire_s: float | None = None
    """Mean seconds that first tokens took beyond what engines say of themselves: real time of client, router and HTTP,
    which counts times `time_scale`."""
    time_scale: float | None = None
    """Simulated seconds in a wall second."""
    hit_rate_source: str | None = None
    """`engines` (their counters) or `usage` (what answers reported)."""
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    requests_by_replica: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests that failed, rejected ones included."""
        return (self.errors or 0) + (self.rejected or 0)

    def as_dict(self) -> dict[str, Any]:
        """The fields that apply."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(self).items()
            if value is not None and value != {}
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that was measured, never one between two. None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def quantiles(name: str, values_s: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that have the median and the high percentiles of a time: `ttft` or `e2e`."""
    return {f"{name}_p{percent}_s": percentile(values_s, percent) for percent in (50, 90, 99)}


def merged(rows: Sequence[Row], medians: Iterable[str], sums: Iterable[str], **more: Any) -> Row:  # noqa: ANN401 - fields
    """Several runs as one: the first, with the medians and the sums of these fields, of rows that have them; and with
    `more` fields. What was counted by kind or by replica is left out."""
    made = replace(rows[0], **{"requests_by_replica": {}, "errors_by_kind": {}} | more)
    for names, of in ((medians, median), (sums, sum)):
        for name in names:
            values = [value for row in rows if (value := getattr(row, name)) is not None]
            setattr(made, name, of(values) if values else None)
    return made


# The envelope


def envelope(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON document of an instrument's run."""
    return common.document(command, [row.as_dict() for row in rows], Path(__file__).resolve().parent)


def write_json(path: Path, command: str, rows: Sequence[Row], routers: Mapping[str, str] | None = None) -> None:
    """Write the run's document; versions of the routers compared are told with the machine."""
    document = envelope(command, rows)
    if routers:
        document["machine"]["routers"] = dict(routers)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# Table and chart in the terminal


def report_console(width: int) -> Console:
    """Where a report is printed: as wide as the terminal, or `width` columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def drawn(
    heads: Iterable[str],
    lines: Iterable[Iterable[str]],
    title: str | None = None,
    *,
    left: Container[str] = ("workload", "router", "policy"),
    no_wrap: bool = True,
) -> Table:
    """Lines of cells under their heads; columns of `left` are names, all others stand at the right as figures do."""
    made = Table(title=title, title_justify="left")
    for head in heads:
        side: JustifyMethod = "left" if head in left else "right"
        made.add_column(head, justify=side, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    for line in lines:
        made.add_row(*line)
    return made


@dataclass(frozen=True, slots=True)
class Column:
    """A field as people read it."""

    name: str
    title: str
    form: str = "{}"
    scale: float = 1.0
    rank: int = 0
    """In a narrow terminal, columns of the highest rank are left out first; rank 0 never is."""


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


def shown(row: Row, column: Column) -> str:
    """A field as text; `-` where it does not apply."""
    value = getattr(row, column.name)
    if value is None:
        return "-"
    return column.form.format(value * column.scale if isinstance(value, float) else value)


def table(rows: Sequence[Row], title: str | None = None, width: int = 200) -> Table:
    """The rows, with the columns that any of them fills and that fit into so many characters."""
    columns = [c for c in COLUMNS if any(getattr(row, c.name) is not None for row in rows)]
    while _width(columns, rows) > width and (worst := max(columns, key=lambda c: c.rank)).rank > 0:
        columns.remove(worst)
    made = drawn((column.title for column in columns), (), title, left={"workload", "load", "policy"})
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following.workload != row.workload
        made.add_row(*(shown(row, column) for column in columns), end_section=last)
    return made


def _width(columns: Sequence[Column], rows: Sequence[Row]) -> int:
    frame = 3
    return 1 + sum(frame + max(len(c.title), *(len(shown(row, c)) for row in rows)) for c in columns)


BAR_CHARACTERS = 40
CHARTED = (Column("token_hit_rate", "token hit rate", "{:.1f} %", 100), Column("ttft_p90_s", "p90 TTFT", "{:.2f} s"))


def chart_lines(rows: Sequence[Row]) -> list[str]:
    """Bars of the charted fields, a group per workload, as text."""
    lines: list[str] = []
    for column in CHARTED:
        lines += ["", column.title]
        for workload, group in grouped(rows):
            top = largest(group, column)
            for i, row in enumerate(group):
                value = getattr(row, column.name)
                bar = "█" * max(1, round(BAR_CHARACTERS * value / top)) if value and top else ""
                label = f"{workload if i == 0 else '':<14} {row.policy or '':<12}"
                lines.append(f"  {label} {bar} {shown(row, column)}")
    return lines


def grouped(rows: Sequence[Row], column: Column | None = None) -> list[tuple[str, list[Row]]]:
    """Rows by workload, or by case, where rows without this column are left out: cases differ in what applies."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if column is None or row.workload or getattr(row, column.name) is not None:
            groups.setdefault(row.workload or row.case or "", []).append(row)
    return list(groups.items())


def largest(rows: Sequence[Row], column: Column) -> float:
    """What a full bar stands for: all tokens for a share, the largest value of the group otherwise."""
    if column.name.endswith("_rate"):
        return 1.0
    return max((getattr(row, column.name) or 0.0 for row in rows), default=0.0)


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """The table and, where there is something to compare, the chart."""
    console.print(table(rows, width=console.width))
    if len(rows) > 1:
        console.print("\n".join(chart_lines(rows)), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the console while the block runs, or a line every tenth where it is no terminal."""
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
