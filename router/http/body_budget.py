"""One budget for all bytes of request bodies that a process holds: arriving, being parsed, waiting, and with engines.

A body counts from the end of its head, by the length that its head announces, until its answer begins: what was begun
can be read to its end, and many long bodies that come at once are taken one after the other instead of all in part.
Who holds most is the first to be told to wait: a holder (a tenant, or an address where there are no keys) may hold
SHARE times as much as is left free. So one alone may take four fifths of the budget, two four ninths each, and there is
always room for whoever comes next. This is the dynamic threshold by which switches share their memory (Choudhury and
Hahne, 1998).

A body for which there is no room is not read. Bytes that were read before that was known are owed: they count, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.request import BodyShare, Refusal

SHARE = 4  # how many times as much as is left free a holder may have; the less, the more stays unused for newcomers


class BodyBudget:
    """The budget of one process, on one event loop."""

    __slots__ = ("_loop", "_of_holder", "_waiting", "_waking", "bytes_max", "held_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self._loop = loop
        self.bytes_max = bytes_max  # may be replaced at any time
        self.held_bytes = 0
        self._of_holder: dict[str, int] = {}
        self._waiting: dict[BodyShare, Callable[[], None]] = {}  # first come, first served
        self._waking = False

    @property
    def overdrawn(self) -> bool:
        """Whether more is held than may be."""
        return self.held_bytes > self.bytes_max

    def take(self, share: BodyShare, body_bytes: int) -> bool:
        """Hold so many bytes for a body in all, in the name of its holder. False, and nothing has changed,
        where there is no room."""
        more_bytes, free_bytes = body_bytes - share.held_bytes, self.bytes_max - self.held_bytes
        if more_bytes > 0 and (
            more_bytes > free_bytes or self._of_holder.get(share.holder, 0) + more_bytes > SHARE * free_bytes
        ):
            return False
        self._hold(share, more_bytes)
        return True

    def owe(self, share: BodyShare, body_bytes: int) -> None:
        """Hold at least so many bytes for a body, room or not: they are here already."""
        if body_bytes > share.held_bytes:
            self._hold(share, body_bytes - share.held_bytes)

    def give_back(self, share: BodyShare) -> None:
        """Nothing of a body is held any more. It waits no longer, either."""
        if self._waiting:
            self._waiting.pop(share, None)
        if share.held_bytes:
            self._hold(share, -share.held_bytes)

    def wait(self, share: BodyShare, ask_again: Callable[[], None]) -> None:
        """Call `ask_again` whenever there may be room for more of a body, until `go` or `give_back`."""
        self._waiting[share] = ask_again

    def go(self, share: BodyShare) -> None:
        """The body waits no longer."""
        self._waiting.pop(share, None)

    def _hold(self, share: BodyShare, more_bytes: int) -> None:
        of_holder, holder = self._of_holder, share.holder
        share.held_bytes += more_bytes
        self.held_bytes += more_bytes
        left_bytes = of_holder.get(holder, 0) + more_bytes
        if left_bytes:
            of_holder[holder] = left_bytes
        else:
            of_holder.pop(holder, None)
        if more_bytes < 0 and self._waiting and not self._waking:
            self._waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Let those that wait ask again, in their order, all of one turn of the loop together."""
        self._waking = False
        for ask_again in list(self._waiting.values()):
            ask_again()


def no_room() -> Refusal:
    """The refusal of a request for whose body there is no room."""
    message = "The router holds as many bytes of request bodies as it may; try again after the seconds of Retry-After."
    return Refusal(503, "bodies_full", message)
