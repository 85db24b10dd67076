"""What this router has open at each replica, and what it counted: the rows of its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.core.facts.placements import Outcome
from router.core.fleet.lease import Lease
from router.core.fleet.member import Member
from router.core.placement.credit import AnswerCredit
from router.core.placement.router import Router
from router.core.sharing.engines import EngineAges, instance_of, number_of
from router.core.sharing.limits import SharingLimits
from router.core.sharing.messages import SharedMessage, SharedRow, encoded
from router.core.sharing.models import learned
from router.core.sharing.news import News

AGAIN = 3  # messages that still have the row of a replica at which nothing is open any more


@dataclass(slots=True)
class _Counted:
    """What was counted at one replica since this process began."""

    sent_tokens: int = 0
    computed_ms: float = 0.0
    stall_ms: float = 0.0
    again: int = 0  # messages that are to have its row though nothing is open there


class Said:
    """Watches the Router (placement/router.py, Watch), and makes messages of what it sees."""

    def __init__(self, router: Router, head: bytes, limits: SharingLimits, urgent: Callable[[], None]) -> None:
        self._router, self._head, self._limits, self._urgent = router, head, limits, urgent
        self._counted: dict[str, _Counted] = {}
        self._ages = EngineAges(router)
        self.news = News(limits)
        self._seq = 0
        self._said_s = self._models_s = float("-inf")
        self._pressing = False  # something urgent was placed since the last message
        router.watch = self

    def greet(self) -> None:
        """Another router is new here: it may have learned nothing yet."""
        self._models_s = float("-inf")

    # -- what the router does (Watch) ----------------------------------------------------------------------------

    def opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """A lease was given. It is urgent where it moves prices by more than what cannot be told apart."""
        counted = self._counted.get(lease.replica)
        if counted is None:
            counted = self._counted[lease.replica] = _Counted()
        counted.sent_tokens += lease.prompt_tokens
        counted.again = AGAIN
        member = self._router.fleet.members[lease.replica]
        self.news.placed(lease, member.wait_ms(now_s), credit)
        if not self._pressing and lease.prefill_ms > member.speeds.units()[0]:
            self._pressing = True
            self._urgent()

    def first_token(self, lease: Lease) -> None:
        """The prefill of a lease is over."""
        counted = self._counted.get(lease.replica)
        if counted is not None:
            counted.computed_ms += lease.prefill_ms
            counted.stall_ms += lease.stall_ms
            counted.again = AGAIN

    def ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """A lease is back."""
        self.news.ended(lease, outcome, answer_blocks, computed=computed)
        counted = self._counted.get(lease.replica)
        if counted is not None:
            counted.again = AGAIN

    def gone(self, lease: Lease) -> None:
        """A lease is back from a replica that has left."""
        self.news.gone(lease)

    # -- messages ------------------------------------------------------------------------------------------------

    def say(self, now_s: float, lags: Callable[[], list[tuple[int, int]]]) -> bytes | None:
        """The next message, with the `lags` of other routers (Heard.lags); None where it is too soon for one."""
        limits, since_s = self._limits, now_s - self._said_s
        if since_s < limits.urgent_s or (since_s < limits.every_s and not self._pressing):
            return None
        self._ages.look(now_s)
        rows = self._rows(now_s)
        if not rows and not self.news and not self._pressing and since_s < limits.idle_s:
            return None
        placements, ends = self.news.next_few()
        self._said_s, self._pressing = now_s, bool(self.news)
        self._seq += 1
        models = None
        if now_s - self._models_s >= limits.models_s and (models := learned(self._router)) is not None:
            self._models_s = now_s
        sent_ms, first = int(now_s * 1e3), self.news.first
        message = encoded(self._head, SharedMessage(self._seq, sent_ms, lags(), rows, first, placements, ends, models))
        if self._pressing:
            self._urgent()
        return message

    def _rows(self, now_s: float) -> list[SharedRow]:
        rows, members = [], self._router.fleet.members
        for id_ in [id_ for id_ in self._counted if id_ not in members]:
            del self._counted[id_]
        for id_, counted in self._counted.items():
            member = members[id_]
            if not member.leases:
                if not counted.again:
                    continue
                counted.again -= 1
            rows.append(self._row(member, counted, now_s))
        return rows

    def _row(self, member: Member, counted: _Counted, now_s: float) -> SharedRow:
        queue, clock = member.queue, member.clock
        queue.decay(now_s)
        head = queue.head
        age_ms, began = self._ages.of(member.id, now_s)
        return SharedRow(
            number_of(member.id),
            instance_of(member.replica.instance),
            age_ms,
            began,
            int(queue.waiting_ms()),
            int(head.prefill_ms) if head is not None else 0,
            max(0, int((now_s - head.placed_s) * 1e3)) if head is not None else 0,
            len(member.leases),
            queue.waiting(),
            member.context_tokens,
            int(clock.context_tokens),
            counted.sent_tokens,
            int(counted.computed_ms),
            int(counted.stall_ms),
            max(0, int((now_s - member.first_token_s) * 1e3)),
        )
