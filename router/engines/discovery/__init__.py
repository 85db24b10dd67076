"""Where replicas come from. A discovery yields *complete sets*; only Fleet.replace compares them with what was there.

static      those in the settings, or added at run time
dns         addresses of a name
kubernetes  pods: pod_watch follows them, pods says which of them are replicas, stacks which are known by their labels;
            pool_watch and pools do so for InferencePools; objects is what a view keeps, api_client asks the API server
together    all discoveries as one
sources     the discovery that the settings name

To add one: a file here with a class that has `source`, `watch` and `status`, its name in
SOURCES, and a line in sources.py (docs/extend/discovery.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from router.core.facts.replicas import Replica


@dataclass(frozen=True, slots=True)
class Status:
    """How good a discovery's view of replicas is."""

    fresh: bool  # false: the view is the last good one, which stays in use
    why: str = ""  # why it is not fresh, for people, without secrets
    stale_s: float = 0.0  # seconds since it was fresh
    errors: int = 0  # failures of its source since the start
    replicas: int = 0  # ready replicas in the view


SOURCES = ("static", "kubernetes", "dns")
POOLS_MAX = 64  # InferencePools in the settings; each is two watches


class Discovery(Protocol):
    """A source of replicas. `source` is its name in settings, logs and metrics."""

    source: str

    def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again at every change. A source that fails is asked again, for ever;
        meanwhile nothing is yielded, so that the last good set stays in use."""

    def status(self) -> Status:
        """The view's state now."""
