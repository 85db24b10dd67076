"""Which rows belong to which goal, in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loadtest import faults_abuse as abuse
from loadtest import faults_early as early
from loadtest import faults_health as health
from loadtest import faults_leaving as leaving
from loadtest import faults_overload as overload
from loadtest.faults_bench import Bench
from loadtest.faults_drain import terminated
from loadtest.faults_endings import endings
from loadtest.faults_memory import index_memory
from loadtest.report import Row

Rows = Callable[[Bench], Awaitable[list[Row]]]

GOALS: dict[int, tuple[Rows, ...]] = {
    1: (early.early_deaths,),
    2: (early.retry_budget,),
    3: (early.retry_after,),
    4: (endings,),
    6: (leaving.disconnects,),
    7: (leaving.slow_readers,),
    8: (health.gray,),
    9: (health.killed,),
    10: (health.outage,),
    12: (terminated,),
    16: (index_memory,),
    18: (overload.overload,),
    19: (overload.long_prompts,),
    20: (abuse.admin_closed,),
    23: (abuse.slow_clients, abuse.bombs),
    27: (overload.neighbours,),
}
