"""When this router says something to all others, and what: the core's message, and what is shared besides.

No task runs for it: a timer of the loop is set for the next message, and anew where something happens that had better
be said sooner. A task would be woken for each message besides (wire.py has what that took).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from router.sharing.frames import OWNERS_MAX, Frame, packed
from router.sharing.handing import Handing
from router.sharing.hearing import Hearing
from router.sharing.seals import Seals
from router.sharing.session import Session, Written
from router.sharing.sides import CoreSharing, StoreSide

BEAT_S = 0.251  # longest time between two messages: the core tells everything every 250 ms, and timers may be early
REGULAR_S = 0.051  # between two messages while anything changes: the core says something every 50 ms; likewise
URGENT_GAP_S = 0.011  # shortest time between two messages of what is urgent: the core says none within 10 ms
URGENT_GAP_PER_ROUTER_S = 0.0025  # the same for each router that hears them, where that is longer
# Longest time by which a message may go out too early. Timers of uvloop are set to the nearest millisecond, and a turn
# of the loop that finds a message not due yet is one more wake.
EARLY_S = 0.0009


class Saying:
    """What one router says, in one session after another."""

    def __init__(
        self,
        core: CoreSharing,
        side: StoreSide,
        hearing: Hearing,
        counts: Counter[str],
        *,
        name: str,
        origin: int,
        owners_max: int,
        routers: Callable[[], int],
        clock: Callable[[], float],
        seals: Seals,
        wall: Callable[[], float],
    ) -> None:
        """`routers` is how many hear each message; of owners that wait to be told the newest `owners_max` are kept."""
        self._core, self._side, self._hearing, self._counts = core, side, hearing, counts
        self._name, self._origin, self._routers, self._clock = name, origin, routers, clock
        self._seals, self._wall = seals, wall
        self.handing: Handing | None = None
        self._news: deque[Written] = deque(maxlen=owners_max)  # owners that others were not told of
        # Owners that others were told of in messages that this router has not heard yet, with the times of these.
        self._unheard: deque[tuple[float, Written]] = deque(maxlen=owners_max)
        self._urgent = self._changed = False  # since the last message
        self._telling = False  # something of the handing over is to be said
        self._begin = True  # whether the next message says everything, and asks others to do so
        self._said_s = self._asked_s = float("-inf")  # time of the last message; at which the core was last asked
        self._session: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # time for which it is set
        self._leaving = False  # nothing is said any more, in no session
        self._busy = False  # a message is being made: what is told meanwhile is seen behind it
        self._failed: asyncio.Future[None] | None = None

    # -- what there is to say, from the path of requests ---------------------------------------------------------------

    def made(self, owner: Written) -> None:
        """A stored response was made: others are told at once."""
        self._news.append(owner)
        self._plan()

    def soon(self) -> None:
        """Something had better be said before it is time."""
        self._telling = True
        self._plan()

    def urgent(self) -> None:
        """The core has something to say that had better not wait."""
        self._urgent = True
        self._plan()

    def changed(self) -> None:
        """The core has something to say."""
        self._changed = True
        self._plan()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def say(self, session: Session) -> None:
        """Say what there is, until cancelled. Raises StoreFailed."""
        self._begin = True
        # What was said to a session that has failed, and was not heard, is news again: nobody may have heard it.
        self._news = deque([*(owner for _, owner in self._unheard), *self._news], self._news.maxlen)
        self._unheard.clear()
        self._said_s = self._asked_s = float("-inf")
        self._session = None if self._leaving else session
        self._failed = failed = asyncio.get_running_loop().create_future()
        try:
            self._turn()
            await failed
        finally:
            self._stop()
            if not failed.cancelled() and failed.done():
                failed.exception()  # asyncio logs an exception that nobody has asked for, as where `say` is cancelled

    def leave(self) -> None:
        """Say nothing any more: a message behind the goodbye would make others count this router again."""
        self._leaving = True
        self._stop()

    def _stop(self) -> None:
        self._session = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self, own_s: float) -> None:
        """What was said at that time has reached its own router."""
        while self._unheard and self._unheard[0][0] <= own_s:
            self._unheard.popleft()

    def answer(self) -> None:
        """Another router was heard: say at once what it may have asked for."""
        if self._hearing.asked:
            self._plan()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Set the timer for the next message, unless it is set for as soon already."""
        if self._session is None or self._busy:
            return
        due_s = self._due_s()
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        left_s = max(0.0, due_s - self._clock())
        self._timer, self._timer_s = asyncio.get_running_loop().call_later(left_s + EARLY_S / 2, self._turn), due_s

    def _due_s(self) -> float:
        """Time for another message, or for the core to be asked for one."""
        if self._news or self._hearing.asked or self._telling:
            return self._clock()
        if self._urgent:
            gap_s = min(REGULAR_S, max(URGENT_GAP_S, URGENT_GAP_PER_ROUTER_S * self._routers()))
        else:
            gap_s = REGULAR_S if self._changed else BEAT_S
        return max(self._said_s, self._asked_s - gap_s / 2) + gap_s

    def _turn(self) -> None:
        """Say something, where it is still time for it, and set the timer anew."""
        self._timer = None
        session, failed = self._session, self._failed
        if session is None or failed is None:
            return
        self._busy = True
        try:
            if self._due_s() <= self._clock() + EARLY_S:
                self._say(session)
        except Exception as error:
            self._stop()
            if not failed.done():
                failed.set_exception(error)
        finally:
            self._busy = False
        self._plan()

    def _say(self, session: Session) -> None:
        now_s = self._asked_s = self._clock()
        core = self._of_core(now_s)
        told = self._news or self._begin or self._hearing.asked or self._telling
        if core is not None or told or now_s - self._said_s >= BEAT_S - EARLY_S:
            self._telling = False
            message = self._next(core or b"", now_s)
            session.say(message)
            self._counts["said"] += 1
            self._counts["said_bytes"] += len(message)
            self._said_s = now_s

    def _of_core(self, now_s: float) -> bytes | None:
        """The core's next message. Where it is too soon for one, what the core had to say it still has to say; and what
        it does not say in this message is news from then on."""
        urgent, changed = self._urgent, self._changed
        self._urgent = self._changed = False
        core = self._core.say(now_s)
        if core is None:
            self._urgent, self._changed = self._urgent or urgent, self._changed or changed
        return core

    def _next(self, core: bytes, now_s: float) -> bytes:
        """The next message, with owners that were not told yet."""
        everything = self._begin or self._hearing.asked
        frame = Frame(name=self._name, begun=self._begin, core=core)
        frame.asks = self.handing.asks if self.handing is not None else None
        self._side.add_to(frame, everything=everything)
        frame.owners = [self._news.popleft() for _ in range(min(OWNERS_MAX, len(self._news)))]
        self._unheard.extend((now_s, owner) for owner in frame.owners)
        self._begin = self._hearing.asked = False
        return self._seals.sealed(packed(frame, self._origin, now_s), self._wall())
