"""Replicas from flags or the settings file, others when that is read again, and those added at run time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from router.core.facts.replicas import Replica
from router.engines.discovery import Status


class StaticDiscovery:
    """Yields the set of both, and again whenever it changes."""

    source = "static"

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self.added: set[str] = set()
        self._changed = asyncio.Event()

    def __contains__(self, url: str) -> bool:
        return url in self._urls or url in self.added

    def add(self, url: str) -> None:
        """One more; without a slash at its end."""
        self.added.add(url)
        self._changed.set()

    def remove(self, url: str) -> None:
        """One that was added."""
        self.added.discard(url)
        self._changed.set()

    def replace(self, urls: Iterable[str]) -> None:
        """These from now on, in the place of those of the settings."""
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._changed.set()

    def status(self) -> Status:
        """Always true: what is listed is what there is."""
        return Status(fresh=True, replicas=len(self._urls | self.added))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """The complete set, and again whenever it changes."""
        while True:
            self._changed.clear()
            yield frozenset(map(Replica, self._urls | self.added))
            await self._changed.wait()
