"""Receiver of other routers' messages: passes each part of a message to its component."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from router.peering.frames import BadFrame, PeerFrame, frame_of, head_of
from router.peering.interfaces import CoreSync, SharedStateSync
from router.peering.message_auth import NotSealed, Seals
from router.peering.peers import PeerRegistry

log = logging.getLogger(__name__)

REFUSED_EVERY_S = 60.0  # least time between two log lines about messages that are not of this fleet


class FrameListener(Protocol):
    """Receiver of each message of another router."""

    def on_frame(self, origin: int, frame: PeerFrame) -> None:
        """Process a message of another router."""

    def silent(self, origin: int) -> None:
        """Forget a router that is silent."""


class PeerSubscriber:
    """Checks and dispatches messages."""

    def __init__(
        self,
        peers: PeerRegistry,
        core: CoreSync,
        side: SharedStateSync,
        counts: Counter[str],
        origin: int,
        seals: Seals,
        wall: Callable[[], float],
    ) -> None:
        self._peers, self._core, self._side, self._counts, self._origin = peers, core, side, counts, origin
        self._seals, self._wall = seals, wall
        self.handing: FrameListener | None = None  # also gets each message
        self.asked = False  # another router requests all data
        self._own_s = -math.inf  # time of the last own message
        self._refused: Counter[str] = Counter()  # refused messages since the last log line, by kind
        self._refused_s = -math.inf  # time of that line

    def hear(self, message: bytes, now_s: float) -> float | None:
        """Process a message. For a message of this router, return the time at which it was sent. Raises BadFrame."""
        try:
            message, wall_s = self._seals.unseal(message)
        except NotSealed as error:
            self.refuse("unauthenticated", str(error), now_s)
            return None
        head = head_of(message)
        if head is None:
            self._counts["other_release"] += 1
            return None
        if head.origin == self._origin:
            return self._accept_own_message(head.at_s, now_s)
        if wall_s is not None:
            why = self._peers.detect_replay(head.origin, head.at_s, abs(wall_s - self._wall()))
            if why:
                self.refuse("replayed", why, now_s)
                return None
        frame = frame_of(message)
        earlier = self._peers.note_message(head.origin, frame.name, head.at_s, now_s)
        if earlier is None:
            self._counts["ignored"] += 1
            return None
        if earlier:
            self.silent(earlier, left=True)
        # also for a stranger, which must learn that this router is not of its fleet
        self.asked = self.asked or frame.begun
        if self._is_from_fleet(head.origin, frame):
            self._take(head.origin, frame, now_s)
        return None

    def refuse(self, kind: str, why: str, now_s: float) -> None:
        """Count a message or an entry that is not of this fleet, and log such messages once a minute."""
        self._counts[kind] += 1
        self._refused[kind] += 1
        if now_s - self._refused_s >= REFUSED_EVERY_S:
            fields = {
                **self._refused,
                "why": why,
                "next": "set the same `auth.secret` or API keys on all routers of the fleet, and synchronize their "
                "clocks; otherwise check for other writers to the store",
            }
            self._refused, self._refused_s = Counter(), now_s
            text = "messages in the shared store do not come from routers of this fleet"
            log.warning(text, extra={"event": "sharing_unauthenticated", "fields": fields})

    def forget_strangers(self) -> None:
        """Discard the reports of routers that turned out to be of another fleet."""
        for origin in self._peers.found_strangers():
            self.silent(origin, left=True)

    def silent(self, origin: int, *, left: bool) -> None:
        """Forget a router that is silent. With `left`, it announced that it leaves, or is not of this fleet."""
        self._side.on_peer_lost(origin, left=left)
        if self.handing is not None:
            self.handing.silent(origin)

    def _accept_own_message(self, at_s: float, now_s: float) -> float | None:
        """Process an own message. One that was received before proves nothing, because a store may repeat it."""
        if at_s > now_s:
            raise BadFrame("a message of this router from the future")
        if at_s <= self._own_s:
            self._counts["ignored"] += 1
            return None
        self._own_s = at_s
        return at_s

    def _is_from_fleet(self, origin: int, frame: PeerFrame) -> bool:
        if frame.replicas:
            self._peers.set_replicas(origin, frame.replicas)
            self.forget_strangers()
        if not self._peers.is_stranger(origin):
            return True
        self._counts["strangers"] += 1
        if frame.leaving:
            self._peers.remove_peer(origin)
        return False

    def _take(self, origin: int, frame: PeerFrame, now_s: float) -> None:
        if self.handing is not None:
            self.handing.on_frame(origin, frame)
        self._side.hear(origin, frame, leaving=frame.leaving)
        if frame.leaving:
            self._peers.remove_peer(origin)
            self.silent(origin, left=True)
        if frame.core:
            try:
                self._core.hear(frame.core, now_s)
            except ValueError as error:
                raise BadFrame(f"the placement part: {error}") from error
