"""Job: the prompts for one replica, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.core.types.placements import Usage
from router.prewarm.prefixes import WarmupPrompt

ERRORS_MAX = 10  # errors shown per job


class WarmupReason(StrEnum):
    """Reason for warming a replica."""

    JOINED = "joined"
    RESTARTED = "restarted"
    ASKED = "asked"


class JobState(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # a request failed, or time was up


@dataclass(slots=True)
class WarmupJob:
    """Job for one replica. Prompts of the file are sent first, then `prefixes`, then `templates`."""

    replica: str
    why: WarmupReason
    tokens_max: int
    templates: int
    file: str = ""
    prefixes: tuple[WarmupPrompt, ...] = ()
    call: int = 0  # number of the call that requested it; 0 for no call
    state: JobState = JobState.WAITING
    sent: int = 0
    skipped: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were cached, if the engine reports that
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def record_prompt(self, usage: Usage) -> None:
        """Count a prompt that was sent."""
        self.sent += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens or 0

    def record_error(self, why: str) -> None:
        """Record an error, each kind once."""
        if why not in self.errors and len(self.errors) < ERRORS_MAX:
            self.errors.append(why)

    def row(self) -> dict[str, Any]:
        """Return the job as the page and the log show it."""
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
