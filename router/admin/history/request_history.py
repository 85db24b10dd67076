"""History of one router: every request that ended, and the sums of requests over time.

`observe` is on the path of every request. A page's query is answered from memory first. The file, if there is one, is
read only for older data.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from router.admin.decision_rows import decision_row
from router.admin.history.breakdowns import Breakdown, Counts
from router.admin.history.file import COARSE_S, DAY_S, FINE_DAYS, HistoryFile, Read
from router.admin.history.intervals import STEP_S, STEPS, Intervals, Sums, in_steps, merge
from router.admin.history.query_filters import DecisionFilter
from router.admin.history.writer import HistoryUnavailable, HistoryWriter, KeeperStatus
from router.telemetry.request_record import RequestRecord

BYTES_MAX = 1 << 20  # of all decisions of one answer
NUMBER_MAX = 1 << 62
MINUTE_STEPS = 60 // STEP_S
# Records examined, rows made and intervals added without a break: below a millisecond each.
SLICE_SEEN, SLICE_ROWS, SLICE_STEPS = 500, 4, 30


@dataclass(frozen=True, slots=True)
class DecisionsFound:
    """Rows of decisions as JSON, newest first."""

    rows: list[bytes]
    next_before: int | None  # number below which the search continues; None if there are no further decisions
    why_not_all: str = ""  # reason that the file was not searched, in words


class RouterHistory:
    """Past requests and their sums. Times are Unix time."""

    def __init__(
        self,
        *,
        decisions_max: int,
        keeper: HistoryWriter | None,
        load: Callable[[], tuple[int, int]],
        days_max: int = 0,
        bytes_max: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`keeper`: None if no history file is kept. `load()`: the number of requests being answered, and how many of
        them wait in the router."""
        self.recent: deque[RequestRecord] = deque(maxlen=decisions_max)
        self.intervals = Intervals(wall_clock())
        self._keeper, self._load, self._wall_clock = keeper, load, wall_clock
        self._days_max, self._bytes_max = days_max, bytes_max
        self._number = 0
        self._breakdown = Breakdown(dict)

    def break_down(self, counts: Callable[[], Counts]) -> None:
        """Also keep sums by model and group; `counts()` returns those since the router began."""
        self._breakdown = Breakdown(counts)

    def observe(self, record: RequestRecord) -> None:
        """Store a request that ended, and give it its number."""
        self._number = record.number = max(self._number + 1, int(self._wall_clock() * 1e6))
        self.recent.append(record)
        self.intervals.observe(record)
        if self._keeper is not None:
            self._keeper.take(record)

    def tick(self) -> None:
        """Record the load, and end the current interval if its time is over."""
        self.intervals.sample(*self._load())
        ended = self.intervals.move(self._wall_clock())
        if ended is None:
            return
        if self.intervals.number // MINUTE_STEPS > ended[0] // MINUTE_STEPS:
            merge(ended[1], self._breakdown.take())
        if self._keeper is not None:
            self._keeper.take_interval(*ended)

    async def watch(self) -> None:
        """Call `tick` at every full second until cancelled."""
        while True:
            await asyncio.sleep(1 - self._wall_clock() % 1)
            self.tick()

    def now_s(self) -> float:
        """Return the Unix time."""
        return self._wall_clock()

    def start(self) -> None:
        """Open the file, if there is one, in its own thread."""
        if self._keeper is not None:
            self._keeper.start()

    async def close(self) -> None:
        """Write the buffered data, the current interval included."""
        if self._keeper is not None:
            self._keeper.take_interval(
                self.intervals.number, merge(self.intervals.get_current(), self._breakdown.take())
            )
            await asyncio.get_running_loop().run_in_executor(None, self._keeper.close)

    def status(self) -> KeeperStatus | None:
        """Return the state of the file; None without a file."""
        return self._keeper.status if self._keeper is not None else None

    def count_dropped(self) -> int:
        """Return the number of decisions that were not written to the file."""
        return self._keeper.dropped if self._keeper is not None else 0

    # -- decisions -----------------------------------------------------------------------------------------------

    def newest(self, count: int) -> list[Callable[[], dict[str, Any]]]:
        """Return rows of the last `count` requests, each made when it is called."""
        return [partial(decision_row, record, record.number) for record in islice(reversed(self.recent), count)]

    async def find(self, wanted: DecisionFilter, *, limit: int, before: int = NUMBER_MAX) -> DecisionsFound:
        """Return matching decisions with a number below `before`, newest first: at most `limit`, and together at most
        BYTES_MAX bytes."""
        records = list(self.recent)
        found, size, full = list[Read](), 0, False
        for seen, record in enumerate(reversed(records), 1):
            if not seen % SLICE_SEEN:
                await asyncio.sleep(0)
            if record.number >= before or not wanted.fits(record):
                continue
            row = msgspec.json.encode(decision_row(record, record.number))
            size += len(row)
            full = len(found) >= limit or (size > BYTES_MAX and bool(found))
            if full:
                break
            found.append((record.number, row))
            if not len(found) % SLICE_ROWS:
                await asyncio.sleep(0)
        why = ""
        if not full and self._keeper is not None:
            oldest = min(before, records[0].number if records else NUMBER_MAX)
            left, bytes_left = limit - len(found), max(BYTES_MAX - size, 0)
            search = partial(HistoryFile.find, wanted=wanted, before=oldest, limit=left, bytes_max=bytes_left)
            try:
                more, full = await self._keeper.search(search)
                found += more
            except HistoryUnavailable as error:
                why = str(error)
        return DecisionsFound([row for _, row in found], found[-1][0] if full and found else None, why)

    # -- intervals -----------------------------------------------------------------------------------------------

    async def downsample(self, from_s: int, to_s: int, step_s: int) -> dict[int, Sums]:
        """Return the sums of the requests in that time, by the beginning of steps of `step_s` seconds. Steps without
        data are absent. From COARSE_S on, steps are made of minutes. Times are multiples of the step."""
        steps: dict[int, Sums] = {}
        own = [(float(number * STEP_S), sums) for number, sums in self.intervals.list_intervals()]
        own_s = own[0][0]  # from here on memory has all counts of this process

        def kept(file: HistoryFile) -> None:
            if step_s < COARSE_S:
                in_steps(file.intervals(STEP_S, from_s, min(to_s, own_s), own=True), step_s, steps)
                in_steps(file.intervals(STEP_S, from_s, to_s, own=False), step_s, steps)
                return
            begun_s = own_s // COARSE_S * COARSE_S  # memory has only a part of the minute in which it begins
            in_steps(file.intervals(COARSE_S, from_s, min(to_s, begun_s), own=True), step_s, steps)
            in_steps(file.intervals(STEP_S, max(from_s, begun_s), min(to_s, own_s), own=True), step_s, steps)
            in_steps(file.intervals(COARSE_S, from_s, to_s, own=False), step_s, steps)

        if self._keeper is not None and from_s <= own_s:
            try:
                await self._keeper.search(kept)
            except HistoryUnavailable:
                steps.clear()
        memory = [(at_s, sums) for at_s, sums in own if from_s <= at_s < to_s]
        for first in range(0, len(memory), SLICE_STEPS):
            in_steps(memory[first : first + SLICE_STEPS], step_s, steps)
            await asyncio.sleep(0)
        return steps

    def current_breakdown(self) -> Sums:
        """Return the sums by model and group that belong to no interval yet."""
        return self._breakdown.peek()

    def fine_since_s(self, now_s: float) -> float:
        """Return the time since which intervals of less than a minute are kept."""
        return now_s - (FINE_DAYS * DAY_S if self._keeper is not None else STEP_S * STEPS)

    def retention(self) -> dict[str, Any]:
        """Return the range of time that pages cover, and the state of the file."""
        status = self.status()
        since_s: list[float | None] = [float(self.intervals.list_intervals()[0][0] * STEP_S)]
        decisions_s = [self.recent[0].at_s if self.recent else None]
        if status is not None:
            since_s.append(status.intervals_since_s)
            decisions_s.append(status.decisions_since_s)
        return {
            "since_s": min(each for each in since_s if each is not None),
            "decisions_since_s": min((each for each in decisions_s if each is not None), default=None),
            "decisions_in_memory": len(self.recent),
            "memory_s": STEP_S * STEPS,
            "path": status is not None,
            "state": "off" if status is None else "failing" if status.failing else "ok",
            "why": status.why if status is not None else "",
            "bytes": status.bytes if status is not None else 0,
            "bytes_max": self._bytes_max,
            "days_max": self._days_max,
            "dropped": self.count_dropped(),
        }
