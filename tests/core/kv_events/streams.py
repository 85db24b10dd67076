"""One stream, its owner, and batches for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from router.core.kv_events.stream import (
    Apply,
    Clear,
    KvStream,
    RequestReplay,
    Resume,
    SetConfidence,
    Step,
    StreamLimits,
    Suspend,
)
from router.core.types.placements import Confidence

LIMITS = StreamLimits(silence_s=1.0, asks_max=3, suspended_max_s=20.0, look_s=10.0)


def batch(seq: int, process: str = "A", *kinds: str) -> bytes:
    """A batch unlike any other; `kinds` of events in it."""
    return msgspec.msgpack.encode([seq + ord(process) / 1_000, [{"type": kind} for kind in kinds], 0])


@dataclass
class Owner:
    """Takes the steps as they come; `told` is what they were, in short."""

    stream: KvStream
    now_s: float = 0.0
    asks: deque[RequestReplay] = field(default_factory=deque)
    told: list[str] = field(default_factory=list)
    held: list[tuple[int, float | None]] = field(default_factory=list)  # number and time of applied batches

    def steps(self) -> list[Step]:
        """All that are due."""
        taken: list[Step] = []
        while (step := self.stream.next(self.now_s)) is not None:
            taken.append(step)
            if isinstance(step, RequestReplay):
                self.asks.append(step)
                self.told.append(f"ask {step.first}")
            elif isinstance(step, Apply):
                self.held.append((step.seq, step.batch.at_s))
                self.told.append(f"apply {step.seq}")
            elif isinstance(step, Clear):
                self.held.clear()
                self.told.append("clear")
            elif isinstance(step, Suspend | Resume):
                self.told.append(type(step).__name__.lower())
            else:
                assert isinstance(step, SetConfidence)
        return taken

    def live(self, *seqs: int, process: str = "A") -> None:
        """Batches of a process arrive."""
        for seq in seqs:
            self.stream.live(seq, batch(seq, process), self.now_s)
            self.steps()

    def replay(self, *seqs: int, process: str = "A", end: bool = True) -> None:
        """The replay asked for last is answered."""
        token = self.asks[-1].token
        for seq in seqs:
            self.stream.on_replay_batch(token, seq, batch(seq, process), self.now_s)
            self.steps()
        if end:
            self.stream.replay_ended(token, self.now_s)
            self.steps()

    def wait(self, elapsed_s: float) -> None:
        """Time passes."""
        self.now_s += elapsed_s
        self.stream.tick(self.now_s)
        self.steps()

    @property
    def state(self) -> tuple[Confidence, str]:
        """Grade and reason."""
        return self.stream.grade, self.stream.why

    @property
    def numbers(self) -> list[int]:
        """Of the batches that count."""
        return [seq for seq, _ in self.held]


def connected(*, replays: bool = True, limits: StreamLimits = LIMITS) -> Owner:
    """A stream whose connection came up."""
    owner = Owner(KvStream(replays, limits))
    owner.stream.on_connected(0.0)
    owner.steps()
    return owner


def exact(count: int = 3, limits: StreamLimits = LIMITS) -> Owner:
    """A stream that has batches 0 to count - 1, exactly."""
    owner = connected(limits=limits)
    owner.replay(*range(count))
    assert owner.state == (Confidence.EXACT, "joined at batch 0")
    owner.told.clear()
    return owner
