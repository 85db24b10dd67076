"""Who else is told of leases: a router that shares what it does (core/sharing) says them to others."""

from __future__ import annotations

from typing import Protocol

from router.core.facts.placements import Outcome
from router.core.fleet.lease import Lease
from router.core.placement.credit import AnswerCredit


class LeaseWatch(Protocol):
    """Whoever is told what becomes of leases, as it happens."""

    def opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """A lease was given; its prompt quotes an answer that is counted as held from now on."""

    def first_token(self, lease: Lease, now_s: float) -> None:
        """The prefill of a lease is over."""

    def recounted(self, replica: str, stall_ms: float = 0.0) -> None:
        """What waits at a replica is less than was told. A prefill that interrupted its streams for so long is over,
        and when it was is not known."""

    def ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """A lease is back; of a computed one the answer takes so many blocks behind the prompt."""

    def gone(self, lease: Lease) -> None:
        """A lease is back from a replica that has left."""
