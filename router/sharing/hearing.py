"""What is heard from other routers, and where each part of a message goes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from router.sharing.frames import BadFrame, Frame, frame_of, head_of
from router.sharing.peers import HeardRouters
from router.sharing.seals import NotSealed, Seals
from router.sharing.sides import CoreSharing, StoreSide

log = logging.getLogger(__name__)

REFUSED_EVERY_S = 60.0  # between two lines of the log on messages that are of no router of this fleet


class FrameHearer(Protocol):
    """Who is told of each message of another router."""

    def heard(self, origin: int, frame: Frame) -> None:
        """Another router has said this."""

    def silent(self, origin: int) -> None:
        """A router is not heard any more."""


class Hearing:
    """Takes messages apart."""

    def __init__(
        self,
        peers: HeardRouters,
        core: CoreSharing,
        side: StoreSide,
        counts: Counter[str],
        origin: int,
        seals: Seals,
        wall: Callable[[], float],
    ) -> None:
        self._peers, self._core, self._side, self._counts, self._origin = peers, core, side, counts, origin
        self._seals, self._wall = seals, wall
        self.handing: FrameHearer | None = None  # other listeners are called as well
        self.asked = False  # another router wants to be told everything
        self._own_s = -math.inf  # time of the last own message
        self._refused: Counter[str] = Counter()  # refused messages since the last line of the log, by kind
        self._refused_s = -math.inf  # time of that line

    def hear(self, message: bytes, now_s: float) -> float | None:
        """Take a message. Returns the time at which this router has said it, where it was this router. Raises
        BadFrame."""
        try:
            message, wall_s = self._seals.opened(message)
        except NotSealed as error:
            self.refuse("unauthenticated", str(error), now_s)
            return None
        head = head_of(message)
        if head is None:
            self._counts["other_release"] += 1
            return None
        if head.origin == self._origin:
            return self._own(head.at_s, now_s)
        if wall_s is not None:
            why = self._peers.replayed(head.origin, head.at_s, abs(wall_s - self._wall()))
            if why:
                self.refuse("replayed", why, now_s)
                return None
        frame = frame_of(message)
        earlier = self._peers.heard_from(head.origin, frame.name, head.at_s, now_s)
        if earlier is None:
            self._counts["ignored"] += 1
            return None
        if earlier:
            self.silent(earlier, left=True)
        self.asked = self.asked or frame.begun  # a stranger's too, which is to know that this router is none of its
        if self._of_this_fleet(head.origin, frame):
            self._take(head.origin, frame, now_s)
        return None

    def refuse(self, kind: str, why: str, now_s: float) -> None:
        """Count a message or an entry that is of no router of this fleet, and say so once a minute."""
        self._counts[kind] += 1
        self._refused[kind] += 1
        if now_s - self._refused_s >= REFUSED_EVERY_S:
            fields = {
                **self._refused,
                "why": why,
                "next": "give all routers of the fleet one `auth.secret`, or the same API keys, and clocks that agree;"
                " else see who writes to the store",
            }
            self._refused, self._refused_s = Counter(), now_s
            text = "messages in the shared store are of no router of this fleet"
            log.warning(text, extra={"event": "sharing_unauthenticated", "fields": fields})

    def forget_strangers(self) -> None:
        """What routers have said that turned out to be of another fleet counts no more."""
        for origin in self._peers.found_strangers():
            self.silent(origin, left=True)

    def silent(self, origin: int, *, left: bool) -> None:
        """A router is not heard any more; `left`: it said that it leaves, or is no router of this fleet."""
        self._side.silent(origin, left=left)
        if self.handing is not None:
            self.handing.silent(origin)

    def _own(self, at_s: float, now_s: float) -> float | None:
        """An own message has come back. One that has come before proves nothing: a store may repeat it."""
        if at_s > now_s:
            raise BadFrame("a message of this router from the future")
        if at_s <= self._own_s:
            self._counts["ignored"] += 1
            return None
        self._own_s = at_s
        return at_s

    def _of_this_fleet(self, origin: int, frame: Frame) -> bool:
        if frame.replicas:
            self._peers.served(origin, frame.replicas)
            self.forget_strangers()
        if not self._peers.is_stranger(origin):
            return True
        self._counts["strangers"] += 1
        if frame.leaving:
            self._peers.left(origin)
        return False

    def _take(self, origin: int, frame: Frame, now_s: float) -> None:
        if self.handing is not None:
            self.handing.heard(origin, frame)
        self._side.hear(origin, frame, leaving=frame.leaving)
        if frame.leaving:
            self._peers.left(origin)
            self.silent(origin, left=True)
        if frame.core:
            try:
                self._core.hear(frame.core, now_s)
            except ValueError as error:
                raise BadFrame(f"the core's part: {error}") from error
