"""Totals of the data planes of this process, for the metrics of the control plane.

Data planes report growing totals under the names below (`placement_api.Frontends.counters`), which are read when a
metrics page is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.http.client_timeouts import REASONS
from router.telemetry.loop_lag import LoopLagMonitor

SPANS_DROPPED = "spans_dropped"  # spans of traces that did not reach the collector
UNEXPLAINED = "unexplained"  # prompts that were not compared with an earlier one, for lack of time
CONNECTIONS = "connections"  # open connections of clients: a level, no total
BODIES = "bodies_bytes"  # bytes of request bodies in memory: a level
MALFORMED = "malformed"  # malformed messages of gateways
CLOSED = "closed:"  # prefix of one of client_timeouts.REASONS: client connections that the router closed


class ProcessTotals:
    """Totals of the data planes, and stalls of the event loop, read when a metrics page is made."""

    def __init__(self, frontends: Callable[[], Mapping[str, int]] = dict) -> None:
        """`frontends` returns the sums over all data planes."""
        self._frontends = frontends
        self.stalls = LoopLagMonitor()

    def connections(self) -> tuple[int, dict[str, int]]:
        """Return the number of open client connections, and how many the router closed, by reason."""
        figures = self._frontends()
        return figures.get(CONNECTIONS, 0), {why: figures.get(CLOSED + why, 0) for why in REASONS}

    def bodies_bytes(self) -> int:
        """Return the bytes of request bodies in memory."""
        return self._frontends().get(BODIES, 0)

    def count_malformed(self) -> int:
        """Return the number of malformed messages of gateways."""
        return self._frontends().get(MALFORMED, 0)

    def spans_dropped(self) -> int:
        """Return the number of spans that did not reach the collector."""
        return self._frontends().get(SPANS_DROPPED, 0)

    def count_unexplained(self) -> int:
        """Return the number of prompts that were not compared with an earlier one."""
        return self._frontends().get(UNEXPLAINED, 0)
