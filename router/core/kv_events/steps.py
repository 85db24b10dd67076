"""What a KvStream (stream.py) tells its owner to do, its bounds and its counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.facts.placements import Grade
from router.core.kv_events.decoding import EventBatch


class Phase(StrEnum):
    """Where a stream stands."""

    DOWN = "down"  # no connection
    ASKING = "replaying"
    FOLLOWING = "following"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one stream."""

    silence_s: float = 1.0  # silence of a replay after which it is asked for again; doubles with each request
    asks_max: int = 3  # requests without any progress before we go on without a replay
    suspended_max_s: float = 10.0  # suspension without any progress; then all is forgotten
    look_s: float = 10.0  # time between two checks: replays from the last batch, which show one lost behind it
    queue_batches_max: int = 20_000
    queue_bytes_max: int = 64 << 20
    window_batches: int = 4_096  # applied batches whose digests are remembered


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask for a replay from batch `first`, on a connection of its own; an older one is of no interest any more."""

    first: int
    token: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply all events of a batch."""

    seq: int
    batch: EventBatch


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget everything; ends a suspension."""

    why: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Credit nothing that was said until Clear or Resume; with `doubt` the process may be another one, so nothing that
    is believed of its cache counts, our own estimate included."""

    why: str
    doubt: bool


@dataclass(frozen=True, slots=True)
class Resume:
    """What is known counts again."""


@dataclass(frozen=True, slots=True)
class Regrade:
    """The stream's grade, or the reason for it, is another one."""

    grade: Grade
    why: str


Step = AskReplay | Apply | Clear | Suspend | Resume | Regrade


@dataclass(slots=True)
class StreamCounts:
    """What happened so far."""

    batches: int = 0  # applied
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0  # asked for
    restarts: int = 0
    malformed: int = 0  # batches, and messages that are none
    skipped: int = 0  # events that could not be read in batches that could
    dropped: int = 0  # live batches that found the queue full
    lost: int = 0  # times that batches were lost for good


@dataclass(slots=True)
class Steps:
    """Steps that the owner has not taken yet, and where they lead: the grade last said, whether nothing is credited."""

    grade: Grade = Grade.ESTIMATED
    why: str = "not connected yet"
    suspended: bool = False
    doubt: bool = False  # the process may be another one (Suspend)
    since_s: float = 0.0  # time at which the suspension began, or last made progress
    due: deque[Step] = field(default_factory=deque)

    def suspend(self, why: str, now_s: float, *, doubt: bool) -> None:
        """Credit nothing from now on; until that is over the grade is CATCHING_UP. A doubt ends with it, not before."""
        if not self.suspended:
            self.suspended, self.doubt, self.since_s = True, doubt, now_s
        elif doubt and not self.doubt:
            self.doubt = True
        else:
            return
        self.due.append(Suspend(why, self.doubt))
        self.regrade(Grade.CATCHING_UP, why)

    def resume(self) -> None:
        """What is known counts, if it did not."""
        if self.suspended:
            self.suspended = False
            self.due.append(Resume())

    def clear(self, why: str) -> None:
        """Forget; a suspension goes on. The grade goes first: others may look between two steps."""
        if self.grade is Grade.EXACT:
            self.regrade(Grade.CATCHING_UP, why)
        self.due.append(Clear(why))
        if self.suspended:
            self.due.append(Suspend(why, self.doubt))

    def regrade(self, grade: Grade, why: str) -> None:
        """Say so, if it is news."""
        if (grade, why) != (self.grade, self.why):
            self.grade, self.why = grade, why
            self.due.append(Regrade(grade, why))
