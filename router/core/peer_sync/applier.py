"""Reception of other routers' messages, which updates the state that placement reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from router.core.fleet.member import ReplicaState
from router.core.peer_sync.cache_epochs import CacheEpochs, instance_of, number_of
from router.core.peer_sync.clock_offset import ClockOffset
from router.core.peer_sync.learned_models import take_fits, take_models
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import (
    KEY_BYTES,
    NUMBER_MAX,
    ROWS_MAX,
    Gap,
    ReplicaLoadRow,
    SharedEnd,
    SharedMessage,
    SharedPlacement,
    body_of,
    row_of,
    sender_of,
)
from router.core.peer_sync.remote_leases import Leases, RemoteLeases
from router.core.placement.router import Router
from router.core.types.peer_load import PeerLoad


class PeerRow(Struct, gc=False):
    """The last row of another router for a replica."""

    bytes_: bytes
    row: ReplicaLoadRow
    taken_by: ReplicaState | None  # the replica; None if the router means another engine


@dataclass(slots=True)
class Peer:
    """Another router."""

    number: int
    boot: int
    seq: int  # the number of its last message
    heard_s: float
    known: bool = False  # a full circle of arcs was received: a replica without a row in it had no counts yet
    circle: int = 0  # number of the replica up to which the circle was received
    replaced: int = -1  # Fleet.replaced when its rows were applied
    delay: ClockOffset = field(default_factory=ClockOffset)
    rows: dict[int, PeerRow] = field(default_factory=dict)  # last rows, by the number of the replica
    said: dict[bytes, ReplicaLoadRow] = field(default_factory=dict)  # the same rows, by their bytes in messages
    leases: Leases = field(default_factory=Leases)


class StateApplier:
    """Applies other routers' messages to the fleet's members and, through RemoteLeases, to caches."""

    def __init__(
        self,
        router: Router,
        caches: CacheEpochs,
        name: str,
        boot: int,
        limits: SharingLimits,
        greet: Callable[[], None],
        asked: Callable[[Gap], None],
        recounted: Callable[[str], None],
    ) -> None:
        """Start without known routers. Callbacks:

        - `greet()`: first message of another router.
        - `asked`: another router missed messages of ours.
        - `recounted`: less prefill of ours waits at a replica than was reported.
        """
        self._router, self._caches, self._name, self._boot = router, caches, name, boot
        self._limits, self._greet, self._asked = limits, greet, asked
        self._silent: dict[str, tuple[int, int]] = {}  # routers that were silent for too long: boot, last message
        self._missed: list[Gap] = []  # missed messages of other routers
        self._number = number_of(name)
        self._mirror = RemoteLeases(router, limits, recounted)
        self.peers: dict[str, Peer] = {}
        self.ignored = dict.fromkeys(("version", "namesake", "old", "many", "long"), 0)
        self._ids: dict[int, str] = {}  # number of a replica -> its id
        self._divided: tuple[list[str], frozenset[str]] = [], frozenset()  # routers and replicas at the last division

    def hear(self, message: bytes, now_s: float) -> None:
        """Apply a message. Raises BadMessage."""
        sender = sender_of(message)
        if sender is None:
            self.ignored["version"] += 1
            return
        name, boot, begin = sender
        if name == self._name:
            self.ignored["namesake"] += boot != self._boot
            return
        peer = self.peers.get(name)
        if peer is not None and boot < peer.boot:
            self.ignored["old"] += 1
            return
        body = body_of(message, begin)
        if peer is None or boot != peer.boot:
            peer = self._add_peer(name, boot, body.seq, now_s)
            if peer is None:
                return
        if body.seq <= peer.seq:
            self.ignored["old"] += 1
            return
        if peer.seq >= 0 and body.seq > peer.seq + 1 and len(self._missed) < self._limits.gaps_max:
            self._missed.append((peer.number, peer.seq + 1, body.seq - 1))
        peer.seq, peer.heard_s = body.seq, now_s
        self._take(name, peer, body, now_s)

    def tick(self, now_s: float) -> None:
        """Drop routers that were silent for too long, and continue with long prompts. A call costs as much as one
        message."""
        self._mirror.grow(now_s)
        due_s = now_s - self._limits.silent_s
        for name in [name for name, peer in self.peers.items() if peer.heard_s < due_s]:
            self._forget(name, now_s)
        self._partition_replicas()

    def on_disconnected(self, now_s: float) -> None:
        """Drop all other routers, because the channel is gone. They keep working, like this router."""
        for name in list(self.peers):
            self._forget(name, now_s, go_on=True)
        self._partition_replicas()

    def _partition_replicas(self) -> None:
        """Select the replicas that this router prefers among equals: every n-th by id, with n routers. All routers do
        so with the same names and ids, so each prefers different replicas."""
        names = sorted([self._name, *self.peers])
        if names != self._divided[0] or self._router.fleet.members.keys() != self._divided[1]:
            ids = sorted(self._router.fleet.members)
            self._divided = names, frozenset(ids)
            own = ids[names.index(self._name) :: len(names)] if len(names) > 1 else []
            self._router.own = frozenset(own)

    def clock_offsets(self) -> list[tuple[int, int]]:
        """Return the lag of each router, to be sent to it."""
        return [(peer.number, lag) for peer in self.peers.values() if (lag := peer.delay.lag_ms) is not None]

    def take_gaps(self) -> list[Gap]:
        """Return the missed messages of other routers since the last call."""
        missed, self._missed = self._missed, []
        return missed

    # -- internals -----------------------------------------------------------------------------------------------

    def _take(self, name: str, peer: Peer, body: SharedMessage, now_s: float) -> None:
        peer.delay.note_message(body.sent_ms, _lag_of(body.lags, self._number), now_s)
        clock_s = now_s - peer.delay.delay_s - body.sent_ms / 1e3
        self._take_rows(name, peer, body, clock_s, now_s)
        for first in body.first_tokens:
            member = self._member(first.replica)
            if member is not None:
                member.on_peer_first_token(min(clock_s + first.at_ms / 1e3, now_s), first.computed_tokens)
        left = self._limits.heard_factor * self._limits.keys_max
        for again in body.again:
            if again.router == self._number:
                left = self._take_news(peer, again.placements, again.ends, clock_s, now_s, left)
                break  # a message repeats content for one router, and once
        if body.placements or body.ends:
            self._take_news(peer, body.placements, body.ends, clock_s, now_s, left)
        for gap in body.missed:
            if gap[0] == self._number:
                self._asked((peer.number, gap[1], gap[2]))
        if peer.leases:
            self._mirror.end_before(peer.leases, body.first, now_s)
        if body.models is not None:
            take_models(self._router, name, body.models)
        for fits in body.fits:
            member = self._member(fits.replica)
            if member is not None:
                take_fits(name, member, fits)

    def _add_peer(self, name: str, boot: int, seq: int, now_s: float) -> Peer | None:
        """Add a router, or a new process of a known router; return None if there are too many."""
        if name in self.peers:
            self._forget(name, now_s)
        if len(self.peers) >= self._limits.peers_max:
            self.ignored["many"] += 1
            return None
        self._greet()
        # A router that was silent for a while continues after its last message. Of any other, messages before this one
        # are not requested.
        known_boot, last = self._silent.pop(name, (boot, -1))
        known = last if known_boot == boot and last < seq else -1
        peer = self.peers[name] = Peer(number_of(name), boot, known, now_s)
        return peer

    def _take_rows(self, name: str, peer: Peer, body: SharedMessage, clock_s: float, now_s: float) -> None:
        rows, said = peer.rows, peer.said
        if peer.replaced != self._router.fleet.replaced:
            self._rebind_rows(name, peer, clock_s, now_s)
        # decode all before any is applied
        fresh = [(bytes_, row_of(bytes_)) for bytes_ in body.rows if bytes_ not in said]
        for bytes_, row in fresh:
            member, before = self._resolve_member(row), rows.get(row.replica)
            if before is not None:
                del said[before.bytes_]
                if before.taken_by is not None and before.taken_by is not member:
                    before.taken_by.forget_peer(name, now_s)
            said[bytes_] = row
            rows[row.replica] = PeerRow(bytes_, row, member)
            if member is not None:
                member.apply_peer_load(name, row.sums, clock_s, now_s, known=peer.known)
        if body.arc is not None:
            listed = {said[bytes_].replica for bytes_ in body.rows if bytes_ in said}
            self._expire_range(name, peer, body.arc, listed, clock_s, now_s)
        while len(rows) > ROWS_MAX:  # the sender leaves out its arcs
            oldest = rows.pop(next(iter(rows)))
            del said[oldest.bytes_]
            if oldest.taken_by is not None:
                oldest.taken_by.forget_peer(name, now_s)

    def _resolve_member(self, row: ReplicaLoadRow) -> ReplicaState | None:
        """Return the replica of a row. Routers learn of new engines from discovery at different times: the result is
        None if the row belongs to another engine than the current one."""
        member = self._member(row.replica)
        return None if member is None or (row.instance and not _same(row.instance, member)) else member

    def _rebind_rows(self, name: str, peer: Peer, clock_s: float, now_s: float) -> None:
        """Assign the router's rows to replicas again, because discovery has changed the replicas since its last
        message."""
        peer.replaced = self._router.fleet.replaced
        for heard in peer.rows.values():
            member, before = self._resolve_member(heard.row), heard.taken_by
            if member is not before:
                heard.taken_by = member
                if before is not None:
                    before.forget_peer(name, now_s)
                if member is not None:
                    member.apply_peer_load(name, heard.row.sums, clock_s, now_s, known=peer.known)

    def _expire_range(
        self, name: str, peer: Peer, arc: tuple[int, int], listed: set[int], clock_s: float, now_s: float
    ) -> None:
        """Reset replicas of an arc without a row, at which the router has no open work."""
        first, last = arc
        for number in [number for number in peer.rows if first <= number <= last and number not in listed]:
            gone = peer.rows.pop(number)
            del peer.said[gone.bytes_]
            if gone.taken_by is not None:
                gone.taken_by.apply_peer_load(name, _idle(gone.row.sums), clock_s, now_s)
        if first in (0, peer.circle):
            peer.circle = last + 1
            peer.known |= last >= NUMBER_MAX

    def _take_news(
        self,
        peer: Peer,
        placements: list[SharedPlacement],
        ends: list[SharedEnd],
        clock_s: float,
        now_s: float,
        left: int,
    ) -> int:
        """Apply placements and ends with a total cost of at most `left` keys, which no router of this release exceeds.
        Otherwise one message could block the event loop. Return the remaining cost."""
        limits = self._limits
        self._mirror.behind = peer.number < self._number
        for n, shared in enumerate(placements):
            left -= limits.placement_keys + (len(shared.keys) // KEY_BYTES if n else 0)  # the first may be long
            if left < 0:
                self.ignored["long"] += 1
                return 0
            member = self._member(shared.replica)
            if member is not None and self._same_cache(peer, member, shared.replica, clock_s, now_s):
                home = self._member(shared.credit.replica) if shared.credit is not None else None
                self._mirror.place(peer.leases, shared, member, home, now_s)
        for end in ends:
            left -= limits.end_keys
            if left < 0:
                self.ignored["long"] += 1
                return 0
            member = self._member(end.replica)
            speaks = member is not None and self._same_cache(peer, member, end.replica, clock_s, now_s)
            self._mirror.end(peer.leases, end, member if speaks else None, now_s)
        return left

    def _same_cache(self, peer: Peer, member: ReplicaState, number: int, clock_s: float, now_s: float) -> bool:
        """True if a router's row for a replica refers to the current engine and its current cache."""
        heard = peer.rows.get(number)
        if heard is None or heard.taken_by is not member:
            return False
        return not self._caches.is_older(member, clock_s + heard.row.cache_at_ms / 1e3, now_s)

    def _forget(self, name: str, now_s: float, *, go_on: bool = False) -> None:
        peer = self.peers.pop(name)
        self._silent[name] = peer.boot, peer.seq
        if len(self._silent) > self._limits.peers_max:
            del self._silent[next(iter(self._silent))]
        self._mirror.end_all(peer.leases, now_s, go_on=go_on)
        for member in self._router.fleet.members.values():
            member.forget_peer(name, now_s)
        for speeds in self._router.fleet.means.speeds.values():
            speeds.forget_other(name)

    def _member(self, number: int) -> ReplicaState | None:
        members, id_ = self._router.fleet.members, self._ids.get(number)
        if id_ is None and len(self._ids) != len(members):  # some joined since
            self._ids = {number_of(each): each for each in members}
            id_ = self._ids.get(number)
        member = members.get(id_) if id_ is not None else None
        if member is None and id_ is not None:  # it has left
            self._ids = {number_of(each): each for each in members}
        return member


def _lag_of(lags: list[tuple[int, int]], number: int) -> int | None:
    for each, lag_ms in lags:
        if each == number:
            return lag_ms
    return None


def _same(instance: int, member: ReplicaState) -> bool:
    """True if a router means the current engine; also if its instance is unknown here."""
    return not member.replica.instance or instance == instance_of(member.replica.instance)


def _idle(sums: PeerLoad) -> PeerLoad:
    """Return a router's sums for a replica without open work there; its counters stay."""
    return PeerLoad(sent_tokens=sums.sent_tokens, stall_ms=sums.stall_ms)
