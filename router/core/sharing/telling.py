"""What this router has open at each replica, and what it counted: the rows of its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.core.facts.peers import PeerSums
from router.core.facts.placements import Outcome
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member
from router.core.placement.credit import AnswerCredit
from router.core.placement.router import Router
from router.core.sharing.engines import Caches, instance_of, number_of
from router.core.sharing.limits import SharingLimits
from router.core.sharing.messages import Gap, SharedMessage, SharedRow, encoded
from router.core.sharing.models import fits_of, learned
from router.core.sharing.news import News

AGAIN = 2  # whole messages that still have the row of a replica at which nothing is open any more


@dataclass(slots=True)
class _Counted:
    """What was counted at one replica since this process began."""

    number: int  # of the replica
    sent_tokens: int = 0
    stall_ms: float = 0.0
    again: int = 0  # whole messages that are to have its row though nothing is open there


class Teller:
    """Watches the Router (placement/watch.py, LeaseWatch), and makes messages of what it sees."""

    def __init__(
        self, router: Router, caches: Caches, head: bytes, limits: SharingLimits, urgent: Callable[[], None]
    ) -> None:
        self._router, self._caches, self._head = router, caches, head
        self._limits, self._urgent = limits, urgent
        self._counted: dict[str, _Counted] = {}
        self._changed: dict[str, None] = {}  # replicas at which anything happened since the last message
        self.news = News(limits)
        self._seq = self._turn = 0
        self._said_s = self._whole_s = self._models_s = float("-inf")
        self._asked: list[Gap] = []  # messages that others missed
        self._pressing = False  # something urgent happened since the last message
        router.watch = self

    def greet(self) -> None:
        """Another router is new here: the next message is whole, and has what was learned."""
        self._models_s = self._whole_s = float("-inf")

    def asked(self, gap: Gap) -> None:
        """A router missed messages: the next one has their news."""
        if len(self._asked) < self._limits.gaps_max:
            self._asked.append(gap)
            self._press()

    # -- what the router does (LeaseWatch) ----------------------------------------------------------------------------

    def opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """A lease was given. It is urgent where it moves prices by more than what cannot be told apart."""
        counted, member = self._change(lease.replica), self._router.fleet.members[lease.replica]
        counted.sent_tokens += lease.prompt_tokens
        self.news.placed(lease, member.wait_ms(now_s), credit)
        if lease.prefill_ms > member.speeds.units()[0]:
            self._press()

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The prefill of a lease is over."""
        counted = self._change(lease.replica)
        self.news.first_token(lease, now_s)
        counted.stall_ms += lease.stall_ms

    def ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """A lease is back."""
        self._change(lease.replica)
        self.news.ended(lease, outcome, answer_blocks, computed=computed)

    def gone(self, lease: Lease) -> None:
        """A lease is back from a replica that has left."""
        self.news.gone(lease)

    def _press(self) -> None:
        if not self._pressing:
            self._pressing = True
            self._urgent()

    def _change(self, id_: str) -> _Counted:
        counted = self._counted.get(id_)
        if counted is None:
            counted = self._counted[id_] = _Counted(number_of(id_))
        counted.again, self._changed[id_] = AGAIN, None
        return counted

    # -- messages ------------------------------------------------------------------------------------------------

    def say(
        self, now_s: float, lags: Callable[[], list[tuple[int, int]]], missed: Callable[[], list[Gap]]
    ) -> bytes | None:
        """The next message, with what Hearer has to say to other routers: their `lags`, and what was `missed` of their
        messages. None where it is too soon for one."""
        limits, since_s = self._limits, now_s - self._said_s
        if since_s < limits.urgent_s or (since_s < limits.every_s and not self._pressing):
            return None
        whole = now_s - self._whole_s >= limits.idle_s
        if not self._changed and not self._pressing and not whole:
            return None
        rows = self._all_rows(now_s) if whole else self._rows(self._changed, now_s)
        if whole:
            self._whole_s = now_s
        self._changed = {}
        placements, first_tokens, ends = self.news.next_few()
        self._said_s, self._pressing = now_s, bool(self.news)
        self._seq += 1
        models = None
        if now_s - self._models_s >= limits.models_s and (models := learned(self._router)) is not None:
            self._models_s = now_s
        body = SharedMessage(self._seq, int(now_s * 1e3), lags(), whole, rows, self.news.first)
        body.placements, body.first_tokens, body.ends, body.models = placements, first_tokens, ends, models
        self.news.keep(self._seq, placements, ends)
        body.missed, body.again, self._asked = missed(), list(map(self.news.again, self._asked)), []
        if whole:
            body.fits = fits_of(self._router, self._next_few())
        if self._pressing:
            self._urgent()
        return encoded(self._head, body)

    def _next_few(self) -> list[str]:
        """Replicas whose own speeds are told next, by turns."""
        ids = list(self._router.fleet.members)
        few = ids[self._turn : self._turn + self._limits.fits_max]
        self._turn = self._turn + len(few) if self._turn + len(few) < len(ids) else 0
        return few

    def _all_rows(self, now_s: float) -> list[SharedRow]:
        self._caches.look(now_s)
        counted, members = self._counted, self._router.fleet.members
        for id_ in [id_ for id_ in counted if id_ not in members]:
            del counted[id_]
        listed = [id_ for id_, each in counted.items() if each.again or members[id_].leases]
        for id_ in listed:
            counted[id_].again -= counted[id_].again > 0
        return self._rows(listed, now_s)

    def _rows(self, ids: Iterable[str], now_s: float) -> list[SharedRow]:
        counted, members = self._counted, self._router.fleet.members
        return [self._row(members[id_], counted[id_], now_s) for id_ in ids if id_ in members]

    def _row(self, member: Member, counted: _Counted, now_s: float) -> SharedRow:
        queue, (cache_s, began) = member.queue, self._caches.of(member, now_s)
        queue.decay(now_s)
        head = queue.head
        sums = PeerSums(
            int(queue.waiting_ms()),
            int(head.prefill_ms) if head is not None else 0,
            int(head.placed_s * 1e3) if head is not None else 0,
            len(member.leases),
            queue.waiting(),
            member.context_tokens,
            int(member.clock.context_tokens),
            counted.sent_tokens,
            int(counted.stall_ms),
        )
        return SharedRow(counted.number, instance_of(member.replica.instance), int(cache_s * 1e3), began, sums)
