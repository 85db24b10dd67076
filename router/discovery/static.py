"""A fixed list of replicas, from flags or the settings file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from router.core.facts import Replica


@dataclass(frozen=True, slots=True)
class StaticDiscovery:
    """Yields its one set and ends."""

    urls: tuple[str, ...]

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """One complete set."""
        yield frozenset(Replica(url.rstrip("/")) for url in self.urls)
