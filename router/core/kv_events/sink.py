"""Interfaces of the index that receives one replica's events and cache state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from router.core.kv_events.batch_decoder import Event
from router.core.kv_events.event_state_codec import EngineShape, Page
from router.core.kv_events.stream_steps import Clear, Resume, SetConfidence, Suspend
from router.core.types.placements import Confidence


class EventSink(Protocol):
    """Receiver of events and of changes in their reliability."""

    def apply(self, replica: str, event: Event, now_s: float) -> None:
        """Apply one event."""

    def advance_watermark(self, replica: str, until_s: float) -> None:
        """Record that all events before this time were applied, by the times in the replica's batches."""

    def clear(self, replica: str, why: str, now_s: float) -> None:
        """Forget all blocks: the cache is gone, or no block is certain. Ends a suspension."""

    def suspend(self, replica: str, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit no block until `clear` or `resume`; `doubt` is explained in stream_steps.py."""

    def resume(self, replica: str, now_s: float) -> None:
        """Credit blocks again: the stream proved that no batch is missing."""

    def grade(self, replica: str, grade: Confidence, why: str, now_s: float) -> None:
        """Set the confidence in the stream: EXACT, CATCHING_UP, or ESTIMATED without a stream."""


class StateSink(Protocol):
    """Transfer of a replica's complete state between processes."""

    def shape(self, replica: str) -> EngineShape | None:
        """Return the known facts except blocks; None if no fact is known."""

    def pages(self, replica: str) -> Iterator[Page]:
        """Yield all blocks. Raises RuntimeError if they change between two pages."""

    def reset_to(self, replica: str, shape: EngineShape) -> None:
        """Forget all blocks; new ones follow in pages. Raises UnreadableState."""

    def import_page(self, replica: str, page: Page) -> None:
        """Add one page of blocks. Raises UnreadableState."""


def dispatch(step: Clear | Suspend | Resume | SetConfidence, sink: EventSink, replica: str, now_s: float) -> None:
    """Forward a step that changes the value of the replica's blocks to the sink."""
    match step:
        case Clear():
            sink.clear(replica, step.why, now_s)
        case Suspend():
            sink.suspend(replica, step.why, now_s, doubt=step.doubt)
        case Resume():
            sink.resume(replica, now_s)
        case SetConfidence():
            sink.grade(replica, step.grade, step.why, now_s)
