"""Report of `python -m loadtest sizing`: a table by replicas and streams, and the rule that follows from it.

The rule is a sum. Each part comes from the rows that show it:

- An idle router's CPU grows with replicas: a line through the idle rows.
- A chunk costs the CPU beyond that, at the number of streams with the highest cost. With few streams each chunk wakes
  the process by itself, and with many they share a wake-up.
- A request is compared with every replica, which is a line as well.
- A stream keeps its buffers: a line through the rows of one number of replicas.
- The index uses its configured size. Its own count is no less than the growth of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

from rich.console import Console

from loadtest.common.report import Row, build_table

IDLE, SHORT, STREAMS, FULL = "idle", "short", "streams", "full_index"
HEADERS = ("replicas", "load", "CPU, cores", "CPU, µs per chunk or request", "memory, MB")


class SizingError(ValueError):
    """Rows from which no rule follows; the message names the missing ones."""


@dataclass(frozen=True, slots=True)
class SizingRule:
    """Cores and MB as a sum."""

    base_cores: float
    replica_cores: float
    chunk_us: float
    request_us: float
    replica_request_us: float
    """Beyond `request_us`, for each replica that a request may go to."""
    base_mb: float
    replica_mb: float
    stream_mb: float
    index_factor: float
    """MB of memory per MB of `routing.index_bytes_max`."""

    def cores(self, replicas: int, chunks_per_s: float, requests_per_s: float) -> float:
        """Return the cores for this number of replicas and these rates."""
        idle = self.base_cores + self.replica_cores * replicas
        request_us = self.request_us + self.replica_request_us * replicas
        return idle + (chunks_per_s * self.chunk_us + requests_per_s * request_us) / 1e6

    def memory_mb(self, replicas: int, streams: int, index_mb: float) -> float:
        """Return the MB for these sizes, with the index full."""
        rest = self.base_mb + self.replica_mb * replicas + self.stream_mb * streams
        return rest + self.index_factor * index_mb


def rule(rows: Sequence[Row]) -> SizingRule:
    """Return the rule that follows from the rows. Raises SizingError."""
    idle, full = _case(rows, IDLE), _case(rows, FULL)
    short, streamed = _case(rows, SHORT), _case(rows, STREAMS)
    if not (idle and full and short and streamed):
        raise SizingError("not the rows of a whole run of sizing: some of its cases are missing")
    base_cores, replica_cores = _line((_x(row.replicas), row.cpu_cores) for row in idle)
    request_us, replica_request_us = _line((_x(row.replicas), row.cpu_us_per_request) for row in short)
    base_mb, replica_mb = _line((_x(row.replicas), row.rss_mb) for row in idle)

    def chunk_us(row: Row) -> float:
        """Return the CPU of one chunk in µs, without the CPU of the idle router."""
        chunks_per_s = (row.cpu_cores or 0.0) * 1e6 / (row.cpu_us_per_chunk or 1e9)
        alone = (row.cpu_cores or 0.0) - base_cores - replica_cores * _x(row.replicas)
        return max(0.0, alone) * 1e6 / max(1.0, chunks_per_s)

    by_streams = {row.load: [r for r in streamed if r.load == row.load] for row in streamed}
    by_replicas = {row.replicas: [r for r in streamed if r.replicas == row.replicas] for row in streamed}
    slopes = [_line((_x(row.load), row.rss_mb) for row in same)[1] for same in by_replicas.values()]
    taken = [(row.got or 0.0) / row.index_mb for row in full if row.index_mb]
    if not taken:
        raise SizingError("the index was never filled")
    return SizingRule(
        base_cores,
        replica_cores,
        max(median(map(chunk_us, same)) for same in by_streams.values()),
        request_us,
        replica_request_us,
        base_mb,
        replica_mb,
        median(slopes),
        max(1.0, *taken),
    )


def _case(rows: Iterable[Row], case: str) -> list[Row]:
    return [row for row in rows if row.case == case]


def _x(value: float | None) -> float:
    return float(value or 0.0)


def _line(points: Iterable[tuple[float, float | None]]) -> tuple[float, float]:
    """Return (intercept, slope) of the line through the points. A value below 0 would be noise and is set to 0."""
    known = [(x, y) for x, y in points if y is not None]
    if len({x for x, _ in known}) < 2:
        return (max((y for _, y in known), default=0.0), 0.0)
    slope, intercept = linear_regression([x for x, _ in known], [y for _, y in known])
    if slope <= 0:
        return max(y for _, y in known), 0.0
    return max(0.0, intercept), slope


# Table and words


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row under HEADERS."""
    load = {
        IDLE: "probes and scrapes alone",
        SHORT: f"short requests, {row.requests_per_s or 0:,.0f} a second",
        STREAMS: f"{row.load or 0:,.0f} streams",
        FULL: f"short requests, the index full: {row.index_mb or 0:,.0f} MB",
    }[row.case or IDLE]
    each_us = row.cpu_us_per_chunk if row.cpu_us_per_chunk is not None else row.cpu_us_per_request
    return (
        f"{row.replicas}",
        load,
        "-" if row.cpu_cores is None else f"{row.cpu_cores:.2f}",
        "-" if each_us is None else f"{each_us:.1f}",
        "-" if row.rss_mb is None else f"{row.rss_mb:,.0f}",
    )


def rule_lines(rows: Sequence[Row]) -> list[str]:
    """Return the rule, a line each for CPU and memory, and its result for the largest measured sizes."""
    found = rule(rows)
    largest = max(_case(rows, STREAMS), key=lambda row: (_x(row.replicas), _x(row.load)))
    replicas, streams = largest.replicas or 0, round(_x(largest.load))
    rate_per_s = round((largest.cpu_cores or 0.0) * 1e6 / (largest.cpu_us_per_chunk or 1e9) / max(1, streams))
    index_mb = _case(rows, FULL)[0].expected or 0.0
    return [
        (
            f"cores = {found.base_cores:.3f} + {1e3 * found.replica_cores:.2f} per 1,000 replicas"
            f" + streams x events a second x {found.chunk_us:.0f} µs"
            f" + requests a second x ({found.request_us:.0f} µs + {found.replica_request_us:.1f} µs per replica)"
        ),
        (
            f"MB = {found.base_mb:.0f} + {found.replica_mb:.2f} per replica + {found.stream_mb:.3f} per stream"
            f" + {found.index_factor:.2f} x `routing.index_bytes_max` in MB"
        ),
        (
            f"{replicas} replicas, {streams:,} streams of {rate_per_s} events a second, an index of {index_mb:,.0f} MB:"
            f" {found.cores(replicas, streams * rate_per_s, 0.0):.2f} cores,"
            f" {found.memory_mb(replicas, streams, index_mb):,.0f} MB"
        ),
    ]


def print_report(console: Console, rows: Sequence[Row]) -> None:
    """Print the table, the rule, and the errors."""
    made = build_table(HEADERS, (), "CPU and memory of warmroute (whole process tree)", left={"load"}, no_wrap=False)
    for row, after in zip(rows, [*rows[1:], None], strict=False):
        made.add_row(*cells(row), end_section=after is not None and after.replicas != row.replicas)
    console.print(made)
    for line in rule_lines(rows):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for row in rows:
        if row.errors_by_kind:
            console.print(f"{row.case}, {row.replicas} replicas: {row.errors_by_kind}", highlight=False, markup=False)
