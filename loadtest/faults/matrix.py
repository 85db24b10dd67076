"""Rows of each goal, in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loadtest.common.report import Row
from loadtest.faults.bench import Bench
from loadtest.faults.cases import abuse, bodies, disconnects, early, health, overload
from loadtest.faults.cases.drain import terminated
from loadtest.faults.cases.endings import endings
from loadtest.faults.cases.memory import index_memory
from loadtest.faults.cases.neighbours import ROWS as NEIGHBOURS
from loadtest.faults.cases.tenants import HOSTILE, oracle
from loadtest.faults.cases.zoo import ROWS as ZOO

Rows = Callable[[Bench], Awaitable[list[Row]]]

GOALS: dict[int, tuple[Rows, ...]] = {
    1: (early.early_deaths,),
    2: (early.retry_budget,),
    3: (early.retry_after,),
    4: (endings,),
    6: (disconnects.disconnects,),
    7: (disconnects.slow_readers,),
    8: (health.gray,),
    9: (health.killed,),
    10: (health.outage,),
    12: (terminated,),
    16: (index_memory,),
    18: (overload.overload,),
    19: (overload.long_prompts,),
    20: (abuse.admin_closed,),
    23: (abuse.slow_clients, abuse.bombs, bodies.bodies),
    27: (overload.neighbours, *HOSTILE, oracle),
    28: ZOO,
    29: NEIGHBOURS,
}
