"""What the processes of one router have counted together: this one's own, and what workers have told of theirs.

A worker tells growing numbers under names (`Edge.figures`); here they are added up, and read when a page of metrics is
made. With one process nothing is told, and what is read is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from router.http.deadlines import REASONS
from router.telemetry import logs
from router.telemetry.stalls import Stalls, with_figures

# What an edge of another process counts for the hub's metrics, by name.
HUB_LOST = "hub_lost"  # placements without the hub
LINES_DROPPED = "lines_dropped"  # of its log
SPANS_DROPPED = "spans_dropped"  # of its traces
UNEXPLAINED = "unexplained"  # prompts that were not compared, for want of time
CONNECTIONS = "connections"  # of clients, open
CLOSED = "closed:"  # and one of deadlines.REASONS: connections of clients that we closed
CPU_MS = "cpu_ms"  # of its process
PROMPTS = "prompts:"  # and an outcome: prompts on their way to token ids


class Totals:
    """`connections_of_edge` and what follows it are of an edge in this process, if there is one: see `Edge`."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()
        self.own_stalls = Stalls()
        self.connections_of_edge: Callable[[], Mapping[str, int]] = dict
        self.spans_of_edge: Callable[[], int] = int
        self.unexplained_of_edge: Callable[[], int] = int

    def add(self, counts: Mapping[str, int]) -> None:
        """What an edge of another process has counted since it last said so."""
        self._told.update(counts)

    def prompts(self, own: Mapping[str, int]) -> dict[str, int]:
        """What became of prompts on the way to tokens."""
        figures = Counter(own)
        for name, count in self._told.items():
            if name.startswith(PROMPTS):
                figures[name.removeprefix(PROMPTS)] += count
        return dict(figures)

    def connections(self) -> tuple[int, dict[str, int]]:
        """Of clients: those open, and those that were closed by reason."""
        figures = Counter(self._told)
        figures.update(self.connections_of_edge())
        return figures[CONNECTIONS], {why: figures[CLOSED + why] for why in REASONS}

    def lines_dropped(self) -> int:
        """Log lines that nobody took."""
        return logs.dropped() + self._told[LINES_DROPPED]

    def spans_dropped(self) -> int:
        """Of traces, those that did not reach the collector."""
        return self.spans_of_edge() + self._told[SPANS_DROPPED]

    def unexplained(self) -> int:
        """Prompts that were not compared with an earlier one."""
        return self.unexplained_of_edge() + self._told[UNEXPLAINED]

    def stalls(self) -> list[float]:
        """Of the event loops of all."""
        return with_figures(self.own_stalls.series, self._told)

    def workers_cpu_s(self) -> float:
        """CPU of the others, in seconds."""
        return self._told[CPU_MS] / 1e3
