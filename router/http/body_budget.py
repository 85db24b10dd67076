"""Memory budget for all request bodies that a process holds: arriving, being parsed, waiting, and in flight at engines.

A body counts from the end of its head until its answer begins, by the length that its head announces. A body that was
admitted can therefore be read to its end. Many long bodies that arrive at once are read one after the other, instead of
all in part.

The largest holder is the first that must wait. A holder (a tenant, or an address if there are no keys) may hold SHARE
times as much as is left free. A single holder may thus take four fifths of the budget, and two may take four ninths
each. Some memory is always left for a newcomer. This is the dynamic threshold by which switches share their memory
(Choudhury and Hahne, 1998).

A body that does not fit is not read. Bytes that were read before this was known are overdraft, and count too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.request import BodyReservation, Refusal

SHARE = 4  # limit of a holder, as a multiple of the free bytes; a smaller one leaves more unused for newcomers


class BodyBudget:
    """Memory budget of one process, on one event loop."""

    __slots__ = ("_loop", "_of_holder", "_waiting", "_waking", "bytes_max", "held_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self._loop = loop
        self.bytes_max = bytes_max  # may be replaced at any time
        self.held_bytes = 0
        self._of_holder: dict[str, int] = {}
        self._waiting: dict[BodyReservation, Callable[[], None]] = {}  # first come, first served
        self._waking = False

    @property
    def overdrawn(self) -> bool:
        """True if more bytes are held than the limit allows."""
        return self.held_bytes > self.bytes_max

    def take(self, share: BodyReservation, body_bytes: int) -> bool:
        """Reserve `body_bytes` in total for a body, in the name of its holder. Return False, and change nothing, if
        they do not fit."""
        more_bytes, free_bytes = body_bytes - share.held_bytes, self.bytes_max - self.held_bytes
        if more_bytes > 0 and (
            more_bytes > free_bytes or self._of_holder.get(share.budget_owner, 0) + more_bytes > SHARE * free_bytes
        ):
            return False
        self._hold(share, more_bytes)
        return True

    def overdraw(self, share: BodyReservation, body_bytes: int) -> None:
        """Reserve at least `body_bytes` for a body regardless of the limit, because these bytes have already been
        read."""
        if body_bytes > share.held_bytes:
            self._hold(share, body_bytes - share.held_bytes)

    def give_back(self, share: BodyReservation) -> None:
        """Release all bytes of a body, and remove it from the waiting bodies."""
        if self._waiting:
            self._waiting.pop(share, None)
        if share.held_bytes:
            self._hold(share, -share.held_bytes)

    def wait(self, share: BodyReservation, ask_again: Callable[[], None]) -> None:
        """Call `ask_again` whenever more of a body may fit, until `go` or `give_back`."""
        self._waiting[share] = ask_again

    def on_budget_freed(self, share: BodyReservation) -> None:
        """Remove the body from the waiting bodies."""
        self._waiting.pop(share, None)

    def _hold(self, share: BodyReservation, more_bytes: int) -> None:
        of_holder, holder = self._of_holder, share.budget_owner
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
        """Let the waiting bodies retry in their order, once for all releases of one turn of the loop."""
        self._waking = False
        for ask_again in list(self._waiting.values()):
            ask_again()


def no_room() -> Refusal:
    """Return the refusal of a request with a body that does not fit."""
    message = "The limit of buffered request bodies is reached; try again after the seconds of Retry-After."
    return Refusal(503, "bodies_full", message)
