"""Other routers of which messages arrive: their processes, and their membership in this router's fleet. A router is
active until it is silent for SILENT_S.

Two routers are of one fleet if they have a replica in common, with the same id and a model in common. A router with
only other replicas is a stranger. It is of another fleet that was given the same store and the same name, by accident
or because that is the default. A router without replicas may be either, and counts as a sibling. A router that once had
a replica in common stays a sibling. So a fleet does not split when all its replicas are exchanged, router by router.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from sys import byteorder

from router.peering.frames import REPLICAS_MAX
from router.peering.message_auth import FRESH_S

log = logging.getLogger(__name__)

SILENT_S = 1.0  # a router that was silent for this time is no longer active
PAST_MAX = 1_024  # processes that are gone, of which the number of the last message is kept


class Arrival(Enum):
    """Relation of a message to the others of its process."""

    IGNORED = "ignored"  # it was read before, or its process does not count
    FIRST = "first"  # the first message of its process
    NEXT = "next"  # nothing is missing before it
    GAP = "gap"  # messages are missing before it, so that the state of its router must be read


@dataclass(slots=True)
class _Peer:
    name: str
    seq: int  # number of its last message
    heard_s: float
    whole: bool  # True if all its messages were read, or its state and all messages since
    silent: bool = False
    replicas: frozenset[int] = frozenset()  # numbers of its replicas; empty until they are known
    sibling: bool = False  # True if any of its replicas was also this router's, at any time
    stranger: bool = False  # True if both have replicas, and have had none in common


class PeerRegistry:
    """The other routers, by the numbers of their processes."""

    def __init__(self, name: str, origin: int, peers_max: int, *, in_common: bool = True) -> None:
        """With `in_common`, a router is of this fleet only if it has a replica in common."""
        self._name, self._origin, self._peers_max, self._in_common = name, origin, peers_max, in_common
        self._peers: dict[int, _Peer] = {}
        self._past: dict[int, int] = {}  # number of the last message of processes that are gone
        self._replicas: frozenset[int] = frozenset()  # numbers of this router's replicas
        self._lost: list[
            tuple[int, str]
        ] = []  # processes that do not count any more, since the last call of `take_lost`
        self._of: dict[str, int] = {}  # router name -> number of its process
        self._full = self._namesake = self._met = False  # True once that is logged
        self._namesake_s = math.inf  # time of the first message of an older process with this router's name

    @property
    def heard(self) -> int:
        """Number of active routers of this fleet, without this one."""
        return sum(not (peer.silent or peer.stranger) for peer in self._peers.values())

    def rows(self, now_s: float) -> list[tuple[str, float]]:
        """Return the name of each active router of this fleet, and the seconds since its last message."""
        there = (peer for peer in self._peers.values() if not (peer.silent or peer.stranger))
        return sorted((peer.name, now_s - peer.heard_s) for peer in there)

    def strangers(self) -> list[str]:
        """Return the names of the active routers of other fleets."""
        return sorted(peer.name for peer in self._peers.values() if peer.stranger and not peer.silent)

    def oldest_peer(self, without: Collection[int]) -> tuple[int, str] | None:
        """Return (number of its process, name) of the active router of this fleet that has run longest. One with a
        replica in common comes before one with unknown replicas."""
        heard = [
            (not peer.sibling, origin)
            for origin, peer in self._peers.items()
            if not (peer.silent or peer.stranger) and origin not in without
        ]
        return (min(heard)[1], self._peers[min(heard)[1]].name) if heard else None

    def is_active(self, origin: int) -> bool:
        """True if this process has not been silent."""
        peer = self._peers.get(origin)
        return peer is not None and not peer.silent

    def may_return(self, without: Collection[int]) -> bool:
        """True if a router of this fleet is silent, and has not left."""
        return any(p.silent and not p.stranger for origin, p in self._peers.items() if origin not in without)

    def name_of(self, origin: int) -> str:
        """Return the name of a known process."""
        return self._peers[origin].name

    def is_old(self, origin: int, seq: int) -> bool:
        """True if this message of a process, or a later one, was read while the process is active."""
        peer = self._peers.get(origin)
        return peer is not None and not peer.silent and seq <= peer.seq

    def detect_replay(self, origin: int, seq: int, apart_s: float) -> str:
        """Return the reason why an authenticated message is a replay; "" if it is not. It is a replay if it comes
        before the last one of its process. It is also a replay if its process is not active, and its wall clock is more
        than FRESH_S from this router's. `apart_s` is that difference."""
        peer = self._peers.get(origin)
        last = peer.seq if peer is not None else self._past.get(origin)
        if last is not None and seq < last:
            return "a later one was already received"
        if (peer is None or peer.silent) and not apart_s <= FRESH_S:
            return f"its clock and this router's clock are {apart_s:.0f} s apart"
        return ""

    def note_message(self, origin: int, name: str, seq: int, now_s: float) -> Arrival:
        """Record a message.

        The number of a process decides its age, and the number of a message decides that of the message. Both rules
        hold while the newer one is active. They are suspended once it is silent: clocks are set back, and a message may
        have been forged.
        """
        peer = self._peers.get(origin)
        if peer is None:
            if origin in self._past and seq <= self._past[origin]:
                return Arrival.IGNORED
            if not self._admit(origin, name, now_s):
                return Arrival.IGNORED
            self._peers[origin] = _Peer(name, seq, now_s, whole=seq == 1)
            return Arrival.FIRST if seq == 1 else Arrival.GAP
        if seq == peer.seq or (seq < peer.seq and not peer.silent):
            return Arrival.IGNORED
        peer.whole = peer.whole and not peer.silent and seq == peer.seq + 1
        peer.seq, peer.heard_s, peer.silent = seq, now_s, False
        return Arrival.NEXT if peer.whole else Arrival.GAP

    def needs_state(self, origin: int, seq: int) -> bool:
        """True if the state of a process after this message is of use."""
        peer = self._peers.get(origin)
        if peer is None:
            return seq > self._past.get(origin, -1)
        return not (peer.whole or (peer.silent and seq <= peer.seq))

    def note_state(self, origin: int, name: str, seq: int, now_s: float) -> bool:
        """Record the state of a process after this message. Returns False if the process does not count."""
        peer = self._peers.get(origin)
        if peer is None:
            if not self._admit(origin, name, now_s):
                return False
            peer = self._peers[origin] = _Peer(name, seq, now_s, whole=True)
        peer.seq, peer.heard_s, peer.silent, peer.whole = seq, now_s, False, not peer.stranger
        return True

    def is_incomplete(self) -> bool:
        """True if messages of an active router of this fleet are missing."""
        return any(not (peer.whole or peer.silent or peer.stranger) for peer in self._peers.values())

    def any_whole(self) -> bool:
        """True if reading may continue where it ended, because nothing of some router is missing up to there."""
        return any(peer.whole and not peer.silent for peer in self._peers.values())

    def set_incomplete(self) -> None:
        """Record that the messages of all routers so far are of no use, because the link was not whole."""
        for peer in self._peers.values():
            peer.whole = False

    def _admit(self, origin: int, name: str, now_s: float) -> bool:
        """Make room for a new process. An earlier one of its name is replaced."""
        if name == self._name:
            self._heard_namesake(origin, now_s)
            return False
        earlier = self._of.get(name, 0)
        if earlier > origin and not self._peers[earlier].silent:
            return False  # the last messages of a process that was replaced
        if earlier:
            self._lose(earlier)
        elif len(self._peers) >= self._peers_max and not self._room():
            return False
        self._of[name] = origin
        return True

    def _lose(self, origin: int) -> None:
        self._lost.append((origin, self._peers[origin].name))
        self.remove_peer(origin)

    def take_lost(self) -> list[tuple[int, str]]:
        """Return (number, name) of the processes that do not count any more since the last call: they were replaced, or
        are of another fleet."""
        lost, self._lost = self._lost, []
        return lost

    def _heard_namesake(self, origin: int, now_s: float) -> None:
        """Log once that another process has this router's name. An older process may only have been replaced: its last
        messages may still arrive for SILENT_S."""
        if origin < self._origin:
            self._namesake_s = min(self._namesake_s, now_s)
        if not self._namesake and (origin > self._origin or now_s - self._namesake_s >= SILENT_S):
            self._namesake = True
            what = {"name": self._name, "next": "set a different `peering.router_id` for each router"}
            log.error("another router has the same name", extra={"event": "peering_duplicate_name", "fields": what})

    def _room(self) -> bool:
        """Remove a silent router to free a place. Logs once that no place is free."""
        for origin, peer in self._peers.items():
            if peer.silent:
                self._lose(origin)
                return True
        if not self._full:
            self._full = True
            what = {"routers_max": self._peers_max, "next": "use fewer routers per `peering.fleet`"}
            text = "too many routers have the same peering.fleet"
            log.error(text, extra={"event": "peering_too_many_routers", "fields": what})
        return False

    def remove_peer(self, origin: int) -> None:
        """Remove a router that has left."""
        peer = self._peers.pop(origin, None)
        if peer is None:
            return
        if self._of.get(peer.name) == origin:
            del self._of[peer.name]
        self._past[origin] = peer.seq
        if len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]

    def expire_silent(self, now_s: float) -> list[int]:
        """Return the numbers of the processes that have newly been silent for SILENT_S."""
        found = [origin for origin, peer in self._peers.items() if not peer.silent and now_s - peer.heard_s >= SILENT_S]
        for origin in found:
            self._peers[origin].silent = True
        return found

    # -- fleet membership --------------------------------------------------------------------------------------------

    @property
    def has_replicas(self) -> bool:
        """True if this router has any replicas, by which its fleet is known."""
        return bool(self._replicas)

    def serve(self, replicas: frozenset[int]) -> None:
        """Replace the replicas of this router."""
        if replicas != self._replicas:
            self._replicas = replicas
            for origin, peer in self._peers.items():
                self._judge(origin, peer)

    def set_replicas(self, origin: int, replicas: bytes) -> None:
        """Replace the replicas of another router. Raises ValueError."""
        peer = self._peers[origin]
        numbers = array("Q", replicas)
        if byteorder == "big":
            numbers.byteswap()
        peer.replicas = frozenset(numbers)
        self._judge(origin, peer)

    def is_stranger(self, origin: int) -> bool:
        """True if a known router is of another fleet."""
        peer = self._peers.get(origin)
        return peer is not None and peer.stranger

    def _judge(self, origin: int, peer: _Peer) -> None:
        if not self._in_common or peer.sibling or not (peer.replicas and self._replicas):
            return
        peer.sibling = not peer.replicas.isdisjoint(self._replicas)
        if peer.sibling:
            peer.stranger = False
        elif not peer.stranger:
            peer.stranger, peer.whole = True, False
            self._lost.append((origin, peer.name))
            self._meet(peer)

    def _meet(self, peer: _Peer) -> None:
        if not self._met:
            self._met = True
            what = {
                "router": peer.name,
                "next": "set a different `peering.fleet` for each fleet, or set `peering.replicas_in_common: false`",
            }
            text = "a router of another fleet, without a common replica, uses the same store and shared.name"
            log.warning(text, extra={"event": "peering_unknown_router", "fields": what})


def numbers_of(replicas: frozenset[int]) -> bytes:
    """Encode replicas for a message: the lowest numbers, so that two routers of a very large fleet send the same
    ones."""
    numbers = array("Q", sorted(replicas)[:REPLICAS_MAX])
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
