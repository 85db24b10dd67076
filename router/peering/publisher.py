"""Publisher: schedule and content of this router's messages to all others. A message has the core's part and the other
shared data.

One message is under way at a time, so that they are in the stream in the order of their numbers. If the store's answer
does not come, the same message is added again in the next session, and its copy is ignored by its number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from router.peering.frames import PeerFrame, StateMark, pack_frame
from router.peering.interfaces import CoreSync, SharedStateSync
from router.peering.message_auth import MESSAGE, STATE, Seals
from router.peering.session import ZERO_ID, Session, StreamId
from router.peering.store_clock import StoreClock

HEARTBEAT_S = 0.251  # longest time between two messages; timers may be early
REGULAR_S = 0.051  # between two messages while anything changes: the core publishes every 50 ms; timers may be early
URGENT_GAP_S = 0.011  # shortest time between two urgent messages: the core publishes none within 10 ms
URGENT_GAP_PER_ROUTER_S = 0.0025  # the same for each router that receives them, if that is longer
# Longest time by which a message may go out too early. Timers of uvloop are set to the nearest millisecond. An
# iteration of the loop that finds no message due is one more wake-up.
EARLY_S = 0.0009


class PeerPublisher:
    """Publishes the messages of one router, in one session after another, and encodes its state."""

    def __init__(
        self,
        core: CoreSync,
        side: SharedStateSync,
        counts: Counter[str],
        *,
        name: str,
        origin: int,
        routers: Callable[[], int],
        clock: Callable[[], float],
        store_clock: StoreClock,
        seals: Seals,
        wall: Callable[[], float],
    ) -> None:
        """`routers` returns the number of routers that receive each message."""
        self._core, self._side, self._counts = core, side, counts
        self._name, self._origin, self._routers, self._clock = name, origin, routers, clock
        self._store_clock, self._seals, self._wall = store_clock, seals, wall
        self._urgent = self._changed = False  # since the last message
        self._asks = ""  # router from which the next message requests a snapshot
        self._seq = 0  # number of the last message that the store has taken
        self._at = ZERO_ID  # its id
        self._pending: PeerFrame | None = None  # a message that the store has not taken
        self._said_s = self._asked_s = float("-inf")  # time of the last message; time of the last call of the core
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # time for which it is set
        self._open = False  # True in a session
        self._leaving = False  # the next message is the last one, in any session
        self._sending = asyncio.Lock()

    # -- events from the path of requests ------------------------------------------------------------------------------

    def ask(self, router: str) -> None:
        """Request the snapshot of a router, with a message before its regular time."""
        self._asks = router
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

    async def begin(self, session: Session) -> StreamId:
        """Publish the first message of a session. Returns its id. Raises StoreFailed."""
        if self._pending is None:
            self._pending = self._next(b"", everything=True)
        await self._send(session, self._pending)
        return self._at

    async def run(self, session: Session) -> None:
        """Publish all due data, until cancelled. Raises StoreFailed."""
        self._open = True
        try:
            while True:
                self._due.clear()
                self._plan()
                await self._due.wait()
                self._timer = None
                if not self._leaving and self._due_s() <= self._clock() + EARLY_S:
                    self._pending = self._compose()
                    if self._pending is not None:
                        await self._send(session, self._pending)
        finally:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def leave(self, session: Session) -> None:
        """Publish the last message: a message after it would make others count this router again. Raises
        StoreFailed."""
        self._leaving = True
        await self._send(session, PeerFrame(name=self._name, leaving=True))

    def state(self) -> bytes:
        """Encode the complete state of this router."""
        now_s = self._clock()
        frame = PeerFrame(name=self._name, core=self._core.state(now_s))
        frame.state = StateMark(*self._at, self._store_clock.store_s(now_s))
        self._side.fill_frame(frame, everything=True)
        return self._seals.seal(STATE, pack_frame(frame, self._origin, self._seq, now_s), self._wall())

    # -- messages ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Set the timer for the next message, unless it is already set for an earlier time."""
        if not self._open or self._due.is_set():
            return
        due_s = self._due_s()
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        left_s = max(0.0, due_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(left_s + EARLY_S / 2, self._due.set)
        self._timer_s = due_s

    def _due_s(self) -> float:
        """Return the time for another message, or for the next call of the core."""
        if self._asks:
            return self._clock()
        if self._urgent:
            gap_s = min(REGULAR_S, max(URGENT_GAP_S, URGENT_GAP_PER_ROUTER_S * self._routers()))
        else:
            gap_s = REGULAR_S if self._changed else HEARTBEAT_S
        return max(self._said_s, self._asked_s - gap_s / 2) + gap_s

    def _compose(self) -> PeerFrame | None:
        """Return the next message; None if it is too soon for one. Then the core's events stay pending. Data that the
        core leaves out of this message is reported by a new event."""
        now_s = self._asked_s = self._clock()
        urgent, changed = self._urgent, self._changed
        self._urgent = self._changed = False
        core = self._core.say(now_s)
        if core is None:
            self._urgent, self._changed = self._urgent or urgent, self._changed or changed
            if not self._asks and now_s - self._said_s < HEARTBEAT_S - EARLY_S:
                return None
        self._said_s = now_s
        return self._next(core or b"", everything=False)

    def _next(self, core: bytes, *, everything: bool) -> PeerFrame:
        frame = PeerFrame(name=self._name, core=core, asks=self._asks)
        self._asks = ""
        self._side.fill_frame(frame, everything=everything)
        return frame

    async def _send(self, session: Session, frame: PeerFrame) -> None:
        """Add a message to the stream. Its time is that of this attempt."""
        async with self._sending:
            now_s = self._clock()
            message = self._seals.seal(MESSAGE, pack_frame(frame, self._origin, self._seq + 1, now_s), self._wall())
            self._at = await session.add(message)
            self._store_clock.note_reply(now_s, self._clock(), self._at[0])
            self._seq += 1
            self._pending = None
            self._counts["said"] += 1
            self._counts["said_bytes"] += len(message)
