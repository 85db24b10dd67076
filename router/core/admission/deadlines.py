"""How much prefill may wait in an engine while others ask with deadlines.

Order in the router's queue is worth little while engines have queues of their own, first come first served, as long as
a deadline. So while requests with deadlines come, those without wait here for a replica that is *calm*: whose waiting
prefill takes no more than a part of the shortest deadline of late. A replica at which no prefill waits is always calm.

A prefill that has begun is not interrupted, so where the fleet is busy a few calm replicas are *reserved* for those
with deadlines: as few as keep KEPT of them, and at most one of RESERVED_OF. That number is followed by small steps, up
behind a stream that was late and down behind one in time (Robbins & Monro 1951), and is none where all are in time
anyway. A deadline that even an idle replica would have missed moves nothing. Busy is a fleet with RESERVED_FROM units
of work for each replica, what waits here included: below it nobody waits while a replica is idle.

Deadlines of a lower priority make nobody wait, and PASSES_MAX urgent placements in a row while others wait here are
followed by one that needs no calm replica.
"""

from __future__ import annotations

from math import inf

from router.core.admission.queue import PASSES_MAX
from router.core.facts.requests import Priority

SEEN_S = 60.0  # seconds, at least, for which a deadline counts after it was asked for
WAITING_PART = 0.1  # part of the shortest deadline for which prefill may wait at a calm replica
WAITING_MIN_MS = 20.0  # prefill that may wait at a calm replica in any case: a step or two
KEPT = 0.99  # part of the deadlines that are to be kept
STEP = 0.05  # step of the part of replicas that are reserved
RESERVED_OF = 4  # replicas for each one that may be reserved
RESERVED_FIRST = 0.25  # part that is reserved before anything is known, and at most
RESERVED_FROM = 1.0  # mean backlog from which on any are, here and at replicas, in units (core/learned/speeds.py)


class Deadlines:
    """The shortest deadline of late, by priority; and how often others were passed."""

    def __init__(self) -> None:
        self._shortest_s, self._before_s = [inf] * len(Priority), [inf] * len(Priority)
        self._since_s = 0.0
        self._passed = 0
        self._reserved = RESERVED_FIRST  # part of the replicas
        self.any = False  # whether any counts

    def asked(self, priority: Priority, wanted_s: float, now_s: float) -> None:
        """A request wants its first token within `wanted_s`."""
        self.tick(now_s)
        self.any = True
        if wanted_s < self._shortest_s[priority]:
            self._shortest_s[priority] = wanted_s

    def tick(self, now_s: float) -> None:
        """Forget what was asked long ago."""
        if self.any and now_s - self._since_s >= SEEN_S:
            kept_s = self._shortest_s if now_s - self._since_s < 2 * SEEN_S else [inf] * len(Priority)
            self._before_s, self._shortest_s, self._since_s = kept_s, [inf] * len(Priority), now_s
            self.any = min(kept_s) < inf
            if not self.any:
                self._reserved = RESERVED_FIRST

    def waiting_ms(self, priority: Priority) -> float:
        """Milliseconds of prefill that may wait at a replica which is given a request without a deadline."""
        if not self.any or self._passed >= PASSES_MAX:
            return inf
        shortest_s = min(*self._shortest_s[: priority + 1], *self._before_s[: priority + 1])
        return max(WAITING_MIN_MS, WAITING_PART * 1e3 * shortest_s)

    def reserved(self, replicas: int) -> int:
        """Of so many replicas, how many calm ones are for requests with deadlines only where the fleet is busy."""
        return min(replicas // RESERVED_OF, int(self._reserved * replicas + 0.5))

    def told(self, *, in_time: bool) -> None:
        """A stream's first token came, in time or late."""
        moved = self._reserved + (KEPT - 1 if in_time else KEPT) * STEP
        self._reserved = min(RESERVED_FIRST, max(0.0, moved))

    def placed(self, *, urgent: bool, others_wait: bool) -> None:
        """A request was placed, by its deadline or not, while others wait here or not."""
        self._passed = self._passed + 1 if urgent and others_wait else 0
