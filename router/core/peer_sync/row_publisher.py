"""Composition of this router's messages. Their rows contain its open work and its counters for each replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.peer_sync.cache_epochs import CacheEpochs, instance_of, number_of
from router.core.peer_sync.event_log import EventLog
from router.core.peer_sync.learned_models import export_models, fits_of
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.messages import (
    ROWS_MAX,
    ReplicaLoadRow,
    SharedMessage,
    encode_message,
    row_bytes,
)
from router.core.placement.answer_reuse import AnswerCredit
from router.core.placement.router import Router
from router.core.types.peer_load import PeerLoad
from router.core.types.placements import Outcome
from router.core.types.replicas import Replica

URGENT_REPLICAS_PER_PLACEMENT = 32  # a message is urgent from one unsent placement for each 32 replicas


@dataclass(slots=True)
class _Counted:
    """Counters of one replica since this process began."""

    number: int  # of the replica
    sent_tokens: int = 0
    stall_ms: float = 0.0
    row: bytes = b""  # row as it was last sent; empty after any change since
    replica: Replica | None = None  # the replica at that time


class StatePublisher:
    """Observes the Router (placement/lease_listener.py, LeaseListener), and composes messages from its events."""

    def __init__(
        self,
        router: Router,
        caches: CacheEpochs,
        limits: SharingLimits,
        urgent: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._router, self._caches, self._limits, self._urgent, self._tell_changed = (
            router,
            caches,
            limits,
            urgent,
            changed,
        )
        self._counted: dict[str, _Counted] = {}
        self._changed: dict[str, None] = {}  # replicas with a change since their row was last sent
        # replicas with rows that the next message needs, so that its events can be interpreted
        self._first: dict[str, None] = {}
        self._gone: list[bytes] = []  # rows of replicas that have left, for the next message
        self.news = EventLog(limits)
        self._turn = 0
        self._said_s = self._look_s = self._models_s = self._fits_s = float("-inf")
        self._urgent_pending = False  # an urgent event occurred since the last message
        self._noted = False  # `changed` was called since the last message
        router.watch = self

    # -- events of the router (LeaseListener) --------------------------------------------------------------------------

    def on_opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """Record a placed lease. It is urgent if it changes prices by more than the difference that counts as a tie. It
        is also urgent after many placements since the last message, because other routers do not know of them and would
        choose the same replicas."""
        counted, member = self._change(lease.replica), self._router.fleet.members[lease.replica]
        counted.sent_tokens += lease.prompt_tokens
        self.news.add_placement(lease, member.wait_ms(now_s), credit)
        untold = self.news.placements * URGENT_REPLICAS_PER_PLACEMENT >= len(self._router.fleet.members)
        if untold or lease.prefill_ms > member.speeds.units()[0]:
            self._press()

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Record the first token of a lease, which ends its prefill."""
        counted = self._change(lease.replica)
        self.news.first_token(lease, now_s)
        counted.stall_ms += lease.stall_ms

    def on_ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """Record the end of a lease."""
        self._change(lease.replica)
        self.news.add_end(lease, outcome, answer_blocks, computed=computed)

    def on_recount(self, replica: str, stall_ms: float = 0.0) -> None:
        """Record that less prefill waits at a replica than was reported. A completed prefill stalled its streams for
        `stall_ms`."""
        self._change(replica).stall_ms += stall_ms

    def on_orphaned(self, lease: Lease) -> None:
        """Record the end of a lease on a replica that has left."""
        self.news.drop_lease(lease)

    def _press(self) -> None:
        if not self._urgent_pending:
            self._urgent_pending = True
            self._urgent()

    def _change(self, id_: str) -> _Counted:
        counted = self._counted.get(id_)
        if counted is None:
            counted = self._counted[id_] = _Counted(number_of(id_))
            self._first[id_] = None
        counted.row, self._changed[id_] = b"", None
        if not self._noted:
            self._noted = True
            self._tell_changed()
        return counted

    # -- messages ------------------------------------------------------------------------------------------------

    def say(self, now_s: float) -> bytes | None:
        """Return the next message, or None if it is too early for one, or nothing has changed."""
        limits, since_s = self._limits, now_s - self._said_s
        if since_s < limits.urgent_s or (since_s < limits.every_s and not self._urgent_pending):
            return None
        if now_s - self._look_s >= limits.idle_s:
            self._look_s = now_s
            self._look(now_s)
        models_due = now_s - self._models_s >= limits.models_s
        fits_due = now_s - self._fits_s >= (limits.idle_s if self._turn else limits.models_s)
        if not (self._changed or self._gone or self._urgent_pending or models_due or fits_due):
            return None
        rows, fresh = self._rows(now_s)
        body = SharedMessage(rows)
        body.placements, body.first_tokens, body.ends = self.news.next_few(limits.keys_max - limits.row_keys * fresh)
        body.first = self.news.first
        self._said_s, self._noted = now_s, False
        self._urgent_pending = bool(self.news or self._changed)
        if models_due:
            self._models_s, body.models = now_s, export_models(self._router)
        if fits_due:
            self._fits_s, body.fits = now_s, fits_of(self._router, self._next_few())
        if self._urgent_pending:
            self._urgent()
        return encode_message(body)

    def state(self, now_s: float) -> bytes:
        """Return the complete state, for a router that has not received all messages of this one."""
        members = self._router.fleet.members
        known = [(members[id_], counted) for id_, counted in self._counted.items() if id_ in members]
        rows = [self._row(member, counted, now_s) for member, counted in known[:ROWS_MAX]]
        return encode_message(SharedMessage(rows, self.news.first, models=export_models(self._router)))

    def _next_few(self) -> list[str]:
        """Return the replicas with speeds in the next message, in rotation."""
        ids = list(self._router.fleet.members)
        few = ids[self._turn : self._turn + self._limits.fits_max]
        self._turn = self._turn + len(few) if self._turn + len(few) < len(ids) else 0
        return few

    def _look(self, now_s: float) -> None:
        """Find changes without an event: a new cache, another engine, a prompt that leaves the queue with the clock,
        and replicas that have left."""
        counted, members = self._counted, self._router.fleet.members
        for id_ in self._caches.look(now_s):
            if (known := counted.get(id_)) is not None:
                known.row, self._changed[id_] = b"", None
        for id_ in [id_ for id_ in counted if id_ not in members]:
            gone = counted.pop(id_)
            self._first.pop(id_, None)
            sums = PeerLoad(sent_tokens=gone.sent_tokens, stall_ms=int(gone.stall_ms))
            self._gone.append(row_bytes(ReplicaLoadRow(gone.number, 0, int(now_s * 1e3), False, sums)))
        for id_, known in counted.items():
            member = members[id_]
            head = member.queue.head
            if member.replica is not known.replica or (head is not None and not head.streams):
                known.row, self._changed[id_] = b"", None

    def _rows(self, now_s: float) -> tuple[list[bytes], int]:
        """Return (rows of changed replicas, up to the limit of a message; number of those that differ from the last
        sent ones)."""
        counted, members, changed, most = (
            self._counted,
            self._router.fleet.members,
            self._changed,
            self._limits.rows_max,
        )
        gone, self._gone = self._gone[:most], self._gone[most:]
        ids, self._first = list(self._first), {}
        for id_ in ids:
            changed.pop(id_, None)
        more = list(islice(changed, max(most // 2, most - len(ids))))
        for id_ in more:
            del changed[id_]
        there = [id_ for id_ in ids + more if id_ in members and id_ in counted]
        return gone + [self._row(members[id_], counted[id_], now_s) for id_ in there], len(gone) + len(there)

    def _row(self, member: ReplicaState, counted: _Counted, now_s: float) -> bytes:
        queue, replica = member.queue, member.replica
        head = queue.head
        if head is not None and not head.streams:  # A prompt without a stream leaves with the clock.
            queue.decay(now_s)
            head = queue.head
        elif counted.row and counted.replica is replica:
            return counted.row
        cache_s, began = self._caches.get_epoch(member, now_s)
        sums = PeerLoad(
            int(queue.waiting_ms()),
            int(head.prefill_ms) if head is not None else 0,
            int(head.queued_s * 1e3) if head is not None else 0,
            len(member.leases),
            len(member.leases) - member.work.decoding,
            member.work.context_tokens,
            int(member.clock.context_tokens),
            counted.sent_tokens,
            int(counted.stall_ms),
            int(member.work.placed_sum_s * 1e3),
        )
        row = ReplicaLoadRow(counted.number, instance_of(replica.instance), int(cache_s * 1e3), began, sums)
        counted.row, counted.replica = row_bytes(row), replica
        return counted.row
