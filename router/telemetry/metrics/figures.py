"""What a page of metrics asks others for, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.core.facts.requests import Priority
from router.core.observatory.ledger.ledger import Ledger
from router.telemetry.stalls import BOUNDS_S


@dataclass(frozen=True, slots=True)
class Figures:
    """Each is asked for once a scrape; those that nobody gives are nought."""

    in_flight: Callable[[], int] = int
    """Requests being answered."""
    streams: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict
    """Of event streams, by replica."""
    prompts: Callable[[], Mapping[str, int]] = dict
    """What became of prompts on the way to tokens."""
    queued: Callable[[], tuple[Mapping[Priority, int], int]] = lambda: ({}, 0)
    """Requests that wait for a place by priority, and bytes of their bodies."""
    held: Callable[[], int] = int
    """Requests among them that are held back."""
    connections: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {})
    """Of clients: those open, and those that we closed by reason."""
    discoveries: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """How fresh the view of each source of replicas is."""
    ledger: Callable[[], Ledger | None] = lambda: None
    """What the observatory has counted; None where there is none."""
    lines_dropped: Callable[[], int] = int
    """Log lines that nobody took."""
    spans_dropped: Callable[[], int] = int
    """Of traces, those that did not reach the collector."""
    unexplained: Callable[[], int] = int
    """Prompts that were not compared with an earlier one, for want of time."""
    stalls: Callable[[], list[float]] = lambda: [0.0] * (len(BOUNDS_S) + 2)
    """Of the event loops: see stalls.py."""
    workers_cpu_s: Callable[[], float] = float
    """CPU of other processes, in seconds."""
