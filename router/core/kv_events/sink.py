"""Where what a stream says of a replica's cache goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from router.core.facts.placements import Grade
from router.core.kv_events.decoding import Event
from router.core.kv_events.states import EngineShape, Page
from router.core.kv_events.steps import Clear, Regrade, Resume, Suspend


class EventSink(Protocol):
    """What events mean to the router."""

    def apply(self, replica: str, event: Event, now_s: float) -> None:
        """One event happened."""

    def told(self, replica: str, until_s: float) -> None:
        """All events before this time were applied, by the times in the replica's batches."""

    def clear(self, replica: str, why: str, now_s: float) -> None:
        """Forget all blocks: the cache is gone, or nothing about it is certain. Ends a suspension."""

    def suspend(self, replica: str, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit no block until `clear` or `resume`; `doubt` is explained in steps.py."""

    def resume(self, replica: str, now_s: float) -> None:
        """The stream proved that nothing is missing: blocks count as before."""

    def grade(self, replica: str, grade: Grade, why: str, now_s: float) -> None:
        """Set how far the stream can be trusted: EXACT, CATCHING_UP, or ESTIMATED where there is none."""


class StateSink(Protocol):
    """Where one process leaves off and another goes on: what is known of a replica by its events, as a whole."""

    def shape(self, replica: str) -> EngineShape | None:
        """What is known besides blocks; None where nothing is."""

    def pages(self, replica: str) -> Iterator[Page]:
        """All blocks. Raises RuntimeError where they change between two pages."""

    def begin(self, replica: str, shape: EngineShape) -> None:
        """Forget all blocks; others come in pages. Raises UnreadableState."""

    def take_in(self, replica: str, page: Page) -> None:
        """Some of the blocks. Raises UnreadableState."""


def pass_on(step: Clear | Suspend | Resume | Regrade, sink: EventSink, replica: str, now_s: float) -> None:
    """Tell the sink of a step that changes what the replica's blocks are worth."""
    match step:
        case Clear():
            sink.clear(replica, step.why, now_s)
        case Suspend():
            sink.suspend(replica, step.why, now_s, doubt=step.doubt)
        case Resume():
            sink.resume(replica, now_s)
        case Regrade():
            sink.grade(replica, step.grade, step.why, now_s)
