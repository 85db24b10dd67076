"""Thread that keeps the history in its file, and continues without the file if it fails.

The event loop only puts records into a bounded queue. The thread converts them into rows and writes them once a second.
While the file cannot be used, records wait in the queue. If the queue is full, the oldest are dropped and counted. The
thread retries at growing intervals. Searches run in the same thread, between two writes, so that the file has only one
connection.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from router.admin.decision_rows import decision_row
from router.admin.history.file import DAMAGED, ForeignDatabase, HistoryFile, describe_error, quarantine
from router.admin.history.intervals import STEPS, Sums
from router.telemetry.request_record import RequestRecord

QUEUE_DECISIONS_MAX = 4_096  # decisions that wait to be written: about 15 MB
BATCH_DECISIONS = 200  # decisions written in one transaction
BATCH_S = 1.0
SEARCHES_MAX = 8  # searches that wait at once
RETRY_S, RETRY_MAX_S = 2.0, 60.0  # first and longest wait before the file is tried again
FORGET_S = 10.0  # interval between two deletions of rows that are too old or too many
CLOSE_S = 5.0

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_Error = (sqlite3.Error, OSError, ForeignDatabase)


class HistoryUnavailable(Exception):
    """Raised if the file cannot be searched now; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """State of the file."""

    failing: bool = False
    why: str = ""  # in words, if it is failing
    bytes: int = 0
    written: int = 0  # decisions written since the router began
    dropped: int = 0  # decisions that did not fit into the queue
    decisions_since_s: float | None = None  # Unix time of the oldest decision; None without a decision
    intervals_since_s: float | None = None  # the same of the oldest interval


class HistoryWriter:
    """Keeps decisions and intervals in the file at `path`. `take` and `take_interval` never wait."""

    def __init__(
        self,
        path: str,
        *,
        bytes_max: int,
        days_max: int,
        batch_s: float = BATCH_S,
        retry_s: float = RETRY_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._bytes_max, self._days_max = path, bytes_max, days_max
        self._batch_s, self._retry_first_s, self._wall_clock = batch_s, retry_s, wall_clock
        self._number = time.time_ns() >> 1  # of this run of the router
        self._decisions: deque[RequestRecord] = deque(maxlen=QUEUE_DECISIONS_MAX)
        self._intervals: deque[tuple[int, Sums]] = deque(maxlen=STEPS)
        self._searches: deque[tuple[Callable[[HistoryFile], Any], Future[Any]]] = deque()
        self._batch: list[RequestRecord] = []  # taken from the queue, and not written yet
        self._wake = threading.Event()
        self._closing = False
        self._file: HistoryFile | None = None
        self._retry_s, self._retry_at_s, self._forget_at_s = retry_s, 0.0, 0.0
        self._dropped = self._written = 0
        self.status = KeeperStatus()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    # -- called by the event loop -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, record: RequestRecord) -> None:
        """Queue a decision. A full queue drops its oldest."""
        decisions = self._decisions
        if len(decisions) >= QUEUE_DECISIONS_MAX:
            self._dropped += 1
        decisions.append(record)
        if len(decisions) == BATCH_DECISIONS:
            self._wake.set()

    def take_interval(self, number: int, sums: Sums) -> None:
        """Queue an interval that is over; no caller may change it afterwards."""
        self._intervals.append((number, sums))

    @property
    def dropped(self) -> int:
        """Decisions that did not fit into the queue."""
        return self._dropped

    async def search(self, work: Callable[[HistoryFile], _Found]) -> _Found:
        """Return the result of `work`, which runs in the thread. Raises HistoryUnavailable."""
        if self.status.failing:
            raise HistoryUnavailable(self.status.why)
        if self._closing or len(self._searches) >= SEARCHES_MAX:
            raise HistoryUnavailable("too many searches are waiting")
        future: Future[_Found] = Future()
        self._searches.append((work, future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Write the buffered data, for CLOSE_S at most, and end the thread. It may block, so do not call it on the
        event loop."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    # -- run by the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(self._batch_s)
            self._wake.clear()
            last = self._closing
            if last:
                self._retry_at_s = 0.0
            try:
                self._once()
            except Exception:  # a bug must not end the thread, because then no further data would be kept
                log.exception("bug: the history failed", extra={"event": "bug"})
                self._dropped += len(self._batch)  # one of these, or an interval, may be the cause of the failure
                self._batch = []
                self._intervals.clear()
                self._suspend_writes("the history failed; see the log")
        self._turn_away()
        if self._file is not None:
            self._file.close()

    def _once(self) -> None:
        """Write the buffered data, and answer searches."""
        try:
            file, asked = self._open_if_due(), bool(self._searches)
            if file is not None:
                self._write(file)
                if asked:
                    self._answer(file)  # records that have left memory are in the file by now
        except _Error as error:
            self._suspend_writes(describe_error(error))
            self._set_aside(error)
        if self._file is None:
            self._turn_away()

    def _open_if_due(self) -> HistoryFile | None:
        """Return the open file; None until the next retry is due. Raises _Error."""
        if self._file is None and time.monotonic() >= self._retry_at_s:
            self._file = HistoryFile(self._path, bytes_max=self._bytes_max, run=self._number)
        return self._file

    def _write(self, file: HistoryFile) -> None:
        now_s = time.monotonic()
        if now_s >= self._forget_at_s:
            file.forget(self._wall_clock(), self._days_max)
            self._forget_at_s = now_s + FORGET_S
        intervals = list(self._intervals)
        while True:
            while self._decisions and len(self._batch) < BATCH_DECISIONS:
                self._batch.append(self._decisions.popleft())
            if self._batch or intervals:
                file.write((decision_row(record, record.number) for record in self._batch), intervals)
            self._written += len(self._batch)
            self._batch = []
            for _ in intervals:
                self._intervals.popleft()
            intervals = []
            if not self._decisions:
                break
            file.forget(self._wall_clock(), self._days_max)
        self._wrote(file)

    def _wrote(self, file: HistoryFile) -> None:
        if self.status.failing:
            fields = {"path": self._path, "dropped": self._dropped}
            log.warning("the history is written again", extra={"event": "history_recovered", "fields": fields})
        self._retry_s = self._retry_first_s
        decisions_s, intervals_s = file.oldest_s()
        size = file.bytes()
        self.status = KeeperStatus(False, "", size, self._written, self._dropped, decisions_s, intervals_s)

    def _suspend_writes(self, why: str) -> None:
        """Continue without the file for a while. Logged once."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self.status.failing:
            fields = {"path": self._path, "why": why}
            log.error(
                "the history cannot be written: decisions are kept in memory only",
                extra={"event": "history_failing", "fields": fields},
            )
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        self.status = KeeperStatus(True, why, 0, self._written, self._dropped)

    def _set_aside(self, error: Exception) -> None:
        """Begin a new file at once if the old one is damaged."""
        if str(getattr(error, "sqlite_errorname", "")) not in DAMAGED:
            return
        try:
            moved = quarantine(self._path)
        except OSError:
            return
        self._retry_at_s = 0.0
        extra = {"event": "history_damaged", "fields": {"moved_to": moved}}
        log.warning("the history file was damaged: a new one is started", extra=extra)
        self._wake.set()

    def _answer(self, file: HistoryFile) -> None:
        """Run the oldest search. The queue is written before the next one, so that it does not fill up while searches
        run, each of which may take READ_S."""
        work, future = self._searches.popleft()
        if self._searches:
            self._wake.set()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(file))
        except sqlite3.Error as error:
            future.set_exception(HistoryUnavailable(describe_error(error)))
            if getattr(error, "sqlite_errorname", "") != "SQLITE_INTERRUPT":
                raise
        except Exception as error:
            log.exception("bug: a search of the history failed", extra={"event": "bug"})
            future.set_exception(HistoryUnavailable(f"the search failed: {error}"))

    def _turn_away(self) -> None:
        while self._searches:
            _, future = self._searches.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(HistoryUnavailable(self.status.why or "the history is not open yet"))
