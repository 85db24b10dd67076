"""Which rows belong to which goal, in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loadtest import faults_early as early
from loadtest.faults_bench import Bench
from loadtest.faults_endings import endings
from loadtest.report import Row

Rows = Callable[[Bench], Awaitable[list[Row]]]

GOALS: dict[int, tuple[Rows, ...]] = {
    1: (early.early_deaths,),
    2: (early.retry_budget,),
    3: (early.retry_after,),
    4: (endings,),
}
TIMED: frozenset[Rows] = frozenset({early.retry_after})
"""Rows in which a time decides."""
