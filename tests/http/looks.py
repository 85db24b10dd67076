"""The limits of a listener, by a clock that a test sets: what the machine takes long for is nobody's slowness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.http.server import Server


class Looks:
    """A server that looks at its connections when it is told to, in a time of its own that stands still in between.

    It takes the place of the loop for what the server asks of one; all but the time and the sweep are the loop's.
    """

    def __init__(self, server: Server) -> None:
        self.now_s = server.loop.time()
        self._server, self._loop, self._sweep = server, server.loop, server._sweep
        self._over = asyncio.Event()
        server.loop = self  # type: ignore[assignment]  # stands for one
        self._end_sweeps()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        """The server's time."""
        return self.now_s

    def call_later(self, delay_s: float, what: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """As the loop does; the next sweep is the test's to make."""
        if what == self._sweep:
            self._over.set()
            delay_s = 86_400.0
        return self._loop.call_later(delay_s, what, *arguments)

    async def look(self, later_s: float = 0.0) -> None:
        """Have all connections looked at, so many seconds after the last look."""
        self.now_s += later_s
        self._over.clear()
        self._end_sweeps()
        self._sweep()
        await self._over.wait()

    def _end_sweeps(self) -> None:
        assert self._server._sweeper is not None
        self._server._sweeper.cancel()
