"""The event loop: the fastest there is, its garbage collector, background tasks, and undoing what failed half-way."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)
_T = TypeVar("_T")

SWITCH_S = 0.0005  # how long a thread that parses a long body may keep the event loop waiting, between two bytecodes
# Objects made, net of those freed, until the youngest are searched for cycles; how often the older are. CPython's own
# 700, 10, 10 spend a quarter of a busy router's time walking its index, which has none.
COLLECT = (10_000, 50, 100)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on the fastest event loop there is, with the interpreter set up for a server."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # modules and settings are here to stay
    gc.set_threshold(*COLLECT)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


@asynccontextmanager
async def closed_on_error(stack: AsyncExitStack) -> AsyncIterator[None]:
    """Close everything on the stack if the block fails; if not, the stack stays open, and its owner closes it."""
    try:
        yield
    except BaseException:
        await stack.aclose()
        raise


def in_background(work: Coroutine[None, None, None]) -> Callable[[], Coroutine[None, None, None]]:
    """Start a task; what is returned stops it."""
    task = asyncio.create_task(guarded(work))

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        work.close()  # it may not have begun

    return stop


async def guarded(work: Coroutine[None, None, None]) -> None:
    """A background task that fails says so in the log; it is a bug."""
    try:
        await work
    except Exception:
        log.exception("background task failed")
        raise
