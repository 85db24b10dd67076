"""Pending prefills of one replica, as a FIFO queue, the order in which engines schedule them.

Each open lease waits there, with the modelled time of its prefill, until its first token or its end. The head of the
queue progresses with the clock. An overdue head counts as nearly done, while the leases after it still wait. A lease
without a visible first token (its answer does not stream) leaves the queue after its modelled time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from router.core.estimators.prefill import LEARN_TOKENS_MIN
from router.core.fleet.lease import Lease


class PrefillQueue:
    """Open leases with an unfinished prefill, by observation."""

    __slots__ = ("_head_since_s", "_left", "_waiting", "_waiting_ms", "computing", "head", "peak")

    def __init__(self, left: Callable[[Lease, float], None]) -> None:
        """`left(lease, now_s)` is called for each lease that leaves the queue."""
        self._left = left
        self._waiting: dict[int, Lease] = {}  # including the head
        self._waiting_ms = 0.0  # modelled prefill of all of them
        self._head_since_s = 0.0  # time at which the prefill of the head began
        self.head: Lease | None = None
        self.computing = 0  # leases with a prefill long enough to learn a speed from; they delay the others
        self.peak = 0  # maximum number of leases since `restart_peak`

    def pending_ms(self, now_s: float) -> float:
        """Return the modelled time until all leases in the queue are prefilled."""
        head = self.head
        if head is None:
            return 0.0
        waited_ms = (now_s - self._head_since_s) * 1e3
        if waited_ms >= head.prefill_ms:
            if not head.streams:
                self.decay(now_s)
                return self.pending_ms(now_s)
            waited_ms = head.prefill_ms
        left_ms = self._waiting_ms - waited_ms
        return left_ms if left_ms > 0 else 0.0

    def waiting_ms(self) -> float:
        """Return the modelled prefill of all leases in the queue, including the completed part of the head's."""
        return self._waiting_ms

    def count_waiting(self) -> int:
        """Return the number of leases in the queue, including the head."""
        return len(self._waiting)

    def holds(self, lease: Lease) -> bool:
        """True if the lease waits here."""
        return lease.id in self._waiting

    def join(self, lease: Lease, now_s: float) -> None:
        """Add a placed lease, and set `lease.queued` if it waits behind another one."""
        if self.head is not None:
            self.decay(now_s)
        if self.head is None:
            self.head, self._head_since_s, lease.measurements.queued = lease, now_s, False
        self._waiting[lease.id] = lease
        self._waiting_ms += lease.prefill_ms
        if lease.uncached_tokens >= LEARN_TOKENS_MIN:
            self.computing += 1
        if len(self._waiting) > self.peak:
            self.peak = len(self._waiting)

    def leave(self, lease: Lease, now_s: float) -> None:
        """Remove a lease at its first token or its end. No effect if it was removed before."""
        if self._waiting.pop(lease.id, None) is None:
            return
        self._left(lease, now_s)
        self._waiting_ms -= lease.prefill_ms
        if lease.uncached_tokens >= LEARN_TOKENS_MIN:
            self.computing -= 1
        if lease is self.head:
            self.head, self._head_since_s = next(iter(self._waiting.values()), None), now_s
            if self.head is None:
                self._waiting_ms = 0.0  # clears rounding errors

    def recount(self, lease: Lease, prefill_ms: float) -> bool:
        """Reduce the modelled prefill of a lease, because less must be computed than estimated at placement. Return
        True if it still waits."""
        if lease.id not in self._waiting:
            return False
        self._waiting_ms += prefill_ms - lease.prefill_ms
        lease.prefill_ms = prefill_ms
        return True

    def longest(self, least_ms: float, leases_max: int) -> list[Lease]:
        """Return the leases, among the first `leases_max`, with a modelled prefill of at least `least_ms`."""
        return [lease for lease in islice(self._waiting.values(), leases_max) if lease.prefill_ms >= least_ms]

    def decay(self, now_s: float) -> None:
        """Remove leases with an invisible end of prefill once their modelled time is over."""
        head = self.head
        while head is not None and not head.streams and (now_s - self._head_since_s) * 1e3 >= head.prefill_ms:
            since_s = self._head_since_s
            self.leave(head, now_s)
            self._head_since_s = since_s + head.prefill_ms / 1e3
            head = self.head

    def restart_peak(self) -> int:
        """Return the maximum of waiting leases since the last call, and restart it at the current number."""
        peak, self.peak = max(self.peak, len(self._waiting)), len(self._waiting)
        return peak
