"""Replicas from flags or the settings file, which can be reloaded, and those added at run time.

A replica that leaves the settings is removed at once, unless others are added at the same time, which are not ready
before their first probe. The leaving replicas then stay while they serve a model that no remaining or new ready replica
serves, for `kept_s` at most. Settings that replace all replicas therefore leave no request without a replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import suppress

from router.core.types.replicas import Replica
from router.engines.discovery import Status

log = logging.getLogger(__name__)

LOOK_S = 0.1  # interval of checks of the replicas that leave


class StaticDiscovery:
    """Replicas of the settings and those added at run time."""

    source = "static"

    def __init__(
        self,
        urls: Iterable[str],
        *,
        alone: Callable[[Collection[str]], set[str]] = lambda _: set(),
        kept_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`alone(urls)` returns those that serve a model that no other ready replica serves (Fleet.serving_alone)."""
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._alone, self._kept_s, self._clock = alone, kept_s, clock
        self._leaving: dict[str, float] = {}  # URL -> time at which it is removed in any case
        self.added: set[str] = set()
        self._changed = asyncio.Event()

    def __contains__(self, url: str) -> bool:
        return url in self._urls or url in self.added

    def is_added(self, replica: str) -> bool:
        """True if this replica, by its id, was added at run time."""
        return Replica(replica).url in self.added

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
        now, before = frozenset(url.rstrip("/") for url in urls), self._urls
        if now - before - self.added - self._leaving.keys():
            self._leaving |= dict.fromkeys(before - now - self.added, self._clock() + self._kept_s)
        self._urls = now
        self._changed.set()

    def status(self) -> Status:
        """Return the view's state, which is always fresh."""
        return Status(fresh=True, replicas=len(self._urls | self.added))

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """Yield the complete set now, and again whenever it changes."""
        given: frozenset[str] | None = None
        while True:
            self._changed.clear()
            self._let_go()
            urls = self._urls | self.added | self._leaving.keys()
            if urls != given:
                given = urls
                yield frozenset(map(Replica, urls))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._leaving else None):
                    await self._changed.wait()

    def _let_go(self) -> None:
        """Remove the leaving replicas that are no longer needed, that are back in the settings, or that are past their
        time limit."""
        if not self._leaving:
            return
        leaving = {url: until_s for url, until_s in self._leaving.items() if url not in self}
        alone, now_s = self._alone(leaving.keys()), self._clock()
        self._leaving = {url: until_s for url, until_s in leaving.items() if url in alone and now_s < until_s}
        if lost := sorted(alone - self._leaving.keys()):
            fields = {"replicas": lost, "after_s": self._kept_s}
            text = "replicas were removed from the settings, and no new one is ready to serve their models"
            log.warning(text, extra={"event": "left_unreplaced", "fields": fields})
