"""Whether the hub places, by what it owes a worker.

The hub counts as there from its first view on, which it sends once it knows its replicas. It counts as lost when the
connection breaks, or when it owes an answer for longer than its time limit, unless it said that the request waits in
its queue; while any does, the hub is asked every CHECK_S for a page, which it must not owe for longer either. What was
asked of a lost hub is placed by the ring and taken back from the hub, and so is every other request until something is
heard of the hub again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.core.placement.wanted import Wanted
from router.workers.lease import RemoteLease

log = logging.getLogger(__name__)

CHECK_S = 1.0  # interval of the checks whether a hub in whose queue requests wait is still there
CHECK_PAGE = "/healthz"
BROKEN = "connection broke"
SILENT = "no answer in time"
LEAVING = "we leave"


@dataclass(slots=True)
class Pending:
    """A placement that the hub was asked for."""

    wanted: Wanted
    future: asyncio.Future[RemoteLease | None]
    since_s: float  # monotonic time of the question, or of entering the hub's queue


class HubWatch:
    """What the hub owes a worker, and whether it places."""

    def __init__(self, worker: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s` is how long the hub may owe an answer."""
        self._worker = worker
        self._timeout_s = timeout_s
        self._clock = clock
        self.asked: dict[int, Pending] = {}  # unanswered questions, oldest first
        self.queued: dict[int, Pending] = {}  # placements in the hub's queue, where they may wait for long
        self.viewed = False  # the hub has sent a view on this connection
        self._why_lost = "not connected yet"
        self._alone = 0  # placements without the hub since it was lost
        self.alone_total = 0
        self._check: int | None = None  # id of the page that was asked for to see whether the hub is there
        self._checked_s = 0.0  # monotonic time of that question

    @property
    def places(self) -> bool:
        """Whether the hub places; if not, the ring does."""
        return not self._why_lost

    def ask(self, id_: int, wanted: Wanted, future: asyncio.Future[RemoteLease | None]) -> None:
        """The hub owes this placement from now on."""
        self.asked[id_] = Pending(wanted, future, self._clock())

    def queue(self, id_: int) -> None:
        """The hub has put the request into its queue, and owes no answer for now."""
        pending = self.asked.pop(id_, None)
        if pending is not None:
            pending.since_s = self._clock()
            self.queued[id_] = pending

    def forget(self, id_: int) -> None:
        """The placement is no longer wanted."""
        self.asked.pop(id_, None)
        self.queued.pop(id_, None)

    def take(self, id_: int) -> Pending | None:
        """The placement is answered; None if it is no longer wanted."""
        pending = self.asked.pop(id_, None)
        if pending is None:
            pending = self.queued.pop(id_, None)
            if pending is not None:
                pending.wanted.queued_s = self._clock() - pending.since_s
        return pending

    def placed_alone(self) -> None:
        """Count a placement by the ring."""
        self._alone += 1
        self.alone_total += 1

    def page_came(self, id_: int) -> None:
        """A page came; it may be the one that proves the hub to be there."""
        if id_ == self._check:
            self._check = None

    def heard(self) -> None:
        """Something came from the hub: once there was a view, it places."""
        if self.viewed and self._why_lost:
            self._why_lost = ""
            fields = {"worker": self._worker, "placements_by_ring": self._alone}
            self._alone = 0
            log.info("the hub places", extra={"event": "hub_found", "fields": fields})

    def lost(self, why: str) -> list[int]:
        """The hub does not place, which is logged once. Returns what was asked of it."""
        if not self._why_lost:
            log.warning(
                "the hub is lost: placing by the ring",
                extra={"event": "hub_lost", "fields": {"worker": self._worker, "why": why}},
            )
        self._why_lost, self._check = why, None
        return [*self.asked, *self.queued]

    def leaving(self) -> None:
        """The worker ends: that its connection breaks is not worth a warning."""
        self._why_lost = self._why_lost or LEAVING

    def overdue(self) -> bool:
        """Whether the hub owes an answer for too long."""
        oldest = next(iter(self.asked.values()), None)
        owed_s = [oldest.since_s] if oldest is not None else []
        if self._check is not None:
            owed_s.append(self._checked_s)
        return bool(owed_s) and self._clock() - min(owed_s) > self._timeout_s

    def check_due(self) -> bool:
        """Whether nothing but requests in its queue would show that the hub has gone."""
        owes = self.asked or self._check is not None
        return bool(self.queued) and not owes and self._clock() - self._checked_s > CHECK_S

    def check(self, id_: int) -> None:
        """The hub owes this page from now on."""
        self._check, self._checked_s = id_, self._clock()
