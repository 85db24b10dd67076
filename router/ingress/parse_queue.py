"""Order of long bodies on the one thread that parses them.

A body is read in several steps, and its request keeps the thread from the first to the last. A request that waits in
the meantime is a ticket of a fair queue (core/admission/queue.py) with the body's bytes as cost. Tenants take turns, so
a tenant that sends much delays only itself. The queue is bounded in requests, bytes and time. A refused request gets a
Retry-After.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from router.core.admission.queue import FairQueue, Pool, Ticket
from router.core.types.requests import Priority
from router.http.request import Refusal

REQUESTS_MAX = 4_096  # requests that wait for a turn
AGAIN_S = 1.0  # Retry-After of refused requests: the queue advances by many bodies a second

_THREAD: Pool = (None, None, False)  # there is one thread, so all tickets are of one pool


class ParseQueue:
    """Turns on one thread. `bytes_max` and `wait_s` may be replaced, for later requests."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.bytes_max = 0
        self.wait_s = 0.0
        self._clock = clock
        self._queue = FairQueue()
        self._taken = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait."""
        return self._queue.size_bytes

    async def take(self, tenant: str, priority: Priority, body_bytes: int) -> None:
        """Return when this request has its turn, which must be given back. A cancelled call has no turn. Raises Refusal
        if the queue is full, or the wait too long."""
        if not self._taken:
            self._taken = True
            return
        self._expire()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket = Ticket(tenant, priority, _THREAD, body_bytes, body_bytes, self._clock(), future)
        out = self._queue.add(ticket, REQUESTS_MAX, self.bytes_max)
        if out is None:
            raise _too_much()
        for other in out:
            _tell(other, False)
        try:
            turn = await future
        except asyncio.CancelledError:
            if not self._queue.remove(ticket) and future.done() and not future.cancelled() and future.result():
                self.give_back()  # the turn came at the last moment
            raise
        if not turn:
            raise _too_much()

    def give_back(self) -> None:
        """End the turn and start the next one."""
        self._expire()
        while (ticket := self._queue.turn(_anywhere, _nobody)) is not None:
            if _tell(ticket, True):
                return
        self._taken = False

    def _expire(self) -> None:
        for ticket in self._queue.remove_expired(self._clock() - self.wait_s):
            _tell(ticket, False)


def _tell(ticket: Ticket, turn: bool) -> bool:
    """Notify a waiting request of its turn or its refusal. False if it no longer waits."""
    future = cast("asyncio.Future[bool]", ticket.request)
    if future.done():
        return False
    future.set_result(turn)
    return True


def _anywhere(_: Pool) -> bool:
    return True


def _nobody(_: Pool, __: str) -> bool:
    return False


def _too_much() -> Refusal:
    message = "Too many long requests are waiting to be parsed; try again after the seconds of Retry-After."
    return Refusal(429, "overloaded", message, retry_after_s=AGAIN_S)
