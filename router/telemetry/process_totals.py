"""Totals of all processes of one router: the process of the control plane, and the data planes.

Data planes report growing totals under the names below (`placement_api.Frontends.counters`), which are read when a
metrics page is made. With several workers, each worker also counts for its whole process, under the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from router.http.client_timeouts import REASONS
from router.telemetry import logs
from router.telemetry.loop_lag import LoopLagMonitor, with_figures

# Names of figures. The first three are counted for a worker's process, the others by its data plane.
HUB_LOST = "hub_lost"  # placements made without the control plane
LINES_DROPPED = "lines_dropped"  # log lines that were dropped unwritten
CPU_MS = "cpu_ms"  # CPU time
SPANS_DROPPED = "spans_dropped"  # spans of traces that did not reach the collector
UNEXPLAINED = "unexplained"  # prompts that were not compared with an earlier one, for lack of time
CONNECTIONS = "connections"  # open connections of clients: a level, no total
BODIES = "bodies_bytes"  # bytes of request bodies in memory: a level
MALFORMED = "malformed"  # malformed messages of gateways
LEVELS = (CONNECTIONS, BODIES)
CLOSED = "closed:"  # prefix of one of deadlines.REASONS: client connections that the router closed
PROMPTS = "prompts:"  # prefix of an outcome: prompts on their way to token ids


class ProcessTotals:
    """Sums over all processes, read when a metrics page is made."""

    def __init__(self, edges: Callable[[], Mapping[str, int]] = dict) -> None:
        """`edges` returns the sums over all data planes."""
        self._edges = edges
        self.own_stalls = LoopLagMonitor()

    def prompts(self, own: Mapping[str, int]) -> dict[str, int]:
        """Return prompts on their way to token ids, by outcome. `own` are those of the control plane's process."""
        figures = Counter(own)
        for name, count in self._edges().items():
            if name.startswith(PROMPTS):
                figures[name.removeprefix(PROMPTS)] += count
        return dict(figures)

    def connections(self) -> tuple[int, dict[str, int]]:
        """Return the number of open client connections, and how many the router closed, by reason."""
        figures = self._edges()
        return figures.get(CONNECTIONS, 0), {why: figures.get(CLOSED + why, 0) for why in REASONS}

    def bodies_bytes(self) -> int:
        """Return the bytes of request bodies in memory."""
        return self._edges().get(BODIES, 0)

    def count_malformed(self) -> int:
        """Return the number of malformed messages of gateways."""
        return self._edges().get(MALFORMED, 0)

    def hub_lost(self) -> int:
        """Return the number of placements that workers made without the control plane."""
        return self._edges().get(HUB_LOST, 0)

    def lines_dropped(self) -> int:
        """Return the number of log lines that were dropped."""
        return logs.count_dropped() + self._edges().get(LINES_DROPPED, 0)

    def spans_dropped(self) -> int:
        """Return the number of spans that did not reach the collector."""
        return self._edges().get(SPANS_DROPPED, 0)

    def count_unexplained(self) -> int:
        """Return the number of prompts that were not compared with an earlier one."""
        return self._edges().get(UNEXPLAINED, 0)

    def stalls(self) -> list[float]:
        """Return the stalls of the event loops of all processes, in the form of `LoopLagMonitor.series`."""
        return with_figures(self.own_stalls.series, self._edges())

    def workers_cpu_s(self) -> float:
        """Return the CPU time of the workers, in seconds."""
        return self._edges().get(CPU_MS, 0) / 1e3
