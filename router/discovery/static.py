"""A list of replicas, from flags or the settings file; another one when the settings are read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from router.core.facts import Replica


class StaticDiscovery:
    """Yields its set, and again whenever it is replaced."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._changed = asyncio.Event()

    def replace(self, urls: Iterable[str]) -> None:
        """These from now on."""
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """The complete set, and again whenever it changes."""
        while True:
            self._changed.clear()
            yield frozenset(map(Replica, self._urls))
            await self._changed.wait()
