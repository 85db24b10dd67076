"""Publisher: schedule and content of this router's messages to all others. A message has the core's part and the other
shared data.

No task runs for it. A timer of the loop is set for the next message, and set again if an event makes a message due
sooner. A task would be woken for each message in addition (resp_protocol.py has the measured cost).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from router.peering.frames import OWNERS_MAX, PeerFrame, pack_frame
from router.peering.interfaces import CoreSync, SharedStateSync
from router.peering.message_auth import Seals
from router.peering.message_receiver import PeerSubscriber
from router.peering.session import ResponseOwnerEntry, Session
from router.peering.snapshot_transfer import SnapshotTransfer

HEARTBEAT_S = (
    0.251  # longest time between two messages: the core publishes everything every 250 ms, and timers may be early
)
REGULAR_S = 0.051  # between two messages while anything changes: the core publishes every 50 ms; timers may be early
URGENT_GAP_S = 0.011  # shortest time between two urgent messages: the core publishes none within 10 ms
URGENT_GAP_PER_ROUTER_S = 0.0025  # the same for each router that receives them, if that is longer
# Longest time by which a message may go out too early. Timers of uvloop are set to the nearest millisecond. An
# iteration of the loop that finds no message due is one more wake-up.
EARLY_S = 0.0009


class PeerPublisher:
    """Publishes the messages of one router, in one session after another."""

    def __init__(
        self,
        core: CoreSync,
        side: SharedStateSync,
        hearing: PeerSubscriber,
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
        """`routers` returns the number of routers that receive each message. Of the owners that wait to be published,
        the newest `owners_max` are kept."""
        self._core, self._side, self._hearing, self._counts = core, side, hearing, counts
        self._name, self._origin, self._routers, self._clock = name, origin, routers, clock
        self._seals, self._wall = seals, wall
        self.handing: SnapshotTransfer | None = None
        self._news: deque[ResponseOwnerEntry] = deque(maxlen=owners_max)  # owners that are not published yet
        # Owners in published messages that this router has not received back yet, with the times of these messages.
        self._unheard: deque[tuple[float, ResponseOwnerEntry]] = deque(maxlen=owners_max)
        self._urgent = self._changed = False  # since the last message
        self._telling = False  # the handover has data to publish
        self._begin = True  # True if the next message has all data, and requests the same from others
        self._said_s = self._asked_s = float("-inf")  # time of the last message; time of the last call of the core
        self._session: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # time for which it is set
        self._leaving = False  # no message is sent any more, in any session
        self._busy = False  # a message is being made: it is followed by a new plan, which covers events in the meantime
        self._failed: asyncio.Future[None] | None = None

    # -- events from the path of requests ------------------------------------------------------------------------------

    def publish_response_owner(self, owner: ResponseOwnerEntry) -> None:
        """Publish the owner of a new stored response at once."""
        self._news.append(owner)
        self._plan()

    def schedule(self) -> None:
        """Publish the next message before its regular time."""
        self._telling = True
        self._plan()

    def urgent(self) -> None:
        """The core has urgent data to publish."""
        self._urgent = True
        self._plan()

    def on_changed(self) -> None:
        """The core has data to publish."""
        self._changed = True
        self._plan()

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def run(self, session: Session) -> None:
        """Publish all due data, until cancelled. Raises StoreFailed."""
        self._begin = True
        # Data published in a failed session, but not received back, is published again: perhaps no router received it.
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
                # asyncio logs an exception that was never retrieved, for example if `say` is cancelled
                failed.exception()

    def leave(self) -> None:
        """Stop publishing: a message after the goodbye would make others count this router again."""
        self._leaving = True
        self._stop()

    def _stop(self) -> None:
        self._session = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_own_echo(self, own_s: float) -> None:
        """Confirm messages: this router has received its own message of that time."""
        while self._unheard and self._unheard[0][0] <= own_s:
            self._unheard.popleft()

    def flush_requested(self) -> None:
        """Publish data at once if another router requested it."""
        if self._hearing.asked:
            self._plan()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Set the timer for the next message, unless it is already set for an earlier time."""
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
        """Return the time for another message, or for the next call of the core."""
        if self._news or self._hearing.asked or self._telling:
            return self._clock()
        if self._urgent:
            gap_s = min(REGULAR_S, max(URGENT_GAP_S, URGENT_GAP_PER_ROUTER_S * self._routers()))
        else:
            gap_s = REGULAR_S if self._changed else HEARTBEAT_S
        return max(self._said_s, self._asked_s - gap_s / 2) + gap_s

    def _turn(self) -> None:
        """Publish a message if it is still due, and set the timer again."""
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
        core = self._core_message(now_s)
        told = self._news or self._begin or self._hearing.asked or self._telling
        if core is not None or told or now_s - self._said_s >= HEARTBEAT_S - EARLY_S:
            self._telling = False
            message = self._next(core or b"", now_s)
            session.publish(message)
            self._counts["said"] += 1
            self._counts["said_bytes"] += len(message)
            self._said_s = now_s

    def _core_message(self, now_s: float) -> bytes | None:
        """Return the core's next message. If it is too soon for one, the core's events stay pending. Data that the core
        leaves out of this message is reported by a new event."""
        urgent, changed = self._urgent, self._changed
        self._urgent = self._changed = False
        core = self._core.say(now_s)
        if core is None:
            self._urgent, self._changed = self._urgent or urgent, self._changed or changed
        return core

    def _next(self, core: bytes, now_s: float) -> bytes:
        """Return the next message, with owners that are not published yet."""
        everything = self._begin or self._hearing.asked
        frame = PeerFrame(name=self._name, begun=self._begin, core=core)
        frame.asks = self.handing.asks if self.handing is not None else None
        self._side.fill_frame(frame, everything=everything)
        frame.owners = [self._news.popleft() for _ in range(min(OWNERS_MAX, len(self._news)))]
        self._unheard.extend((now_s, owner) for owner in frame.owners)
        self._begin = self._hearing.asked = False
        return self._seals.seal(pack_frame(frame, self._origin, now_s), self._wall())
