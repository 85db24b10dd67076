"""Receiver of other routers' messages and states: passes each part to its component."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from router.peering.frames import BadFrame, FrameHead, PeerFrame, frame_of, head_of
from router.peering.interfaces import CoreSync, SharedStateSync
from router.peering.message_auth import MESSAGE, STATE, NotSealed, Seals
from router.peering.peers import SILENT_S, Arrival, PeerRegistry
from router.peering.session import ZERO_ID, StreamId
from router.peering.store_clock import StoreClock

log = logging.getLogger(__name__)

REFUSED_EVERY_S = 60.0  # least time between two log lines about messages that are not of this fleet
STATE_EVERY_S = 1.0  # between two states of a router in the store
STATE_AGE_MAX_S = STATE_EVERY_S + 2 * SILENT_S  # an older state is that of a router that is silent
AGE_MAX_S = 30.0  # a message counts as not older than this, also if the store's clock was set


class FrameListener(Protocol):
    """Receiver of each message of another router."""

    def on_frame(self, origin: int, frame: PeerFrame) -> None:
        """Process a message of another router."""

    def silent(self, origin: int) -> None:
        """Forget a router that is silent."""


class PeerReceiver:
    """Checks and dispatches messages and states."""

    def __init__(
        self,
        peers: PeerRegistry,
        core: CoreSync,
        side: SharedStateSync,
        counts: Counter[str],
        origin: int,
        seals: Seals,
        store_clock: StoreClock,
        wall: Callable[[], float],
    ) -> None:
        self._peers, self._core, self._side, self._counts, self._origin = peers, core, side, counts, origin
        self._seals, self._store_clock, self._wall = seals, store_clock, wall
        self.handing: FrameListener | None = None  # also gets each message
        self._own_seq = 0  # number of the last own message that was read
        self._read_at = ZERO_ID  # id of the last message that was read; those before it may be read again
        self._refused: Counter[str] = Counter()  # refused messages since the last log line, by kind
        self._refused_s = -math.inf  # time of that line

    def hear(self, id_: StreamId, message: bytes, now_s: float) -> float | None:
        """Process a message. For a message of this router, return the time at which it was sent. Raises BadFrame."""
        again, self._read_at = id_ <= self._read_at, max(id_, self._read_at)
        found = self._open(MESSAGE, message, now_s, again=again)
        if found is None:
            return None
        head, message, apart_s = found
        if head.origin == self._origin:
            return self._accept_own_message(head, now_s)
        if again and self._peers.is_old(head.origin, head.seq):
            return None
        if apart_s is not None and (why := self._peers.detect_replay(head.origin, head.seq, apart_s)):
            self.refuse("replayed", why, now_s)
            return None
        frame = frame_of(message)
        arrival = self._peers.note_message(head.origin, frame.name, head.seq, now_s)
        self.forget_lost(now_s)
        if arrival is Arrival.IGNORED:
            self._counts["ignored"] += 1
        elif self._is_from_fleet(head.origin, frame, now_s):
            if arrival is Arrival.FIRST:
                self._core.begin(frame.name)
            sent_s = id_[0] / 1e3 + self._store_clock.offset_s
            self._take(head, frame, min(now_s, max(now_s - AGE_MAX_S, sent_s)), now_s)
        return None

    def restore(self, state: bytes, now_s: float) -> Iterator[StreamId]:
        """Process the state of another router in steps, if messages of it are missing. Each step yields the id after
        which its messages follow. Raises BadFrame."""
        found = self._open(STATE, state, now_s)
        if found is None:
            return
        head, message, apart_s = found
        if head.origin == self._origin or not self._peers.needs_state(head.origin, head.seq):
            return
        if apart_s is not None and (why := self._peers.detect_replay(head.origin, 1 << 64, apart_s)):
            self.refuse("replayed", why, now_s)
            return
        frame = frame_of(message)
        if frame.state is None:
            raise BadFrame("a message in place of a state")
        said_s = frame.state.store_s + self._store_clock.offset_s
        if now_s - said_s > STATE_AGE_MAX_S or not self._peers.note_state(head.origin, frame.name, head.seq, now_s):
            return
        self.forget_lost(now_s)
        if not self._is_from_fleet(head.origin, frame, now_s):
            return
        self._side.hear(head.origin, frame)
        try:
            for _ in self._core.restore(frame.name, frame.core, min(now_s, said_s) - head.at_s, now_s):
                yield frame.state.ms, frame.state.number
        except ValueError as error:
            raise BadFrame(f"the placement part of a state: {error}") from error
        yield frame.state.ms, frame.state.number

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
            log.warning(text, extra={"event": "peering_unauthenticated", "fields": fields})

    def forget_lost(self, now_s: float) -> None:
        """Discard the reports of routers that were replaced, or turned out to be of another fleet."""
        for origin, name in self._peers.take_lost():
            self.silent(origin, name, now_s, left=True)

    def silent(self, origin: int, name: str, now_s: float, *, left: bool) -> None:
        """Forget a router that is silent. With `left`, it announced that it leaves, or is not of this fleet."""
        self._side.on_peer_lost(origin, left=left)
        self._core.forget(name, now_s)
        if self.handing is not None:
            self.handing.silent(origin)

    def _open(
        self, purpose: str, message: bytes, now_s: float, *, again: bool = False
    ) -> tuple[FrameHead, bytes, float | None] | None:
        """Return (head, message, difference of the wall clocks if it is authenticated), or None for a message that is
        not of this fleet and release. It is counted unless it is read `again`. Raises BadFrame."""
        try:
            message, wall_s = self._seals.unseal(purpose, message)
        except NotSealed as error:
            if not again:
                self.refuse("unauthenticated", str(error), now_s)
            return None
        head = head_of(message)
        if head is None:
            self._counts["other_release"] += not again
            return None
        return head, message, None if wall_s is None else abs(wall_s - self._wall())

    def _accept_own_message(self, head: FrameHead, now_s: float) -> float | None:
        """Process an own message. One that was received before proves nothing, because a store may repeat it."""
        if head.at_s > now_s:
            raise BadFrame("a message of this router from the future")
        if head.seq <= self._own_seq:
            self._counts["ignored"] += 1
            return None
        self._own_seq = head.seq
        return head.at_s

    def _is_from_fleet(self, origin: int, frame: PeerFrame, now_s: float) -> bool:
        if frame.replicas:
            self._peers.set_replicas(origin, frame.replicas)
            self.forget_lost(now_s)
        if not self._peers.is_stranger(origin):
            return True
        self._counts["strangers"] += 1
        if frame.leaving:
            self._peers.remove_peer(origin)
        return False

    def _take(self, head: FrameHead, frame: PeerFrame, sent_s: float, now_s: float) -> None:
        if frame.leaving:
            self._peers.remove_peer(head.origin)
            self.silent(head.origin, frame.name, now_s, left=True)
            return
        if self.handing is not None:
            self.handing.on_frame(head.origin, frame)
        self._side.hear(head.origin, frame)
        if frame.core:
            try:
                self._core.hear(frame.name, frame.core, sent_s - head.at_s, now_s)
            except ValueError as error:
                raise BadFrame(f"the placement part: {error}") from error
