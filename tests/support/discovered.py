"""A discovery that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.core.types.replicas import Replica
from router.engines.discovery import Status


class Told:
    """Yields what `say` was given; what was thrown in ends its watch."""

    def __init__(self, source: str = "told") -> None:
        self.source = source
        self.said: asyncio.Queue[frozenset[Replica] | Exception] = asyncio.Queue()
        self.now = Status(fresh=True)
        self.watches = self.closed = 0

    def say(self, *replicas: Replica) -> None:
        """A complete set."""
        self.said.put_nowait(frozenset(replicas))

    def status(self) -> Status:
        """See Discovery."""
        return self.now

    async def watch(self) -> AsyncIterator[frozenset[Replica]]:
        """See Discovery."""
        self.watches += 1
        try:
            while True:
                said = await self.said.get()
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            self.closed += 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The source of the next control plane that starts."""
    source = Told()
    monkeypatch.setattr("router.control.wiring.source_of", lambda _settings, *, split: source)
    return source
