"""What the observatory costs at warmroute: CPU per request with it and without, the rest alike.

One warmroute runs without it, and one with everything of it that can be switched on (excerpts, repairs, a watch over
conversations that should only grow), both all the while, in front of the same upstream. They take turns to be asked the
same requests, so what else the machine does hits both alike. The figure is the median of the ratios of two windows, one
behind the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from statistics import median

from loadtest.common.report import Row
from loadtest.overhead.load import Measured

CASES = ("short", "mid", "long")
RATIO_MAX = 1.05
PAIRS = 2  # of windows in a round, for each case
OFF = ("--set", "observatory.enabled=false")
ON = (
    *("--set", "observatory.excerpts=true"),
    *("--set", "observatory.repairs=sort_tools,canonical_tools"),
    *("--set", "observatory.append_only=warn"),
)
TEXT = {f"observatory_{case}": f"{case} once more, without the observatory and with everything of it" for case in CASES}


Measure = Callable[[str], Awaitable[Measured]]


def steps(rounds: int) -> int:
    """How many pairs of windows `rows` needs."""
    return PAIRS * rounds * len(CASES)


async def rows(
    running: Callable[[Sequence[str]], AbstractAsyncContextManager[Measure]],
    rounds: int,
    slack: float,
    told: Callable[[], None],
    *,
    again: bool = False,
) -> list[Row]:
    """A row for each case. `running` runs warmroute with these flags and measures cases at it. `told` after each pair.
    `again`: those that are missed in as many rounds again."""
    pairs: dict[str, list[tuple[Measured, Measured]]] = {case: [] for case in CASES}
    async with running(OFF) as off, running(ON) as on:
        for turn in range(2 * PAIRS * rounds if again else PAIRS * rounds):
            extra = turn >= PAIRS * rounds
            for case in [case for case in CASES if not extra or not row_of(case, pairs[case], slack).ok]:
                if turn % 2:  # who goes first gains or loses by it
                    second, first = await on(case), await off(case)
                else:
                    first, second = await off(case), await on(case)
                pairs[case].append((first, second))
                if not extra:
                    told()
    return [row_of(case, pairs[case], slack) for case in CASES]


def row_of(case: str, pairs: Sequence[tuple[Measured, Measured]], slack: float) -> Row:
    """CPU per request with it over that without, round by round; `slack` as a part of the goal."""
    errors: Counter[str] = Counter()
    for off, on in pairs:
        errors += off.errors + on.errors
    known = [(a, b) for a, b in ((_cpu_us(off), _cpu_us(on)) for off, on in pairs) if a and b]
    goal = f"CPU per request with all of the observatory at most {RATIO_MAX:g} x that without"
    row = Row(
        workload=f"observatory_{case}",
        requests=sum(off.requests + on.requests for off, on in pairs),
        errors=errors.total(),
        errors_by_kind=dict(errors),
        goal=goal,
        expected=RATIO_MAX,
        ok=False,
    )
    if known:
        row.cpu_us_per_request = round(median(b for _, b in known), 3)
        row.goal = f"{goal} ({median(a for a, _ in known):.1f} µs)"
        row.got = round(median(b / a for a, b in known), 3)
        row.ok = not errors and row.got <= RATIO_MAX * (1 + slack)
    return row


def _cpu_us(measured: Measured) -> float | None:
    return measured.cpu_s * 1e6 / measured.requests if measured.requests else None
