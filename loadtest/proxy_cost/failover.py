"""Cost of stream failover in warmroute: CPU per chunk with and without it.

One warmroute has stream failover off. The other keeps the token ids of every stream, so that it could continue it
(`upstream.stream_failover`). Both run permanently in front of the same upstream, which returns token ids on request.
They carry the same streams alternately, and no stream breaks. The figure is the median of the ratios of two consecutive
windows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from loadtest.common.report import Row
from loadtest.proxy_cost.load import CpuSample
from loadtest.proxy_cost.report import ratio_row

CASE = "stream300"
RATIO_MAX = 3.0
PAIRS = 2  # pairs of windows in a round
OFF, ON = ("--set", "upstream.stream_failover=off"), ("--set", "upstream.stream_failover=exact")
TEXT = {"continued_chunk": f"{CASE} once more, without a way to go on elsewhere and with one"}

Measure = Callable[[str], Awaitable[CpuSample]]


def steps(rounds: int) -> int:
    """Return the number of pairs of windows that `rows` needs."""
    return PAIRS * rounds


async def rows(
    running: Callable[[Sequence[str]], AbstractAsyncContextManager[Measure]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
) -> list[Row]:
    """Return the row.

    - `running`: runs warmroute with the given flags and measures cases at it.
    - The progress callback is called after each pair.
    """
    pairs: list[tuple[CpuSample, CpuSample]] = []
    async with running(OFF) as off, running(ON) as on:
        for turn in range(steps(rounds)):
            if turn % 2:  # the order affects a pair, so it alternates
                second, first = await on(CASE), await off(CASE)
            else:
                first, second = await off(CASE), await on(CASE)
            pairs.append((first, second))
            told()
    return [row_of(pairs, slack)]


def row_of(pairs: Sequence[tuple[CpuSample, CpuSample]], slack: float) -> Row:
    """Return the ratio of CPU per chunk, with stream failover over without; `slack` is a part of the goal."""
    goal = f"CPU per chunk of streams that may be continued at most {RATIO_MAX:g} x that of those that may not"
    return ratio_row("continued_chunk", pairs, goal, RATIO_MAX, slack, chunks=True)
