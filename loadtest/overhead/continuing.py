"""What it costs warmroute that a stream may be continued on another replica: CPU per chunk with that and without.

One warmroute continues no stream, and one keeps the token ids of every stream, so that it could
(`upstream.continue_streams`). Both run all the while in front of the same upstream, which tells token ids where it is
asked for them, and take turns to carry the same streams, of which none breaks. The figure is the median of the ratios
of two windows, one behind the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from loadtest.common.report import Row
from loadtest.overhead.load import Measured
from loadtest.overhead.report import ratio_row

CASE = "stream300"
RATIO_MAX = 3.0
PAIRS = 2  # pairs of windows in a round
OFF, ON = ("--set", "upstream.continue_streams=off"), ("--set", "upstream.continue_streams=exact")
TEXT = {"continued_chunk": f"{CASE} once more, without a way to go on elsewhere and with one"}

Measure = Callable[[str], Awaitable[Measured]]


def steps(rounds: int) -> int:
    """The number of pairs of windows that `rows` needs."""
    return PAIRS * rounds


async def rows(
    running: Callable[[Sequence[str]], AbstractAsyncContextManager[Measure]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
) -> list[Row]:
    """The row. `running` runs warmroute with these flags and measures cases at it. `told` after each pair."""
    pairs: list[tuple[Measured, Measured]] = []
    async with running(OFF) as off, running(ON) as on:
        for turn in range(steps(rounds)):
            if turn % 2:  # the first of a pair has an advantage or a disadvantage, so they take turns
                second, first = await on(CASE), await off(CASE)
            else:
                first, second = await off(CASE), await on(CASE)
            pairs.append((first, second))
            told()
    return [row_of(pairs, slack)]


def row_of(pairs: Sequence[tuple[Measured, Measured]], slack: float) -> Row:
    """CPU per chunk of streams that may be continued over that of those that may not; `slack` as a part of the goal."""
    goal = f"CPU per chunk of streams that may be continued at most {RATIO_MAX:g} x that of those that may not"
    return ratio_row("continued_chunk", pairs, goal, RATIO_MAX, slack, chunks=True)
