"""Interface for observers of leases. A router that shares its state (core/peer_sync) publishes them to the others."""

from __future__ import annotations

from typing import Protocol

from router.core.fleet.lease import Lease
from router.core.placement.answer_reuse import AnswerCredit
from router.core.types.placements import Outcome


class LeaseListener(Protocol):
    """Callbacks for every change of a lease."""

    def on_opened(self, lease: Lease, credit: AnswerCredit | None, now_s: float) -> None:
        """Notify of a new lease. The quoted answer of its prompt (`credit`) counts as cached from now on."""

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Notify that the prefill of a lease is over."""

    def on_recount(self, replica: str, stall_ms: float = 0.0) -> None:
        """Notify that the pending work of a replica is less than published. A prefill that stalled its streams for
        `stall_ms` has ended at an unknown time."""

    def on_ended(self, lease: Lease, outcome: Outcome, answer_blocks: int, *, computed: bool) -> None:
        """Notify that a lease was closed. If its prompt was `computed`, the answer takes `answer_blocks` after the
        prompt."""

    def on_orphaned(self, lease: Lease) -> None:
        """Notify that a lease was closed after its replica had left."""
