"""What a page of metrics asks other rooms for, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.core.facts.requests import Priority
from router.core.observatory.ledger.ledger import Ledger
from router.http.deadlines import REASONS
from router.telemetry.process_counts import Totals


@dataclass(frozen=True, slots=True)
class SharingFigures:
    """Figures of the link to other routers."""

    whole: bool
    """Whether this router hears its own messages, so that others can."""
    routers: int
    """Routers that this one hears, itself included."""
    strangers: int
    """Routers of other fleets with the same store and name."""
    writable: bool
    """Whether the store takes writes."""
    delay_s: float | None
    """Seconds from saying to hearing the last message of this router's own."""
    counts: Mapping[str, int]
    """Messages and bytes, and interruptions."""
    failures: Mapping[str, int]
    """Failures of the store, by kind."""


@dataclass(frozen=True, slots=True)
class StateFigures:
    """Figures of what is known from before, and left for after."""

    blocks: Mapping[str, int]
    """Blocks that were taken over, by who vouched for them: `estimate`, `events`."""
    replicas: Mapping[str, int]
    """Replicas by what became of what was known of them: `restored`, `refused`, `waiting`."""
    files: Mapping[str, int]
    """Writes of the file, by result: `ok`, `failed`."""
    bytes: int
    """Bytes of the file."""
    age_s: float | None
    """Seconds since the file was written; None before the first time."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Functions that are called once per scrape; one that is not given yields 0, or nothing."""

    in_flight: Callable[[], int] = int
    """Requests being answered."""
    streams: Callable[[], Mapping[str, Mapping[str, float | None]]] = dict
    """Counts of KV event streams, by replica."""
    prompts: Callable[[], Mapping[str, int]] = dict
    """Prompts on their way to token ids, by outcome."""
    queued: Callable[[], tuple[Mapping[Priority, int], int]] = lambda: ({}, 0)
    """Requests in the queue by priority, and bytes of their bodies."""
    waiting: Callable[[], Mapping[tuple[Priority, str], int]] = dict
    """The same requests by priority and model."""
    held: Callable[[], int] = int
    """Requests in the queue that are held back."""
    engine_version: Callable[[str], str] = lambda _: ""
    """Version of a replica's engine, given the replica's id; "" where the engine tells none."""
    discoveries: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """How fresh each source's list of replicas is."""
    ledger: Callable[[], Ledger | None] = lambda: None
    """What the observatory has counted; None where it is off."""
    history: Callable[[], tuple[bool, int, int]] = lambda: (False, 0, 0)
    """Whether the file of the history is failing, bytes that it takes, decisions that it did not get."""
    admin: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, dict.fromkeys(REASONS, 0))
    """Connections to the admin listener: how many are open, and how many it closed, by reason."""
    sharing: Callable[[], SharingFigures | None] = lambda: None
    """The link to other routers; None where nothing is shared."""
    state: Callable[[], StateFigures | None] = lambda: None
    """What is known from before; None where nothing is kept."""
    totals: Totals = field(default_factory=Totals)
    """Totals of all processes."""
