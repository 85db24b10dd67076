"""Where replicas come from. A discovery yields *complete sets*; one place (Fleet.replace) does the only diff.

together.py makes one of all. To add one: a file here with a class that has `source`, `watch` and `status`, its name in
SOURCES, and a line in sources.py (docs/extend/discovery.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from router.core.facts.replicas import Replica


@dataclass(frozen=True, slots=True)
class Status:
    """What a discovery knows of its own view."""

    fresh: bool  # whether it may be taken for the truth; if not, it is the last good one, and is used all the same
    why: str = ""  # it is not: in words for people, without secrets
    stale_s: float = 0.0  # for so many seconds
    errors: int = 0  # times that its source failed, since the start
    replicas: int = 0  # in the view, and ready


SOURCES = ("static", "kubernetes", "dns")


class Discovery(Protocol):
    """A source of replicas. `source` is its name in settings, logs and metrics."""

    source: str

    def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """The complete set now, and again at every change. A source that fails is asked again, for ever; meanwhile
        nothing is yielded, so the last good set stays in use."""

    def status(self) -> Status:
        """As of now."""
