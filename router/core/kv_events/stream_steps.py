"""Steps that a KvStream (stream.py) returns to its owner, with its limits and counters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.kv_events.batch_decoder import EventBatch
from router.core.types.placements import Confidence


class Phase(StrEnum):
    """State of the stream's connection and replay."""

    DOWN = "down"  # no connection
    ASKING = "replaying"
    FOLLOWING = "following"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of one stream."""

    silence_s: float = 1.0  # silence of a replay before it is requested again; doubles with each request
    asks_max: int = 3  # requests without progress before the stream continues without a replay
    suspended_max_s: float = 10.0  # suspension without progress before all blocks are forgotten
    look_s: float = 10.0  # time between two checks: replays from the last batch, which show a batch lost after it
    queue_batches_max: int = 20_000
    queue_bytes_max: int = 64 << 20
    window_batches: int = 4_096  # applied batches with a known digest


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Request a replay from batch `first`, on a separate connection. Cancels an older request."""

    first: int
    token: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply all events of a batch."""

    seq: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget all blocks. Ends a suspension."""

    why: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Credit no reported block until Clear or Resume.

    With `doubt` the process may be another one, so no information about its cache counts, including our own estimate.
    """

    why: str
    doubt: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """Credit the known blocks again."""


@dataclass(frozen=True, slots=True)
class SetConfidence:
    """Set the stream's new grade, or a new reason for it."""

    grade: Confidence
    why: str


Step = RequestReplay | Apply | Clear | Suspend | Resume | SetConfidence


@dataclass(slots=True)
class StreamCounts:
    """Counters since the stream was created."""

    batches: int = 0  # applied
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0  # requested
    restarts: int = 0
    malformed: int = 0  # unreadable batches, and other messages
    skipped: int = 0  # unreadable events in readable batches
    dropped: int = 0  # live batches dropped because the queue was full
    lost: int = 0  # number of times that batches were finally lost


@dataclass(slots=True)
class Steps:
    """Steps that the owner has not taken yet, and the state after them: the last grade, and the suspension."""

    grade: Confidence = Confidence.ESTIMATED
    why: str = "not connected yet"
    suspended: bool = False
    doubt: bool = False  # True if the process may be another one (Suspend)
    since_s: float = 0.0  # time at which the suspension began, or last made progress
    due: deque[Step] = field(default_factory=deque)

    def suspend(self, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit no block from now on. The grade is CATCHING_UP until the suspension ends. A doubt ends with it, not
        before."""
        if not self.suspended:
            self.suspended, self.doubt, self.since_s = True, doubt, now_s
        elif doubt and not self.doubt:
            self.doubt = True
        else:
            return
        self.due.append(Suspend(why, self.doubt))
        self.regrade(Confidence.CATCHING_UP, why)

    def resume(self) -> None:
        """End a suspension, if there is one."""
        if self.suspended:
            self.suspended = False
            self.due.append(Resume())

    def clear(self, why: str) -> None:
        """Forget all blocks; a suspension continues. The grade is first, because the owner can be read between two
        steps."""
        if self.grade is Confidence.EXACT:
            self.regrade(Confidence.CATCHING_UP, why)
        self.due.append(Clear(why))
        if self.suspended:
            self.due.append(Suspend(why, self.doubt))

    def regrade(self, grade: Confidence, why: str) -> None:
        """Add a SetConfidence step if the grade or its reason changed."""
        if (grade, why) != (self.grade, self.why):
            self.grade, self.why = grade, why
            self.due.append(SetConfidence(grade, why))
