"""First messages of streams: as many are read at once as have room if each is as long as any may be.

A gateway opens a stream to send the head of a request, which is there at once. Until it is there nobody knows how long
it is, nor whose it is, and gRPC holds all of it: so their number is limited, and those that come then wait for a turn.
A stream that brings nothing is cut after the time that a head may take, and much sooner while others wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

from router.gateway.messages import Messages

CROWDED_S = 1.0  # seconds that a stream may be without a head while others wait for their turn


class HeadTurns:
    """Whose first message is being read."""

    def __init__(self, bytes_max: int, message_bytes_max: int) -> None:
        """Room for first messages, at least for one, and the longest that each may be."""
        self.reading_max = max(1, bytes_max // message_bytes_max)
        self._turns = asyncio.Semaphore(self.reading_max)
        self._reading: dict[asyncio.Timeout, None] = {}  # the one that began first comes first

    @property
    def reading(self) -> int:
        """Streams whose first message is being read."""
        return len(self._reading)

    async def read(self, messages: Messages, timeout_s: float) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """The first message of a stream, or EOF. Raises TimeoutError, also where no turn came in time, and
        MalformedMessage."""
        if self._turns.locked():
            await self._wait(timeout_s)
        else:
            await self._turns.acquire()  # at once
        limit = asyncio.timeout(min(timeout_s, CROWDED_S) if self._turns.locked() else timeout_s)
        self._reading[limit] = None
        try:
            async with limit:
                return await messages.read()
        finally:
            del self._reading[limit]
            self._turns.release()

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a turn, and hurry those who have one."""
        soon_s = asyncio.get_running_loop().time() + CROWDED_S
        for limit in self._reading:
            when_s = limit.when()
            if when_s is not None and when_s > soon_s:
                limit.reschedule(soon_s)
        async with asyncio.timeout(timeout_s):
            await self._turns.acquire()
