"""The event loop: the fastest there is, its garbage collector, background tasks, and undoing what failed half-way."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")

SWITCH_S = 0.0005  # longest time that a thread which parses a long body keeps the event loop waiting for the GIL
WORK_S = 0.0004  # work without a break, of what can be done a little at a time
# Objects made, net of those freed, before the youngest generation is searched for cycles; then how often the older
# generations are. CPython's own
# 700, 10, 10 spend a quarter of a busy router's time walking its index, which has none.
COLLECT = (10_000, 50, 100)
MAPPED_BYTES = 4 << 20  # a block of memory of this size is mapped alone, and given back when it is freed
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h of glibc


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on the fastest event loop there is, with the interpreter set up for a server."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # modules and settings live as long as the process
    gc.set_threshold(*COLLECT)
    give_large_blocks_back()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def give_large_blocks_back() -> None:
    """Tables of full caches are made anew now and then. glibc puts them on the heap once it has freed one of their
    size: there they leave holes, and twice their size stays free at its end. Other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, MAPPED_BYTES)


@asynccontextmanager
async def closed_on_error(stack: AsyncExitStack) -> AsyncIterator[None]:
    """Close everything on the stack if the block fails; if not, the stack stays open, and its owner closes it."""
    try:
        yield
    except BaseException:
        await stack.aclose()
        raise


def in_background(work: Coroutine[None, None, None]) -> Callable[[], Coroutine[None, None, None]]:
    """Start a task. Returns the coroutine function that stops it."""
    task = asyncio.create_task(guarded(work))

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        work.close()  # the task may not have begun it

    return stop


async def guarded(work: Coroutine[None, None, None]) -> None:
    """Run a background task; its failure is a bug, and is logged."""
    try:
        await work
    except Exception:
        log.exception("background task failed", extra={"event": "bug"})
        raise


class LongWork:
    """`await pace.step()` after each small step of long work: other work is done in between once it took `work_s`."""

    def __init__(self, work_s: float = WORK_S, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` may be one that counts CPU alone."""
        self._work_s, self._clock, self._since_s = work_s, clock, clock()
        self.longest_s = 0.0  # longest work without a break, so far

    async def step(self) -> None:
        """A step is done."""
        worked_s = self._clock() - self._since_s
        self.longest_s = max(self.longest_s, worked_s)
        if worked_s >= self._work_s:
            await asyncio.sleep(0)
            self.begin()

    def begin(self) -> None:
        """What was waited for is over, and work begins."""
        self._since_s = self._clock()
