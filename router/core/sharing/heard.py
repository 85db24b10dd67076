"""What other routers say: their last messages, put where placing looks it up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.fleet.member import Member
from router.core.fleet.others import PeerSums
from router.core.placement.router import Router
from router.core.sharing.delays import Delay
from router.core.sharing.engines import instance_of, number_of
from router.core.sharing.limits import SharingLimits
from router.core.sharing.messages import SharedMessage, SharedRow, body_of, sender_of
from router.core.sharing.mirror import Leases, Mirror
from router.core.sharing.models import adopt


@dataclass(slots=True)
class Peer:
    """Another router."""

    number: int
    boot: int
    seq: int  # the number of its last message
    heard_s: float
    delay: Delay = field(default_factory=Delay)
    busy: dict[str, SharedRow] = field(default_factory=dict)  # its last rows, by replica
    leases: Leases = field(default_factory=OrderedDict)
    open: int = 0
    waiting_ms: int = 0


class Heard:
    """Writes what routers say to the fleet's members."""

    def __init__(self, router: Router, name: str, boot: int, limits: SharingLimits, greet: Callable[[], None]) -> None:
        """`greet()` is called when another router is heard for the first time."""
        self._greet = greet
        self._router, self._name, self._boot, self._limits = router, name, boot, limits
        self.peers: dict[str, Peer] = {}
        self.ignored = dict.fromkeys(("version", "namesake", "old", "many"), 0)
        self._number = number_of(name)
        self._mirror = Mirror(router, limits.leases_max)
        self._ids: dict[int, str] = {}  # number of a replica -> its id
        self._of: list[str] = []  # ids that `_ids` was made of

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
            if peer is not None:
                self._forget(name, now_s)
            if len(self.peers) >= self._limits.peers_max:
                self.ignored["many"] += 1
                return
            self._greet()
            peer = self.peers[name] = Peer(number_of(name), boot, -1, now_s)
        if body.seq <= peer.seq:
            self.ignored["old"] += 1
            return
        peer.seq, peer.heard_s = body.seq, now_s
        peer.delay.heard(body.sent_ms, dict(body.lags).get(self._number), now_s)
        self._take_rows(name, peer, body, now_s)
        self._take_news(peer, body, now_s)
        if body.models is not None:
            adopt(self._router, body.models)

    def tick(self, now_s: float) -> None:
        """Forget who has been silent for too long."""
        due_s = now_s - self._limits.silent_s
        for name in [name for name, peer in self.peers.items() if peer.heard_s < due_s]:
            self._forget(name, now_s)

    def alone(self, now_s: float) -> None:
        """Forget everybody."""
        for name in list(self.peers):
            self._forget(name, now_s)

    def lags(self) -> list[tuple[int, int]]:
        """What each router is to be told of how late it is heard."""
        return [(peer.number, lag) for peer in self.peers.values() if (lag := peer.delay.lag_ms) is not None]

    # -- inside --------------------------------------------------------------------------------------------------

    def _take_rows(self, name: str, peer: Peer, body: SharedMessage, now_s: float) -> None:
        members, ids = self._router.fleet.members, self._known()
        before, peer.busy, sent_s = peer.busy, {}, now_s - peer.delay.delay_s
        peer.open = peer.waiting_ms = 0
        for row in body.rows:
            id_ = ids.get(row.replica)
            member = members.get(id_) if id_ is not None else None
            if member is None or not _same(row.instance, member.replica.instance):
                continue  # discovery does not tell all routers at the same moment
            peer.busy[member.id] = row
            if row.computed_ms != (before[member.id].computed_ms if member.id in before else -1):
                member.others.first_token(sent_s - row.token_age_ms / 1e3)
            peer.open += row.open
            peer.waiting_ms += row.waiting_ms
            before.pop(member.id, None)
            member.take_others(name, _sums(row), sent_s)
        for id_ in before:
            member = members.get(id_)
            idle = member.others.idle(name) if member is not None else None
            if member is not None and idle is not None:
                member.take_others(name, idle, now_s)

    def _take_news(self, peer: Peer, body: SharedMessage, now_s: float) -> None:
        for shared in body.placements:
            member = self._member(shared.replica)
            if member is not None:
                home = self._member(shared.credit.replica) if shared.credit is not None else None
                self._mirror.place(peer.leases, shared, member, home, now_s)
        for end in body.ends:
            member = self._member(end.replica)
            if member is not None:
                self._mirror.end(peer.leases, end, member, now_s)
        self._mirror.end_before(peer.leases, body.first, now_s)

    def _member(self, number: int) -> Member | None:
        id_ = self._ids.get(number)
        return self._router.fleet.members.get(id_) if id_ is not None else None

    def _forget(self, name: str, now_s: float) -> None:
        self._mirror.end_all(self.peers.pop(name).leases, now_s)
        for member in self._router.fleet.members.values():
            member.forget_other(name, now_s)

    def _known(self) -> dict[int, str]:
        """Ids of replicas by their numbers."""
        members = self._router.fleet.members
        if len(members) != len(self._of) or any(map(str.__ne__, members, self._of)):
            self._of = list(members)
            self._ids = {number_of(id_): id_ for id_ in members}
        return self._ids


def _same(said: int, instance: str) -> bool:
    """Whether a router means the engine that is there, where both know which."""
    return not said or not instance or said == instance_of(instance)


def _sums(row: SharedRow) -> PeerSums:
    waiting, decoding_tokens = min(row.waiting, row.open), min(row.decoding_tokens, row.context_tokens)
    return PeerSums(
        row.waiting_ms,
        min(row.head_ms, row.waiting_ms),
        row.head_age_ms,
        row.open,
        waiting,
        row.context_tokens,
        decoding_tokens,
        row.sent_tokens,
        row.computed_ms,
        row.stall_ms,
    )
