"""What other routers say: their last messages, put where placing looks it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from router.core.facts.peers import PeerSums
from router.core.fleet.member import Member
from router.core.placement.router import Router
from router.core.sharing.delays import Delay
from router.core.sharing.engines import Caches, instance_of, number_of
from router.core.sharing.limits import SharingLimits
from router.core.sharing.messages import (
    KEY_BYTES,
    NUMBER_MAX,
    ROWS_MAX,
    Gap,
    SharedEnd,
    SharedMessage,
    SharedPlacement,
    SharedRow,
    body_of,
    row_of,
    sender_of,
)
from router.core.sharing.mirror import Leases, Mirror
from router.core.sharing.models import take_fits, take_models


class HeardRow(Struct, gc=False):
    """The last row of another router at a replica."""

    bytes_: bytes
    row: SharedRow
    taken_by: Member | None  # the replica; None where the router means another engine


@dataclass(slots=True)
class Peer:
    """Another router."""

    number: int
    boot: int
    seq: int  # the number of its last message
    heard_s: float
    known: bool = False  # a circle of arcs was heard: what has no row in it has not been counted yet
    circle: int = 0  # number of a replica up to which it was heard
    replaced: int = -1  # Fleet.replaced as its rows were taken
    delay: Delay = field(default_factory=Delay)
    rows: dict[int, HeardRow] = field(default_factory=dict)  # last rows, by the number of the replica
    said: dict[bytes, SharedRow] = field(default_factory=dict)  # the same ones, by their bytes in messages
    leases: Leases = field(default_factory=Leases)


class Hearer:
    """Writes what routers say to the fleet's members, and through Mirror to caches."""

    def __init__(
        self,
        router: Router,
        caches: Caches,
        name: str,
        boot: int,
        limits: SharingLimits,
        greet: Callable[[], None],
        asked: Callable[[Gap], None],
        recounted: Callable[[str], None],
    ) -> None:
        """`greet()` is called when another router is heard for the first time, `asked` with messages of ours that one
        has missed, `recounted` with replicas at which less waits of ours than was told."""
        self._router, self._caches, self._name, self._boot = router, caches, name, boot
        self._limits, self._greet, self._asked = limits, greet, asked
        self._silent: dict[str, tuple[int, int]] = {}  # routers that were silent too long: boot, last message
        self._missed: list[Gap] = []  # messages of others that did not come
        self._number = number_of(name)
        self._mirror = Mirror(router, limits, recounted)
        self.peers: dict[str, Peer] = {}
        self.ignored = dict.fromkeys(("version", "namesake", "old", "many", "long"), 0)
        self._ids: dict[int, str] = {}  # number of a replica -> its id
        self._divided: tuple[list[str], frozenset[str]] = [], frozenset()  # routers and replicas, as last divided

    def hear(self, message: bytes, now_s: float) -> None:
        """Take a message. Raises BadMessage."""
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
            peer = self._welcome(name, boot, body.seq, now_s)
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
        """Forget who has been silent for too long, and go on with long prompts: each time takes as long as hearing a
        message."""
        self._mirror.grow(now_s)
        due_s = now_s - self._limits.silent_s
        for name in [name for name, peer in self.peers.items() if peer.heard_s < due_s]:
            self._forget(name, now_s)
        self._divide()

    def alone(self, now_s: float) -> None:
        """Forget everybody: the channel is gone, and the others go on as this router does."""
        for name in list(self.peers):
            self._forget(name, now_s, go_on=True)
        self._divide()

    def _divide(self) -> None:
        """Say which replicas this router takes first of equals: every so many-th by id, as there are routers. All do so
        by the same names and ids, so each takes others."""
        names = sorted([self._name, *self.peers])
        if names != self._divided[0] or self._router.fleet.members.keys() != self._divided[1]:
            ids = sorted(self._router.fleet.members)
            self._divided = names, frozenset(ids)
            own = ids[names.index(self._name) :: len(names)] if len(names) > 1 else []
            self._router.own = frozenset(own)

    def lags(self) -> list[tuple[int, int]]:
        """What each router is to be told of how late it is heard."""
        return [(peer.number, lag) for peer in self.peers.values() if (lag := peer.delay.lag_ms) is not None]

    def missed(self) -> list[Gap]:
        """Messages of others that did not come since the last call."""
        missed, self._missed = self._missed, []
        return missed

    # -- inside --------------------------------------------------------------------------------------------------

    def _take(self, name: str, peer: Peer, body: SharedMessage, now_s: float) -> None:
        peer.delay.heard(body.sent_ms, _lag_of(body.lags, self._number), now_s)
        clock_s = now_s - peer.delay.delay_s - body.sent_ms / 1e3
        self._take_rows(name, peer, body, clock_s, now_s)
        for first in body.first_tokens:
            member = self._member(first.replica)
            if member is not None:
                member.others_first_token(min(clock_s + first.at_ms / 1e3, now_s), first.computed_tokens)
        left = self._limits.heard_factor * self._limits.keys_max
        for again in body.again:
            if again.router == self._number:
                left = self._take_news(peer, again.placements, again.ends, clock_s, now_s, left)
                break  # a message has news again for one router, and once
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

    def _welcome(self, name: str, boot: int, seq: int, now_s: float) -> Peer | None:
        """Another process of a router we knew, or a router we did not know; None where there are too many."""
        if name in self.peers:
            self._forget(name, now_s)
        if len(self.peers) >= self._limits.peers_max:
            self.ignored["many"] += 1
            return None
        self._greet()
        # One that was silent for a while goes on where it was; behind that nothing is known of it.
        known_boot, last = self._silent.pop(name, (boot, -1))
        known = last if known_boot == boot and last < seq else -1
        peer = self.peers[name] = Peer(number_of(name), boot, known, now_s)
        return peer

    def _take_rows(self, name: str, peer: Peer, body: SharedMessage, clock_s: float, now_s: float) -> None:
        rows, said = peer.rows, peer.said
        if peer.replaced != self._router.fleet.replaced:
            self._meant_anew(name, peer, clock_s, now_s)
        fresh = [(bytes_, row_of(bytes_)) for bytes_ in body.rows if bytes_ not in said]  # all, before any is taken
        for bytes_, row in fresh:
            member, before = self._meant(row), rows.get(row.replica)
            if before is not None:
                del said[before.bytes_]
                if before.taken_by is not None and before.taken_by is not member:
                    before.taken_by.forget_other(name, now_s)
            said[bytes_] = row
            rows[row.replica] = HeardRow(bytes_, row, member)
            if member is not None:
                member.take_others(name, row.sums, clock_s, now_s, known=peer.known)
        if body.arc is not None:
            listed = {said[bytes_].replica for bytes_ in body.rows if bytes_ in said}
            self._end_arc(name, peer, body.arc, listed, clock_s, now_s)
        while len(rows) > ROWS_MAX:  # arcs do not come
            oldest = rows.pop(next(iter(rows)))
            del said[oldest.bytes_]
            if oldest.taken_by is not None:
                oldest.taken_by.forget_other(name, now_s)

    def _meant(self, row: SharedRow) -> Member | None:
        """The replica that a row is of. Discovery does not tell all routers at the same moment which engines there are:
        None where the row is of another one than is there."""
        member = self._member(row.replica)
        return None if member is None or (row.instance and not _same(row.instance, member)) else member

    def _meant_anew(self, name: str, peer: Peer, clock_s: float, now_s: float) -> None:
        """Discovery has told of replicas since the router's last message: look whose its rows are now."""
        peer.replaced = self._router.fleet.replaced
        for heard in peer.rows.values():
            member, before = self._meant(heard.row), heard.taken_by
            if member is not before:
                heard.taken_by = member
                if before is not None:
                    before.forget_other(name, now_s)
                if member is not None:
                    member.take_others(name, heard.row.sums, clock_s, now_s, known=peer.known)

    def _end_arc(
        self, name: str, peer: Peer, arc: tuple[int, int], listed: set[int], clock_s: float, now_s: float
    ) -> None:
        """Replicas of an arc that are not listed have nothing of that router's."""
        first, last = arc
        for number in [number for number in peer.rows if first <= number <= last and number not in listed]:
            gone = peer.rows.pop(number)
            del peer.said[gone.bytes_]
            if gone.taken_by is not None:
                gone.taken_by.take_others(name, _idle(gone.row.sums), clock_s, now_s)
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
        """Take placements and ends, as far as they take no longer to hear than `left` keys do, which no router of ours
        says more than: one message would hold everything up. Returns what is left of these."""
        limits = self._limits
        self._mirror.behind = peer.number < self._number
        for n, shared in enumerate(placements):
            left -= limits.placement_keys + (len(shared.keys) // KEY_BYTES if n else 0)  # the first may be long
            if left < 0:
                self.ignored["long"] += 1
                return 0
            member = self._member(shared.replica)
            if member is not None and self._speaks_of(peer, member, shared.replica, clock_s, now_s):
                home = self._member(shared.credit.replica) if shared.credit is not None else None
                self._mirror.place(peer.leases, shared, member, home, now_s)
        for end in ends:
            left -= limits.end_keys
            if left < 0:
                self.ignored["long"] += 1
                return 0
            member = self._member(end.replica)
            speaks = member is not None and self._speaks_of(peer, member, end.replica, clock_s, now_s)
            self._mirror.end(peer.leases, end, member if speaks else None, now_s)
        return left

    def _speaks_of(self, peer: Peer, member: Member, number: int, clock_s: float, now_s: float) -> bool:
        """Whether what a router says of a replica is of the engine that is there, and of the cache that it has."""
        heard = peer.rows.get(number)
        if heard is None or heard.taken_by is not member:
            return False
        return not self._caches.outlived(member, clock_s + heard.row.cache_at_ms / 1e3, now_s)

    def _forget(self, name: str, now_s: float, *, go_on: bool = False) -> None:
        peer = self.peers.pop(name)
        self._silent[name] = peer.boot, peer.seq
        if len(self._silent) > self._limits.peers_max:
            del self._silent[next(iter(self._silent))]
        self._mirror.end_all(peer.leases, now_s, go_on=go_on)
        for member in self._router.fleet.members.values():
            member.forget_other(name, now_s)
        for speeds in self._router.fleet.means.speeds.values():
            speeds.forget_other(name)

    def _member(self, number: int) -> Member | None:
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


def _same(instance: int, member: Member) -> bool:
    """Whether a router means the engine that is there, as far as is known here."""
    return not member.replica.instance or instance == instance_of(member.replica.instance)


def _idle(sums: PeerSums) -> PeerSums:
    """What a router says of a replica at which it has nothing open any more: what it has counted stays."""
    return PeerSums(sent_tokens=sums.sent_tokens, stall_ms=sums.stall_ms)
