"""Event loop: selects the fastest one, sets up the garbage collector, runs background tasks, and closes resources after
a failed start."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")

GIL_SWITCH_INTERVAL_S = (
    0.0005  # longest time for which a thread that parses a long body keeps the event loop waiting for the GIL
)
YIELD_AFTER_S = 0.0004  # longest work without a break, for work in small steps
TURNS = 8  # a connection that sends without an end has one in this number of loop iterations
SHARE_S = 0.0005  # its work in that turn, or an eighth of the time that the others took, if that is longer
EMPTY_S = 0.00002  # a shorter iteration of the loop had no work, and no time must be left to others
# Objects made, net of those freed, before the youngest generation is searched for cycles; then the thresholds of the
# older generations. CPython's own 700, 10, 10 spend a quarter of a busy router's time on a walk through its index,
# which has no cycles.
GC_THRESHOLDS = (10_000, 50, 100)
MAPPED_BYTES = 4 << 20  # a memory block of this size has its own mapping, and returns to the system when it is freed
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h of glibc


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on the fastest available event loop, with the interpreter set up for a server."""
    sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # modules and settings live until the process ends
    gc.set_threshold(*GC_THRESHOLDS)
    give_large_blocks_back()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def give_large_blocks_back() -> None:
    """Make glibc return large blocks to the system. Tables of full caches are made anew now and then. After glibc has
    freed one of their size, it puts the next ones on the heap. There they leave holes, and twice their size stays free
    at its end. Other C libraries are not changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, MAPPED_BYTES)


@asynccontextmanager
async def close_on_error(stack: AsyncExitStack) -> AsyncIterator[None]:
    """Close everything on the stack if the block fails; if not, the stack stays open, and its owner closes it."""
    try:
        yield
    except BaseException:
        await stack.aclose()
        raise


def start_task(work: Coroutine[None, None, None]) -> Callable[[], Coroutine[None, None, None]]:
    """Start a task. Returns the coroutine function that stops it."""
    task = asyncio.create_task(log_exceptions(work))

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        work.close()  # the task may not have begun it

    return stop


async def log_exceptions(work: Coroutine[None, None, None]) -> None:
    """Run a background task; its failure is a bug, and is logged."""
    try:
        await work
    except Exception:
        log.exception("background task failed", extra={"event": "bug"})
        raise


class CooperativeBudget:
    """Pace of long work. `await pace.step()` after each small step lets other tasks run after `work_s` of work."""

    def __init__(self, work_s: float = YIELD_AFTER_S, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` may be one that counts CPU alone."""
        self._work_s, self._clock, self._since_s = work_s, clock, clock()
        self.longest_s = 0.0  # longest work without a break, so far

    async def step(self) -> None:
        """Record the end of a step, and let other tasks run if it is time."""
        worked_s = self._clock() - self._since_s
        self.longest_s = max(self.longest_s, worked_s)
        if worked_s >= self._work_s:
            await asyncio.sleep(0)
            self.begin()

    def begin(self) -> None:
        """Start the clock again after a wait."""
        self._since_s = self._clock()


class Turns:
    """Turns of the loop for connections that send without an end: one in TURNS iterations, so that all others have the
    rest.

    A request passes the loop about four times. If such a connection had a slice of every iteration, each concurrent
    request would wait for several slices. With turns it waits for at most one. An empty iteration means that no other
    connection has work, and then those that wait continue at once.
    """

    __slots__ = (
        "_before_s",
        "_begun_s",
        "_calls_max",
        "_due",
        "_left",
        "_loop",
        "_turn_s",
        "clock",
        "share_s",
        "waiting",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        *,
        calls_max: int = 1,
        turn_s: float = SHARE_S,
    ) -> None:
        """In one turn at most `calls_max` of the waiting calls are made, and no further one after `turn_s`. `clock`
        must advance within an iteration, which the loop's own does not."""
        self.clock = clock
        self.waiting: deque[Callable[[], None]] = deque()
        self.share_s = SHARE_S  # work that is fair in the present turn
        self._loop, self._calls_max, self._turn_s = loop, calls_max, turn_s
        self._due = False
        self._left = 0  # iterations until the waiting calls are made
        self._begun_s = self._before_s = 0.0  # time since which the first of them waits; time of the last iteration

    def enqueue(self, work: Callable[[], None]) -> None:
        """Call `work` in its turn, after the calls that wait already."""
        self.waiting.append(work)
        self._next()

    async def turn(self) -> None:
        """Wait for the next of these turns."""
        came = self._loop.create_future()
        self.enqueue(lambda: None if came.done() else came.set_result(None))
        await came

    def _next(self) -> None:
        if self.waiting and not self._due:
            self._due, self._left, self._begun_s = True, TURNS, self.clock()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        waiting, now_s = self.waiting, self.clock()
        self._left -= 1
        # In the first of these iterations, data that arrived while the sender was read is not read yet.
        if self._left == TURNS - 1 or (self._left > 0 and now_s - self._before_s >= EMPTY_S):
            self._before_s = now_s
            self._loop.call_soon(self._turn)
            return
        self.share_s = max(SHARE_S, (now_s - self._begun_s) / TURNS)
        try:
            for _ in range(min(self._calls_max, len(waiting))):  # each may wait again at once, for its next turn
                waiting.popleft()()
                if self.clock() > now_s + self._turn_s:
                    break
        finally:
            self._due = False
            self._next()
