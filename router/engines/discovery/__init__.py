"""Sources of replicas. A discovery yields *complete sets*; only Fleet.replace compares them with the previous set.

static           replicas of the settings, and those added at run time
dns              addresses of a name
kubernetes       pods of namespaces, or members of InferencePools
informer         lists and watches of pods or pools
pods             selection of the pods that are replicas
known_stacks     serving stacks that are recognized by their pods' labels
pool_informer    one InferencePool and its pods
pools            decoded InferencePools
object_cache     decoded state of one list and watch
api_client       requests to the API server
combined_source  union of all discoveries
factory          the discovery that the settings name

To add a discovery: a file here with a class that has `source`, `watch` and `status`, its name in SOURCES, and a line in
factory.py (docs/extend/discovery.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from router.core.types.replicas import Replica


@dataclass(frozen=True, slots=True)
class Status:
    """State of a discovery's view of replicas."""

    fresh: bool  # False: the view is the last good one, which stays in use
    why: str = ""  # reason why it is not fresh, as text without secrets
    stale_s: float = 0.0  # seconds since it was fresh
    errors: int = 0  # failures of the source since the start
    replicas: int = 0  # ready replicas in the view


SOURCES = ("static", "kubernetes", "dns")
POOLS_MAX = 64  # InferencePools in the settings; each needs two watches


class Discovery(Protocol):
    """A source of replicas. `source` is its name in settings, logs and metrics."""

    source: str

    def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again at every change. A source that fails is retried forever. Until it
        succeeds, no set is yielded, so that the last good set stays in use."""

    def status(self) -> Status:
        """Return the current state of the view."""
