"""Scenario: a workload at a load on a cluster, for a seed. Also the halves of the data that seeds use.

Loads are shares of the cluster's capacity (capacity.py), and `at` is 1.0. Workloads with published figures as loads
state that in their own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import Workload

LOADS = {"light": 0.15, "below": 0.6, "at": 1.0, "above": 1.4, "twice": 2.0}
"""Shares of a cluster's capacity."""
COMMON_LOADS = ("below", "at", "above")
TUNE_SEEDS = range(1, 6)
CLAIM_SEEDS = range(6, 16)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of one run, the same for every row."""

    workload: Workload
    setting: ClusterSpec
    load: float
    load_unit: str
    """`requests/s` offered, or `sessions` active at a time."""
    ttft_limit_s: float = 2.0
    """Goodput counts requests with a first token within this limit."""


Make = Callable[[str, int], Scenario]
"""(a name in LOADS, seed) -> scenario; the seed determines the half of the data."""


def in_half(name: str, seed: int) -> bool:
    """True if a session or conversation of that name belongs to the half of the data that this seed uses. Claims rest
    on no session that was tuned on."""
    return crc32(name.encode()) % 2 == (seed in TUNE_SEEDS)
