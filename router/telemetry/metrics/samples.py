"""Inputs of a metrics page from other packages, read when the page is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.core.insights.ledger.totals import Ledger
from router.core.types.requests import Priority
from router.http.client_timeouts import REASONS
from router.telemetry.process_totals import ProcessTotals


@dataclass(frozen=True, slots=True)
class PeeringMetrics:
    """Figures of the link to other routers."""

    whole: bool
    """True if this router receives its own messages, which means that others can receive them."""
    routers: int
    """Number of routers that this one receives messages from, itself included."""
    strangers: int
    """Routers of other fleets with the same store and name."""
    writable: bool
    """True if the store accepts writes."""
    delay_s: float | None
    """Seconds from the publication of this router's last message until it came back."""
    counts: Mapping[str, int]
    """Messages and bytes, and interruptions."""
    failures: Mapping[str, int]
    """Failures of the store, by kind."""


@dataclass(frozen=True, slots=True)
class SnapshotMetrics:
    """Figures of the state restored from before the start and saved for the next one."""

    blocks: Mapping[str, int]
    """Restored blocks, by source: `estimate`, `events`."""
    replicas: Mapping[str, int]
    """Replicas by the outcome of their saved state: `restored`, `refused`, `waiting`."""
    files: Mapping[str, int]
    """Writes of the file, by result: `ok`, `failed`."""
    bytes: int
    """Bytes of the file."""
    age_s: float | None
    """Seconds since the file was written; None before the first time."""


@dataclass(slots=True)
class MetricSources:
    """Functions that are called once per scrape. The default of a function returns 0 or an empty value; a part of the
    router that exists replaces it."""

    in_flight: Callable[[], int] = int
    """Number of requests being answered."""
    streams: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict
    """Counts of KV event streams, by replica."""
    prompts: Callable[[], Mapping[str, int]] = dict
    """Prompts on their way to token ids, by outcome."""
    queued: Callable[[], tuple[Mapping[Priority, int], int]] = lambda: ({}, 0)
    """Requests in the queue by priority, and bytes of their bodies."""
    waiting: Callable[[], Mapping[tuple[Priority, str], int]] = dict
    """The same requests by priority and model."""
    tenants: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]] = lambda: ({}, {})
    """Open leases and waiting requests, by tenant."""
    held: Callable[[], int] = int
    """Number of queued requests that are deferred."""
    engine_version: Callable[[str], str] = lambda _: ""
    """Version of a replica's engine, given the replica's id; "" if the engine does not report one."""
    discoveries: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """Freshness of each source's list of replicas."""
    ledger: Callable[[], Ledger | None] = lambda: None
    """Counts of the observatory; None if it is off."""
    history: Callable[[], tuple[bool, int, int]] = lambda: (False, 0, 0)
    """State of the history file: True if its writes fail, its size in bytes, and the number of decisions that were not
    written."""
    admin: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, dict.fromkeys(REASONS, 0))
    """Connections to the admin listener: how many are open, and how many it closed, by reason."""
    sharing: Callable[[], PeeringMetrics | None] = lambda: None
    """Link to other routers; None if no state is shared."""
    unshared: Callable[[], str] = str
    """Reason for which routers share no state; "" if that condition does not hold."""
    state: Callable[[], SnapshotMetrics | None] = lambda: None
    """Saved and restored state; None if no state is kept."""
    totals: ProcessTotals = field(default_factory=ProcessTotals)
    """Totals of the data planes, and stalls of the event loop."""
