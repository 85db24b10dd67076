"""Composition of this router's messages. Their rows contain its open work and its counters for each replica."""

from __future__ import annotations

from bisect import bisect_left
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
    NUMBER_MAX,
    Gap,
    ReplicaLoadRow,
    Retransmit,
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
REPEAT_COUNT = 2  # circles of arcs that still include the row of a replica without open work


@dataclass(slots=True)
class _Counted:
    """Counters of one replica since this process began."""

    number: int  # of the replica
    sent_tokens: int = 0
    stall_ms: float = 0.0
    again: int = 0  # circles that must include its row although it has no open work
    row: bytes = b""  # row as it was last sent; empty after any change since
    replica: Replica | None = None  # the replica at that time


class StatePublisher:
    """Observes the Router (placement/lease_listener.py, LeaseListener), and composes messages from its events."""

    def __init__(
        self,
        router: Router,
        caches: CacheEpochs,
        head: bytes,
        limits: SharingLimits,
        urgent: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._router, self._caches, self._head = router, caches, head
        self._limits, self._urgent, self._tell_changed = limits, urgent, changed
        self._counted: dict[str, _Counted] = {}
        self._changed: dict[str, None] = {}  # replicas with a change since their row was last sent
        # replicas with rows that the next message needs, so that its events can be interpreted
        self._first: dict[str, None] = {}
        self._ids: dict[int, str] = {}  # number of a counted replica -> its id
        self.news = EventLog(limits)
        self._seq = self._turn = 0
        self._said_s = self._arc_s = self._models_s = self._fits_s = float("-inf")
        self._arc_from = 0  # number of the replica at which the next arc begins
        self._full_sync_pending = False  # a new router has not received a full circle of arcs yet
        self._asked: list[Gap] = []  # messages that others missed
        self._urgent_pending = False  # an urgent event occurred since the last message
        self._noted = False  # `changed` was called since the last message
        router.watch = self

    def request_full_sync(self) -> None:
        """Handle a new router: the next messages cover all replicas, and include the learned values."""
        self._models_s = self._arc_s = float("-inf")
        self._arc_from, self._full_sync_pending = 0, True
        self._note()

    def queue_retransmit(self, gap: Gap) -> None:
        """Handle a request for missed messages: the next message repeats their events."""
        if len(self._asked) < self._limits.gaps_max:
            self._asked.append(gap)
            self._press()

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
            self._first[id_], self._ids[counted.number] = None, id_
        counted.again, counted.row, self._changed[id_] = REPEAT_COUNT, b"", None
        self._note()
        return counted

    def _note(self) -> None:
        if not self._noted:
            self._noted = True
            self._tell_changed()

    # -- messages ------------------------------------------------------------------------------------------------

    def say(
        self, now_s: float, lags: Callable[[], list[tuple[int, int]]], missed: Callable[[], list[Gap]]
    ) -> bytes | None:
        """Return the next message, or None if it is too early for one. `lags` and `missed` provide StateApplier's
        content for other routers: their lags, and the messages of theirs that were missed."""
        limits, since_s = self._limits, now_s - self._said_s
        if since_s < limits.urgent_s or (since_s < limits.every_s and not self._urgent_pending):
            return None
        arcs_s = limits.idle_s  # interval of arcs; those of a circle follow each other directly
        if self._arc_from:
            arcs_s = limits.urgent_s if self._full_sync_pending else limits.every_s
        round_ = now_s - self._arc_s >= arcs_s
        if not self._changed and not self._urgent_pending and not round_:
            return None
        arc, listed = self._next_arc(now_s) if round_ else (None, [])
        again = self._take_retransmits()
        rows, fresh = self._rows(listed, now_s)
        keys = limits.keys_max - limits.row_keys * fresh
        placements, first_tokens, ends = self.news.next_few(keys // 2 if again else keys)
        self._said_s, self._noted = now_s, False
        if self._arc_from:  # the next arc of the circle is due with the next message
            self._note()
        self._urgent_pending = bool(self.news or self._changed or self._asked or self._full_sync_pending)
        self._seq += 1
        models = None
        if now_s - self._models_s >= limits.models_s and (models := export_models(self._router)) is not None:
            self._models_s = now_s
        body = SharedMessage(self._seq, int(now_s * 1e3), lags(), arc, rows, self.news.first)
        body.placements, body.first_tokens, body.ends, body.models = placements, first_tokens, ends, models
        self.news.keep(self._seq, placements, ends)
        body.missed, body.again = missed(), again
        if now_s - self._fits_s >= (limits.idle_s if self._turn else limits.models_s):
            self._fits_s, body.fits = now_s, fits_of(self._router, self._next_few())
        if self._urgent_pending:
            self._urgent()
        return encode_message(self._head, body)

    def _take_retransmits(self) -> list[Retransmit]:
        """Return events for one router that missed them, and mark the rows of their replicas for the same message. The
        rest waits for the next message."""
        if not self._asked:
            return []
        again, left = self.news.build_retransmit(self._asked.pop(0), self._limits.keys_max // 2)
        if left is not None:
            self._asked.insert(0, left)
        for number in {each.replica for each in again.placements}:
            if (id_ := self._ids.get(number)) is not None:
                self._first[id_] = None
        return [again]

    def _next_few(self) -> list[str]:
        """Return the replicas with speeds in the next message, in rotation."""
        ids = list(self._router.fleet.members)
        few = ids[self._turn : self._turn + self._limits.fits_max]
        self._turn = self._turn + len(few) if self._turn + len(few) < len(ids) else 0
        return few

    def _next_arc(self, now_s: float) -> tuple[tuple[int, int], list[str]]:
        """Return the next arc, and the replicas with a row in it."""
        for id_ in self._caches.look(now_s):
            if (known := self._counted.get(id_)) is not None:
                known.row = b""
        counted, members = self._counted, self._router.fleet.members
        for id_ in [id_ for id_ in counted if id_ not in members]:
            del self._ids[counted.pop(id_).number]
        known_rows = [(each.number, id_) for id_, each in counted.items() if each.again or members[id_].leases]
        known_rows.sort()
        begin = bisect_left(known_rows, (self._arc_from, ""))
        some = known_rows[begin : begin + self._limits.rows_max]
        first, last = self._arc_from, NUMBER_MAX if begin + len(some) == len(known_rows) else some[-1][0]
        self._arc_s, self._arc_from = now_s, 0 if last == NUMBER_MAX else last + 1
        self._full_sync_pending = self._full_sync_pending and self._arc_from > 0
        for _, id_ in some:
            counted[id_].again -= counted[id_].again > 0
        return (first, last), [id_ for _, id_ in some]

    def _rows(self, listed: list[str], now_s: float) -> tuple[list[bytes], int]:
        """Return (rows of these replicas and of changed ones, up to the limit of a message; number of rows that differ
        from the last sent ones)."""
        counted, members, changed, most = (
            self._counted,
            self._router.fleet.members,
            self._changed,
            self._limits.rows_max,
        )
        ids = list(dict.fromkeys([*listed, *self._first]))
        self._first = {}
        for id_ in ids:
            changed.pop(id_, None)
        fresh = len([id_ for id_ in ids if id_ in counted and not counted[id_].row])
        more = list(islice(changed, max(most // 2, most - fresh)))
        for id_ in more:
            del changed[id_]
        there = [id_ for id_ in ids + more if id_ in members and id_ in counted]
        return [self._row(members[id_], counted[id_], now_s) for id_ in there], fresh + len(more)

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
            len(member.leases) - member.decoding,
            member.context_tokens,
            int(member.clock.context_tokens),
            counted.sent_tokens,
            int(counted.stall_ms),
            int(member.placed_sum_s * 1e3),
        )
        row = ReplicaLoadRow(counted.number, instance_of(replica.instance), int(cache_s * 1e3), began, sums)
        counted.row, counted.replica = row_bytes(row), replica
        return counted.row
