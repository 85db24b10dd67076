"""The other routers that are heard: which processes, and whether they are of this router's fleet.

Two routers are of one fleet if they have a replica in common, of one id and with a model in common. A router whose
replicas are other ones is a stranger: another fleet that was given the same store and the same name, by accident or
since that is the default. A router without replicas may be either and counts as a sibling, and one that has once had
a replica in common stays one, so that a fleet whose replicas are all exchanged, router by router, does not part.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from sys import byteorder

from router.sharing.frames import REPLICAS_MAX
from router.sharing.seals import FRESH_S

log = logging.getLogger(__name__)

SILENT_S = 1.0  # a router that was not heard for so long is there no more
PAST_MAX = 1_024  # processes that are gone whose last messages are remembered


@dataclass(slots=True)
class _Peer:
    name: str
    at_s: float  # the time in its last message, by its own clock
    heard_s: float
    silent: bool = False
    replicas: frozenset[int] = frozenset()  # numbers of its replicas; empty until they were told
    sibling: bool = False  # whether any of its replicas was this router's too, at any time
    stranger: bool = False  # whether both have replicas, and have had none in common


class HeardRouters:
    """The other routers that are heard, by the numbers of their processes."""

    def __init__(self, name: str, origin: int, peers_max: int, *, in_common: bool = True) -> None:
        """`in_common`: whether a router is only of this fleet if it has a replica in common."""
        self._name, self._origin, self._peers_max, self._in_common = name, origin, peers_max, in_common
        self._peers: dict[int, _Peer] = {}
        self._past: dict[int, float] = {}  # time of the last message of processes that are gone, by their clocks
        self._replicas: frozenset[int] = frozenset()  # numbers of this router's replicas
        self._newly: list[int] = []  # strangers that were found since the last call of `found_strangers`
        self._of: dict[str, int] = {}  # number of the process that has a name
        self._full = self._namesake = self._met = False  # whether that was said
        self._namesake_s = math.inf  # time at which an older process of this router's name was first heard

    @property
    def heard(self) -> int:
        """How many of this fleet are heard."""
        return sum(not (peer.silent or peer.stranger) for peer in self._peers.values())

    def rows(self, now_s: float) -> list[tuple[str, float]]:
        """Name of each of this fleet that is heard, and seconds since its last message."""
        there = (peer for peer in self._peers.values() if not (peer.silent or peer.stranger))
        return sorted((peer.name, now_s - peer.heard_s) for peer in there)

    def strangers(self) -> list[str]:
        """Names of the routers of other fleets that are heard."""
        return sorted(peer.name for peer in self._peers.values() if peer.stranger and not peer.silent)

    def longest(self, without: Collection[int]) -> tuple[int, str] | None:
        """(number of its process, name) of the router that has run longest, of those of this fleet that are heard;
        one with a replica in common comes before one whose replicas are not known."""
        heard = [
            (not peer.sibling, origin)
            for origin, peer in self._peers.items()
            if not (peer.silent or peer.stranger) and origin not in without
        ]
        return (min(heard)[1], self._peers[min(heard)[1]].name) if heard else None

    def hears(self, origin: int) -> bool:
        """Whether this process is heard now."""
        peer = self._peers.get(origin)
        return peer is not None and not peer.silent

    def known(self, origin: int) -> bool:
        """Whether this process was heard before, and has not left."""
        return origin in self._peers

    def replayed(self, origin: int, at_s: float, apart_s: float) -> str:
        """Why an authenticated message is one that was recorded, "" if it is not: it is no later than the last one of
        its process, or its process is not heard now and its wall clock is `apart_s` from this router's."""
        peer = self._peers.get(origin)
        last_s = peer.at_s if peer is not None else self._past.get(origin)
        if last_s is not None and at_s <= last_s:
            return "it was heard before, or a later one"
        if (peer is None or peer.silent) and not apart_s <= FRESH_S:
            return f"its wall clock and this one are {apart_s:.0f} s apart"
        return ""

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
            self._gone(earlier)
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
        if origin in self._peers:
            self._gone(origin)

    def _gone(self, origin: int) -> None:
        peer = self._peers.pop(origin)
        if self._of.get(peer.name) == origin:
            del self._of[peer.name]
        self._past[origin] = peer.at_s
        if len(self._past) > PAST_MAX:
            del self._past[next(iter(self._past))]

    def silent(self, now_s: float) -> list[int]:
        """Numbers of the processes that have newly been silent for SILENT_S."""
        found = [origin for origin, peer in self._peers.items() if not peer.silent and now_s - peer.heard_s >= SILENT_S]
        for origin in found:
            self._peers[origin].silent = True
        return found

    # -- which fleet -------------------------------------------------------------------------------------------------

    @property
    def has_replicas(self) -> bool:
        """Whether this router has any replicas, by which its fleet is known."""
        return bool(self._replicas)

    def serve(self, replicas: frozenset[int]) -> None:
        """Take the replicas that are this router's own now."""
        if replicas != self._replicas:
            self._replicas = replicas
            for origin, peer in self._peers.items():
                self._judge(origin, peer)

    def served(self, origin: int, replicas: bytes) -> None:
        """Another router has said which replicas it has. Raises ValueError."""
        peer = self._peers[origin]
        numbers = array("Q", replicas)
        if byteorder == "big":
            numbers.byteswap()
        peer.replicas = frozenset(numbers)
        self._judge(origin, peer)

    def is_stranger(self, origin: int) -> bool:
        """Whether a router that is heard is of another fleet."""
        peer = self._peers.get(origin)
        return peer is not None and peer.stranger

    def found_strangers(self) -> list[int]:
        """Numbers of the processes that were found to be of another fleet since the last call."""
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
                "next": "give each fleet a `shared.name` of its own; or set `shared.replicas_in_common: false`",
            }
            text = "a router of another fleet, without a replica in common, shares this one's store and name"
            log.warning(text, extra={"event": "sharing_stranger", "fields": what})


def numbers_of(replicas: frozenset[int]) -> bytes:
    """Replicas as a message has them: the lowest numbers, so that two routers of a very large fleet tell the same."""
    numbers = array("Q", sorted(replicas)[:REPLICAS_MAX])
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
