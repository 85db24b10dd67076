"""What the processes of one router have counted together: the hub's own process, and its edges.

Edges give growing totals under the names below (`placer.Edges.figures`); they are read when a page of metrics is made.
With several workers, each also counts for its whole process, under the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from router.http.deadlines import REASONS
from router.telemetry import logs
from router.telemetry.stalls import Stalls, with_figures

# Names of figures. The first three are counted for a worker's process, the others by its edge.
HUB_LOST = "hub_lost"  # number of placements made without the hub
LINES_DROPPED = "lines_dropped"  # log lines that were dropped unwritten
CPU_MS = "cpu_ms"  # CPU time
SPANS_DROPPED = "spans_dropped"  # spans of traces that did not reach the collector
UNEXPLAINED = "unexplained"  # prompts that were not compared with an earlier one, for want of time
CONNECTIONS = "connections"  # clients' connections that are open: a level, no total
BODIES = "bodies_bytes"  # bytes of request bodies that are held: a level
MALFORMED = "malformed"  # messages of gateways that could not be read
LEVELS = (CONNECTIONS, BODIES)
CLOSED = "closed:"  # prefix of one of deadlines.REASONS: clients' connections that we closed
PROMPTS = "prompts:"  # prefix of an outcome: prompts on their way to token ids


class Totals:
    """Sums over all processes, read when a page of metrics is made."""

    def __init__(self, edges: Callable[[], Mapping[str, int]] = dict) -> None:
        """`edges` gives the figures of all edges together."""
        self._edges = edges
        self.own_stalls = Stalls()

    def prompts(self, own: Mapping[str, int]) -> dict[str, int]:
        """Prompts on their way to token ids, by outcome; `own` are those of the hub's process."""
        figures = Counter(own)
        for name, count in self._edges().items():
            if name.startswith(PROMPTS):
                figures[name.removeprefix(PROMPTS)] += count
        return dict(figures)

    def connections(self) -> tuple[int, dict[str, int]]:
        """Clients' connections: how many are open, and how many the router closed, by reason."""
        figures = self._edges()
        return figures.get(CONNECTIONS, 0), {why: figures.get(CLOSED + why, 0) for why in REASONS}

    def bodies_bytes(self) -> int:
        """Bytes of request bodies that are held."""
        return self._edges().get(BODIES, 0)

    def malformed(self) -> int:
        """Messages of gateways that could not be read."""
        return self._edges().get(MALFORMED, 0)

    def hub_lost(self) -> int:
        """Placements that workers made without the hub."""
        return self._edges().get(HUB_LOST, 0)

    def lines_dropped(self) -> int:
        """Log lines that nobody took."""
        return logs.dropped() + self._edges().get(LINES_DROPPED, 0)

    def spans_dropped(self) -> int:
        """Spans of traces that did not reach the collector."""
        return self._edges().get(SPANS_DROPPED, 0)

    def unexplained(self) -> int:
        """Prompts that were not compared with an earlier one."""
        return self._edges().get(UNEXPLAINED, 0)

    def stalls(self) -> list[float]:
        """Stalls of the event loops of all processes, as `Stalls.series`."""
        return with_figures(self.own_stalls.series, self._edges())

    def workers_cpu_s(self) -> float:
        """CPU time of the workers, in seconds."""
        return self._edges().get(CPU_MS, 0) / 1e3
