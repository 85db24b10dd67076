"""What a page of metrics asks others for, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.core.facts.requests import Priority
from router.core.observatory.ledger.ledger import Ledger
from router.telemetry.process_counts import Totals


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
    discoveries: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """How fresh the view of each source of replicas is."""
    ledger: Callable[[], Ledger | None] = lambda: None
    """What the observatory has counted; None where there is none."""
    totals: Totals = field(default_factory=Totals)
    """What all processes have counted."""
