"""What is to be sent to one replica, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.core.facts.placements import Usage
from router.prewarm.prefixes import Prefix

ERRORS_MAX = 10  # told of one job


class Why(StrEnum):
    """What a replica is warmed for."""

    JOINED = "joined"
    RESTARTED = "restarted"
    ASKED = "asked"


class JobState(StrEnum):
    """How far a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # something was sent in vain, or time was up


@dataclass(slots=True)
class Job:
    """One replica's. `prefixes` are sent after those of the file, if that is wanted, and before `templates`."""

    replica: str
    why: Why
    tokens_max: int
    templates: int
    file: str = ""
    prefixes: tuple[Prefix, ...] = ()
    call: int = 0  # number of the call that asked for it
    state: JobState = JobState.WAITING
    sent: int = 0
    skipped: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, as far as the engine tells
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def took(self, usage: Usage) -> None:
        """A prompt was sent."""
        self.sent += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens or 0

    def trouble(self, why: str) -> None:
        """Something was not as it should be; each kind is told once."""
        if why not in self.errors and len(self.errors) < ERRORS_MAX:
            self.errors.append(why)

    def row(self) -> dict[str, Any]:
        """As the page and the log show it."""
        return {
            "replica": self.replica,
            "why": self.why,
            "state": self.state,
            "sent": self.sent,
            "skipped": self.skipped,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": round(self.seconds, 3),
            "errors": list(self.errors),
        }
