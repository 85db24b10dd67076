"""Pending prefill of one replica, as a queue: first in, first out, as engines schedule it.

Each open lease waits there with the modelled time of its prefill until its first token, or its end. The head of the
queue decays with the clock; a head that is overdue counts as done any moment, but what waits behind it still waits. A
lease whose first token cannot be seen (its answer does not stream) leaves the queue when its modelled time is over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from router.core.fleet.lease import Lease
from router.core.learned.prefill import LEARN_TOKENS_MIN


class PrefillQueue:
    """Open leases whose prefill is not over, as far as that can be seen."""

    __slots__ = ("_head_since_s", "_left", "_waiting", "_waiting_ms", "computing", "head", "peak")

    def __init__(self, left: Callable[[Lease, float], None]) -> None:
        """`left(lease, now_s)` hears of each lease that leaves the queue."""
        self._left = left
        self._waiting: dict[int, Lease] = {}  # the head included
        self._waiting_ms = 0.0  # modelled prefill of all of them
        self._head_since_s = 0.0  # time at which the prefill of the head began
        self.head: Lease | None = None
        self.computing = 0  # leases whose prefill is long enough to learn a speed from: they keep others waiting
        self.peak = 0  # most leases at once since `restart_peak`

    def pending_ms(self, now_s: float) -> float:
        """Modelled time until everything in the queue is prefilled."""
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
        """Modelled prefill of all that is in the queue, what is done of the head's included."""
        return self._waiting_ms

    def waiting(self) -> int:
        """Leases in the queue, the head included."""
        return len(self._waiting)

    def holds(self, lease: Lease) -> bool:
        """Whether the lease waits here."""
        return lease.id in self._waiting

    def join(self, lease: Lease, now_s: float) -> None:
        """A lease was placed; `lease.queued` says afterwards whether it waits behind another one."""
        if self.head is not None:
            self.decay(now_s)
        if self.head is None:
            self.head, self._head_since_s, lease.queued = lease, now_s, False
        self._waiting[lease.id] = lease
        self._waiting_ms += lease.prefill_ms
        if lease.uncached_tokens >= LEARN_TOKENS_MIN:
            self.computing += 1
        if len(self._waiting) > self.peak:
            self.peak = len(self._waiting)

    def leave(self, lease: Lease, now_s: float) -> None:
        """The lease's first token was seen, or it ended. One that has left already changes nothing."""
        if self._waiting.pop(lease.id, None) is None:
            return
        self._left(lease, now_s)
        self._waiting_ms -= lease.prefill_ms
        if lease.uncached_tokens >= LEARN_TOKENS_MIN:
            self.computing -= 1
        if lease is self.head:
            self.head, self._head_since_s = next(iter(self._waiting.values()), None), now_s
            if self.head is None:
                self._waiting_ms = 0.0  # sheds rounding errors

    def recount(self, lease: Lease, prefill_ms: float) -> bool:
        """Less of a prompt has to be computed than was believed when it was placed; returns whether it still waits."""
        if lease.id not in self._waiting:
            return False
        self._waiting_ms += prefill_ms - lease.prefill_ms
        lease.prefill_ms = prefill_ms
        return True

    def longest(self, least_ms: float, leases_max: int) -> list[Lease]:
        """Those of the first so many leases whose modelled prefill takes at least so long."""
        return [lease for lease in islice(self._waiting.values(), leases_max) if lease.prefill_ms >= least_ms]

    def decay(self, now_s: float) -> None:
        """Let leave whose prefill cannot be seen to end, and is over by its modelled time."""
        head = self.head
        while head is not None and not head.streams and (now_s - self._head_since_s) * 1e3 >= head.prefill_ms:
            since_s = self._head_since_s
            self.leave(head, now_s)
            self._head_since_s = since_s + head.prefill_ms / 1e3
            head = self.head

    def restart_peak(self) -> int:
        """The most leases that waited at once since the last call, or wait now."""
        peak, self.peak = max(self.peak, len(self._waiting)), len(self._waiting)
        return peak
