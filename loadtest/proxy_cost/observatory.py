"""Cost of the observatory in warmroute: CPU per request with and without it, the rest equal.

One warmroute runs without it, and one with all its options (excerpts, repairs, and the check of append-only
conversations). Both run permanently in front of the same upstream. They receive the same requests alternately, so other
load on the machine affects both equally. The figure is the median of the ratios of two consecutive windows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from loadtest.common.report import Row
from loadtest.proxy_cost.load import CpuSample
from loadtest.proxy_cost.report import ratio_row

CASES = ("short", "mid", "long")
RATIO_MAX = 1.05
PAIRS = 2  # pairs of windows in a round, for each case
OFF = ("--set", "insights.enabled=false")
ON = (
    *("--set", "insights.excerpts=true"),
    *("--set", "insights.normalize_tools=sort_tools,canonical_tools"),
    *("--set", "insights.history_policy=warn"),
)
TEXT = {f"observatory_{case}": f"{case} once more, without miss analysis and with all of it" for case in CASES}


Measure = Callable[[str], Awaitable[CpuSample]]


def steps(rounds: int) -> int:
    """Return the number of pairs of windows that `rows` needs."""
    return PAIRS * rounds * len(CASES)


async def rows(
    running: Callable[[Sequence[str]], AbstractAsyncContextManager[Measure]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
    *,
    again: bool = False,
) -> list[Row]:
    """Return a row for each case.

    - `running`: runs warmroute with the given flags and measures cases at it.
    - The progress callback is called after each pair.
    - `again`: measure missed cases again in the same number of rounds.
    """
    pairs: dict[str, list[tuple[CpuSample, CpuSample]]] = {case: [] for case in CASES}
    async with running(OFF) as off, running(ON) as on:
        for turn in range(2 * PAIRS * rounds if again else PAIRS * rounds):
            extra = turn >= PAIRS * rounds
            for case in [case for case in CASES if not extra or not row_of(case, pairs[case], slack).ok]:
                if turn % 2:  # the order affects a pair, so it alternates
                    second, first = await on(case), await off(case)
                else:
                    first, second = await off(case), await on(case)
                pairs[case].append((first, second))
                if not extra:
                    told()
    return [row_of(case, pairs[case], slack) for case in CASES]


def row_of(case: str, pairs: Sequence[tuple[CpuSample, CpuSample]], slack: float) -> Row:
    """Return the ratio of CPU per request, with the observatory over without, round by round; `slack` is a part of the
    goal."""
    goal = f"CPU per request with all miss analysis at most {RATIO_MAX:g} x that without"
    return ratio_row(f"observatory_{case}", pairs, goal, RATIO_MAX, slack)
