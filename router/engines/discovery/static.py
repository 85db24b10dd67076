"""Replicas from flags or the settings file, which may be read again, and those added at run time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from router.core.facts.replicas import Replica
from router.engines.discovery import Status


class StaticDiscovery:
    """Replicas of the settings and those added at run time."""

    source = "static"

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self.added: set[str] = set()
        self._changed = asyncio.Event()

    def __contains__(self, url: str) -> bool:
        return url in self._urls or url in self.added

    def add(self, url: str) -> None:
        """Add a replica by its URL, without a trailing slash."""
        self.added.add(url)
        self._changed.set()

    def remove(self, url: str) -> None:
        """Remove a replica that was added."""
        self.added.discard(url)
        self._changed.set()

    def replace(self, urls: Iterable[str]) -> None:
        """Replace the replicas of the settings."""
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._changed.set()

    def status(self) -> Status:
        """The view's state: it is always fresh."""
        return Status(fresh=True, replicas=len(self._urls | self.added))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again whenever it changes."""
        while True:
            self._changed.clear()
            yield frozenset(map(Replica, self._urls | self.added))
            await self._changed.wait()
