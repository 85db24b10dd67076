"""Availability of the hub, by the answers that it owes a worker.

The hub is available from its first view on, which it sends once it knows its replicas. It is lost when the connection
breaks, or when an answer takes longer than the time limit. A request in the hub's queue is exempt. While any request is
queued, the worker requests a page every CHECK_S, with the same time limit. Requests that were sent to a lost hub are
cancelled there and placed by the ring. All later requests are also placed by the ring, until the next message from the
hub.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.core.placement.placement_request import PlacementRequest
from router.multiprocess.remote_lease import RemoteLease

log = logging.getLogger(__name__)

CHECK_S = 1.0  # interval of the checks of a hub with queued requests
CHECK_PAGE = "/healthz"
BROKEN = "connection broke"
SILENT = "no answer in time"
LEAVING = "we leave"


@dataclass(slots=True)
class Pending:
    """A placement that was requested from the hub."""

    wanted: PlacementRequest
    future: asyncio.Future[RemoteLease | None]
    since_s: float  # monotonic time of the request, or of entering the hub's queue


class ControlHealth:
    """Pending answers of the hub, and its availability."""

    def __init__(self, worker: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s` is the longest time for an answer."""
        self._worker = worker
        self._timeout_s = timeout_s
        self._clock = clock
        self.asked: dict[int, Pending] = {}  # unanswered placements, oldest first
        self.queued: dict[int, Pending] = {}  # placements in the hub's queue, which may wait for long
        self.viewed = False  # the hub has sent a view on this connection
        self._why_lost = "not connected yet"
        self._alone = 0  # placements without the hub since it was lost
        self.alone_total = 0
        self._check: int | None = None  # id of the page that was requested as a check of the hub
        self._checked_s = 0.0  # monotonic time of that request

    @property
    def is_available(self) -> bool:
        """True if the hub places; if not, the ring does."""
        return not self._why_lost

    def ask(self, id_: int, wanted: PlacementRequest, future: asyncio.Future[RemoteLease | None]) -> None:
        """Record a placement that the hub owes."""
        self.asked[id_] = Pending(wanted, future, self._clock())

    def queue(self, id_: int) -> None:
        """Record that the hub has queued the request, and owes no answer for now."""
        pending = self.asked.pop(id_, None)
        if pending is not None:
            pending.since_s = self._clock()
            self.queued[id_] = pending

    def forget(self, id_: int) -> None:
        """Drop a placement that is no longer wanted."""
        self.asked.pop(id_, None)
        self.queued.pop(id_, None)

    def take(self, id_: int) -> Pending | None:
        """Remove and return a placement that is answered; None if it is no longer wanted."""
        pending = self.asked.pop(id_, None)
        if pending is None:
            pending = self.queued.pop(id_, None)
            if pending is not None:
                pending.wanted.queued_s = self._clock() - pending.since_s
        return pending

    def count_fallback(self) -> None:
        """Count a placement by the ring."""
        self._alone += 1
        self.alone_total += 1

    def on_page(self, id_: int) -> None:
        """Record a page from the hub; it may be the answer to the check."""
        if id_ == self._check:
            self._check = None

    def on_message(self) -> None:
        """Record a message from the hub. After a view, the hub is available."""
        if self.viewed and self._why_lost:
            self._why_lost = ""
            fields = {"worker": self._worker, "placements_by_ring": self._alone}
            self._alone = 0
            log.info("the hub places", extra={"event": "hub_found", "fields": fields})

    def on_control_lost(self, why: str) -> list[int]:
        """Record that the hub is lost, which is logged once. Returns the placements that it owes."""
        if not self._why_lost:
            log.warning(
                "the hub is lost: placing by the ring",
                extra={"event": "hub_lost", "fields": {"worker": self._worker, "why": why}},
            )
        self._why_lost, self._check = why, None
        return [*self.asked, *self.queued]

    def note_shutdown(self) -> None:
        """Prepare the worker's end: a broken connection is then not worth a warning."""
        self._why_lost = self._why_lost or LEAVING

    def overdue(self) -> bool:
        """True if an answer of the hub is late."""
        oldest = next(iter(self.asked.values()), None)
        owed_s = [oldest.since_s] if oldest is not None else []
        if self._check is not None:
            owed_s.append(self._checked_s)
        return bool(owed_s) and self._clock() - min(owed_s) > self._timeout_s

    def check_due(self) -> bool:
        """True if only queued requests are pending, so that the loss of the hub would not be noticed."""
        owes = self.asked or self._check is not None
        return bool(self.queued) and not owes and self._clock() - self._checked_s > CHECK_S

    def check(self, id_: int) -> None:
        """Record a page that the hub owes."""
        self._check, self._checked_s = id_, self._clock()
