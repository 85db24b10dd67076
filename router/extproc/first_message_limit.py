"""Limits the number of first messages that are read at a time, to as many as fit into memory at maximum length.

A gateway opens a stream to send the head of a request, which is available at once. Its length and tenant are unknown
until it has arrived, and gRPC buffers all of it. The number of such streams is therefore limited, and later ones wait
for a turn. A stream without a message is cut after the time limit of a head, and much sooner while others wait.
"""

from __future__ import annotations

import asyncio
from typing import Any

from router.extproc.stream_messages import Messages

CROWDED_S = 1.0  # seconds that a stream may be without a head while other streams wait for a turn


class HeadTurns:
    """Semaphore over the streams with a first message that is being read."""

    def __init__(self, bytes_max: int, message_bytes_max: int) -> None:
        """`bytes_max`: memory for first messages; at least one is always read. `message_bytes_max`: maximum length of
        each."""
        self.reading_max = max(1, bytes_max // message_bytes_max)
        self._turns = asyncio.Semaphore(self.reading_max)
        self._reading: dict[asyncio.Timeout, None] = {}  # in the order in which they began

    @property
    def reading(self) -> int:
        """Number of streams with a first message that is being read."""
        return len(self._reading)

    async def read(self, messages: Messages, timeout_s: float) -> Any:  # noqa: ANN401 - a message, or grpc.aio.EOF
        """Return the first message of a stream, or EOF. Raises TimeoutError, also if no turn came in time, and
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
        """Wait for a turn, and shorten the time limits of the streams that hold one."""
        soon_s = asyncio.get_running_loop().time() + CROWDED_S
        for limit in self._reading:
            when_s = limit.when()
            if when_s is not None and when_s > soon_s:
                limit.reschedule(soon_s)
        async with asyncio.timeout(timeout_s):
            await self._turns.acquire()
