"""What is heard from other routers: who they are, and where each part of a message goes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from router.sharing.frames import BadFrame, Frame, frame_of, head_of
from router.sharing.sides import CoreSharing, StoreSide

log = logging.getLogger(__name__)

SILENT_S = 1.0  # a router that was not heard for so long is there no more


@dataclass(slots=True)
class _Peer:
    name: str
    at_s: float  # the time in its last message, by its own clock
    heard_s: float
    silent: bool = False


class HeardRouters:
    """The other routers that are heard, by the numbers of their processes."""

    def __init__(self, name: str, origin: int, peers_max: int) -> None:
        self._name, self._origin, self._peers_max = name, origin, peers_max
        self._peers: dict[int, _Peer] = {}
        self._of: dict[str, int] = {}  # number of the process that has a name
        self._full = self._namesake = False  # whether that was said
        self._namesake_s = math.inf  # time at which an older process of this router's name was first heard

    @property
    def heard(self) -> int:
        """How many are heard."""
        return sum(not peer.silent for peer in self._peers.values())

    def rows(self, now_s: float) -> list[tuple[str, float]]:
        """Name of each that is heard, and seconds since its last message."""
        return sorted((peer.name, now_s - peer.heard_s) for peer in self._peers.values() if not peer.silent)

    def longest(self, without: Collection[int]) -> tuple[int, str] | None:
        """(number of its process, name) of the router that has run longest, of those that are heard."""
        heard = [origin for origin, peer in self._peers.items() if not peer.silent and origin not in without]
        return (min(heard), self._peers[min(heard)].name) if heard else None

    def hears(self, origin: int) -> bool:
        """Whether this process is heard now."""
        peer = self._peers.get(origin)
        return peer is not None and not peer.silent

    def known(self, origin: int) -> bool:
        """Whether this process was heard before, and has not left."""
        return origin in self._peers

    def heard_from(self, origin: int, name: str, at_s: float, now_s: float) -> int | None:
        """Note a message. Returns the number of another process of its name that this one replaces, 0 for none, and
        None where the message is not to be taken: it is older than the last one, or there are too many routers.

        A process is older than another one by its number, and a message by its time, as long as the newer one is heard.
        Once that is silent neither counts any more: clocks are set back, and a message may have been forged."""
        peer = self._peers.get(origin)
        if peer is not None:
            if at_s < peer.at_s and not peer.silent:
                return None
            peer.at_s, peer.heard_s, peer.silent = at_s, now_s, False
            return 0
        if name == self._name:
            self._heard_namesake(origin, now_s)
            return None
        earlier = self._of.get(name, 0)
        if earlier > origin and not self._peers[earlier].silent:
            return None  # the last words of a process that was replaced
        if earlier:
            del self._peers[earlier]
        elif len(self._peers) >= self._peers_max and not self._room():
            return None
        self._peers[origin] = _Peer(name, at_s, now_s)
        self._of[name] = origin
        return earlier

    def _heard_namesake(self, origin: int, now_s: float) -> None:
        """Another process has this router's name: say so once. One that began before this one may only have been
        replaced, and its last words are still on their way for SILENT_S."""
        if origin < self._origin:
            self._namesake_s = min(self._namesake_s, now_s)
        if not self._namesake and (origin > self._origin or now_s - self._namesake_s >= SILENT_S):
            self._namesake = True
            what = {"name": self._name, "next": "give each router a `shared.router` of its own"}
            log.error("another router has this one's name", extra={"event": "sharing_namesake", "fields": what})

    def _room(self) -> bool:
        """Make room by forgetting one that is silent; says once that there is none."""
        for origin, peer in self._peers.items():
            if peer.silent:
                self.left(origin)
                return True
        if not self._full:
            self._full = True
            what = {"routers_max": self._peers_max, "next": "let fewer routers share one `shared.name`"}
            log.error("too many routers share one name", extra={"event": "sharing_too_many", "fields": what})
        return False

    def left(self, origin: int) -> None:
        """One of them has said that it leaves."""
        peer = self._peers.pop(origin, None)
        if peer is not None and self._of.get(peer.name) == origin:
            del self._of[peer.name]

    def silent(self, now_s: float) -> list[int]:
        """Numbers of the processes that have newly been silent for SILENT_S."""
        found = [origin for origin, peer in self._peers.items() if not peer.silent and now_s - peer.heard_s >= SILENT_S]
        for origin in found:
            self._peers[origin].silent = True
        return found


class FrameHearer(Protocol):
    """Who is told of each message of another router."""

    def heard(self, origin: int, frame: Frame) -> None:
        """Another router has said this."""


class Hearing:
    """Takes messages apart."""

    def __init__(
        self, peers: HeardRouters, core: CoreSharing, side: StoreSide, counts: Counter[str], origin: int
    ) -> None:
        self._peers, self._core, self._side, self._counts, self._origin = peers, core, side, counts, origin
        self.handing: FrameHearer | None = None  # who else is told
        self.asked = False  # another router wants to be told everything

    def hear(self, message: bytes, now_s: float) -> float | None:
        """Take a message. Returns the time at which this router has said it, where it was this router. Raises
        BadFrame."""
        head = head_of(message)
        if head is None:
            self._counts["other_release"] += 1
            return None
        if head.origin == self._origin:
            if head.at_s > now_s:
                raise BadFrame("a message of this router from the future")
            return head.at_s
        frame = frame_of(message)
        earlier = self._peers.heard_from(head.origin, frame.name, head.at_s, now_s)
        if earlier is None:
            self._counts["ignored"] += 1
            return None
        if earlier:
            self._side.silent(earlier, left=True)
        self.asked = self.asked or frame.begun
        if self.handing is not None:
            self.handing.heard(head.origin, frame)
        self._side.hear(head.origin, frame, leaving=frame.leaving)
        if frame.leaving:
            self._peers.left(head.origin)
            self._side.silent(head.origin, left=True)
        if frame.core:
            try:
                self._core.hear(frame.core, now_s)
            except ValueError as error:
                raise BadFrame(f"the core's part: {error}") from error
        return None
