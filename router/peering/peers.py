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
from sys import byteorder

from router.peering.frames import REPLICAS_MAX
from router.peering.message_auth import FRESH_S

log = logging.getLogger(__name__)

SILENT_S = 1.0  # a router that was silent for this time is no longer active
PAST_MAX = 1_024  # processes that are gone, of which the last message's time is kept


@dataclass(slots=True)
class _Peer:
    name: str
    at_s: float  # the time in its last message, by its own clock
    heard_s: float
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
        self._past: dict[int, float] = {}  # time of the last message of processes that are gone, by their clocks
        self._replicas: frozenset[int] = frozenset()  # numbers of this router's replicas
        self._newly: list[int] = []  # strangers that were found since the last call of `found_strangers`
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

    def is_alive(self, origin: int) -> bool:
        """True if this process is active."""
        peer = self._peers.get(origin)
        return peer is not None and not peer.silent

    def is_known(self, origin: int) -> bool:
        """True if this process has sent a message, and has not left."""
        return origin in self._peers

    def detect_replay(self, origin: int, at_s: float, apart_s: float) -> str:
        """Return the reason why an authenticated message is a replay; "" if it is not. It is a replay if it is no later
        than the last one of its process. It is also a replay if its process is not active, and its wall clock is more
        than FRESH_S from this router's. `apart_s` is that difference."""
        peer = self._peers.get(origin)
        last_s = peer.at_s if peer is not None else self._past.get(origin)
        if last_s is not None and at_s <= last_s:
            return "it or a later one was already received"
        if (peer is None or peer.silent) and not apart_s <= FRESH_S:
            return f"its clock and this router's clock are {apart_s:.0f} s apart"
        return ""

    def note_message(self, origin: int, name: str, at_s: float, now_s: float) -> int | None:
        """Record a message. Returns the number of another process of its name that this one replaces, or 0. Returns
        None if the message must be ignored: it is older than the last one, or there are too many routers.

        The number of a process decides its age, and the time of a message decides that of the message. Both rules hold
        while the newer one is active. They are suspended once it is silent: clocks are set back, and a message may have
        been forged.
        """
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
            return None  # the last messages of a process that was replaced
        if earlier:
            self._drop_peer(earlier)
        elif len(self._peers) >= self._peers_max and not self._room():
            return None
        self._peers[origin] = _Peer(name, at_s, now_s)
        self._of[name] = origin
        return earlier

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
                self.remove_peer(origin)
                return True
        if not self._full:
            self._full = True
            what = {"routers_max": self._peers_max, "next": "use fewer routers per `peering.fleet`"}
            text = "too many routers have the same peering.fleet"
            log.error(text, extra={"event": "sharing_too_many", "fields": what})
        return False

    def remove_peer(self, origin: int) -> None:
        """Remove a router that announced that it leaves."""
        if origin in self._peers:
            self._drop_peer(origin)

    def _drop_peer(self, origin: int) -> None:
        peer = self._peers.pop(origin)
        if self._of.get(peer.name) == origin:
            del self._of[peer.name]
        self._past[origin] = peer.at_s
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

    def found_strangers(self) -> list[int]:
        """Return the numbers of the processes that were found to be of another fleet since the last call."""
        newly, self._newly = self._newly, []
        return newly

    def _judge(self, origin: int, peer: _Peer) -> None:
        if not self._in_common or peer.sibling or not (peer.replicas and self._replicas):
            return
        peer.sibling = not peer.replicas.isdisjoint(self._replicas)
        if peer.sibling:
            peer.stranger = False
        elif not peer.stranger:
            peer.stranger = True
            self._newly.append(origin)
            self._meet(peer)

    def _meet(self, peer: _Peer) -> None:
        if not self._met:
            self._met = True
            what = {
                "router": peer.name,
                "next": "set a different `peering.fleet` for each fleet, or set `peering.replicas_in_common: false`",
            }
            text = "a router of another fleet, without a common replica, uses the same store and shared.name"
            log.warning(text, extra={"event": "sharing_stranger", "fields": what})


def numbers_of(replicas: frozenset[int]) -> bytes:
    """Encode replicas for a message: the lowest numbers, so that two routers of a very large fleet send the same
    ones."""
    numbers = array("Q", sorted(replicas)[:REPLICAS_MAX])
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
