"""Reception of other routers' messages, which updates the state that placement reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from router.core.fleet.member import ReplicaState
from router.core.peer_sync.cache_epochs import CacheEpochs, instance_of, number_of
from router.core.peer_sync.learned_models import take_fits, take_models
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import (
    KEY_BYTES,
    ROWS_MAX,
    ReplicaLoadRow,
    SharedEnd,
    SharedMessage,
    SharedPlacement,
    decode_message,
    row_of,
)
from router.core.peer_sync.remote_leases import Leases, RemoteLeases
from router.core.placement.router import Router


class PeerRow(Struct, gc=False):
    """The last row of another router for a replica."""

    bytes_: bytes
    row: ReplicaLoadRow
    taken_by: ReplicaState | None  # the replica; None if the router means another engine


@dataclass(slots=True)
class Peer:
    """Another router."""

    number: int
    known: bool  # its complete state was received: a replica without a row had no counts yet
    replaced: int = -1  # Fleet.replaced when its rows were applied
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
        limits: SharingLimits,
        recounted: Callable[[str], None],
    ) -> None:
        """`recounted` is called with a replica at which less prefill of ours waits than was reported."""
        self._router, self._caches, self._name, self._limits = router, caches, name, limits
        self._number = number_of(name)
        self._mirror = RemoteLeases(router, limits, recounted)
        self.peers: dict[str, Peer] = {}
        self.long = 0  # messages with events beyond the limit
        self._ids: dict[int, str] = {}  # number of a replica -> its id
        self._divided: tuple[list[str], frozenset[str]] = [], frozenset()  # routers and replicas at the last division

    def begin(self, name: str) -> None:
        """Add a router with a process that has just started, and has no state yet."""
        self.peers[name] = Peer(number_of(name), known=True)

    def hear(self, name: str, message: bytes, clock_s: float, now_s: float) -> None:
        """Apply a message. Raises BadMessage."""
        body = decode_message(message)
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer(number_of(name), known=False)
        self._take(name, peer, body, clock_s, now_s)

    def restore(self, name: str, state: bytes, clock_s: float, now_s: float) -> Iterator[None]:
        """Apply a router's complete state in place of its messages so far. Yield after each step, which costs as much
        as one message. Raises BadMessage."""
        body, step = decode_message(state), self._limits.rows_max
        if name in self.peers:
            self.forget(name, now_s, go_on=True)
        peer = self.peers[name] = Peer(number_of(name), known=False)
        for begin in range(0, len(body.rows), step):
            self._take_rows(name, peer, body.rows[begin : begin + step], clock_s, now_s)
            yield
            if self.peers.get(name) is not peer:
                return  # the router has fallen silent in the meantime
        peer.known, body.rows = True, []
        self._take(name, peer, body, clock_s, now_s)

    def tick(self, now_s: float) -> None:
        """Continue with long prompts. A call costs as much as one message."""
        self._mirror.grow(now_s)
        self._partition_replicas()

    def on_disconnected(self, now_s: float) -> None:
        """Drop all other routers, because the channel is gone. They keep working, like this router."""
        for name in list(self.peers):
            self.forget(name, now_s, go_on=True)
        self._partition_replicas()

    def forget(self, name: str, now_s: float, *, go_on: bool = False) -> None:
        """Drop a router with its open work. With `go_on` it keeps working, and its prompts will be computed."""
        peer = self.peers.pop(name, None)
        if peer is None:
            return
        self._mirror.end_all(peer.leases, now_s, go_on=go_on)
        for member in self._router.fleet.members.values():
            member.forget_peer(name, now_s)
        for speeds in self._router.fleet.means.speeds.values():
            speeds.forget_other(name)

    def _partition_replicas(self) -> None:
        """Select the replicas that this router prefers among equals: every n-th by id, with n routers. All routers do
        so with the same names and ids, so each prefers different replicas."""
        names = sorted([self._name, *self.peers])
        if names != self._divided[0] or self._router.fleet.members.keys() != self._divided[1]:
            ids = sorted(self._router.fleet.members)
            self._divided = names, frozenset(ids)
            own = ids[names.index(self._name) :: len(names)] if len(names) > 1 else []
            self._router.own = frozenset(own)

    # -- internals -----------------------------------------------------------------------------------------------

    def _take(self, name: str, peer: Peer, body: SharedMessage, clock_s: float, now_s: float) -> None:
        self._take_rows(name, peer, body.rows, clock_s, now_s)
        for first in body.first_tokens:
            member = self._member(first.replica)
            if member is not None:
                member.on_peer_first_token(min(clock_s + first.at_ms / 1e3, now_s), first.computed_tokens)
        if body.placements or body.ends:
            self._take_news(peer, body.placements, body.ends, clock_s, now_s)
        if peer.leases:
            self._mirror.end_before(peer.leases, body.first, now_s)
        if body.models is not None:
            take_models(self._router, name, body.models)
        for fits in body.fits:
            member = self._member(fits.replica)
            if member is not None:
                take_fits(name, member, fits)

    def _take_rows(self, name: str, peer: Peer, listed: list[bytes], clock_s: float, now_s: float) -> None:
        rows, said = peer.rows, peer.said
        if peer.replaced != self._router.fleet.replaced:
            self._rebind_rows(name, peer, clock_s, now_s)
        # decode all before any is applied
        fresh = [(bytes_, row_of(bytes_)) for bytes_ in listed if bytes_ not in said]
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
        while len(rows) > ROWS_MAX:
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

    def _take_news(
        self, peer: Peer, placements: list[SharedPlacement], ends: list[SharedEnd], clock_s: float, now_s: float
    ) -> None:
        """Apply placements and ends up to a total cost that no router of this release exceeds. Otherwise one message
        could block the event loop."""
        left = self._limits.heard_factor * self._limits.keys_max
        limits = self._limits
        self._mirror.behind = peer.number < self._number
        for n, shared in enumerate(placements):
            left -= limits.placement_keys + (len(shared.keys) // KEY_BYTES if n else 0)  # the first may be long
            if left < 0:
                self.long += 1
                return
            member = self._member(shared.replica)
            if member is not None and self._same_cache(peer, member, shared.replica, clock_s, now_s):
                home = self._member(shared.credit.replica) if shared.credit is not None else None
                self._mirror.place(peer.leases, shared, member, home, now_s)
        for end in ends:
            left -= limits.end_keys
            if left < 0:
                self.long += 1
                return
            member = self._member(end.replica)
            speaks = member is not None and self._same_cache(peer, member, end.replica, clock_s, now_s)
            self._mirror.end(peer.leases, end, member if speaks else None, now_s)

    def _same_cache(self, peer: Peer, member: ReplicaState, number: int, clock_s: float, now_s: float) -> bool:
        """True if a router's row for a replica refers to the current engine and its current cache."""
        heard = peer.rows.get(number)
        if heard is None or heard.taken_by is not member:
            return False
        return not self._caches.is_older(member, clock_s + heard.row.cache_at_ms / 1e3, now_s)

    def _member(self, number: int) -> ReplicaState | None:
        members, id_ = self._router.fleet.members, self._ids.get(number)
        if id_ is None and len(self._ids) != len(members):  # some joined since
            self._ids = {number_of(each): each for each in members}
            id_ = self._ids.get(number)
        member = members.get(id_) if id_ is not None else None
        if member is None and id_ is not None:  # it has left
            self._ids = {number_of(each): each for each in members}
        return member


def _same(instance: int, member: ReplicaState) -> bool:
    """True if a router means the current engine; also if its instance is unknown here."""
    return not member.replica.instance or instance == instance_of(member.replica.instance)
