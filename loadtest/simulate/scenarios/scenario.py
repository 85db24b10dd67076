"""What a scenario is: a workload at a load on a cluster, for a seed; and which half of the data a seed uses.

Loads are told as shares of what the cluster can sustain (capacity.py), `at` being 1.0. Where a workload's loads are
published figures instead, it is said where it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from loadtest.simulate.world.setting import Setting
from loadtest.simulate.world.turns import Workload

LOADS = {"light": 0.15, "below": 0.6, "at": 1.0, "above": 1.4, "twice": 2.0}
"""Shares of what a cluster can sustain."""
COMMON_LOADS = ("below", "at", "above")
TUNE_SEEDS = range(1, 6)
CLAIM_SEEDS = range(6, 16)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's input, whatever the row."""

    workload: Workload
    setting: Setting
    load: float
    load_unit: str
    """`requests/s` offered, or `sessions` active at a time."""
    ttft_limit_s: float = 2.0
    """Goodput counts requests whose first token came within it."""


Make = Callable[[str, int], Scenario]
"""(a name in LOADS, seed) -> scenario; the seed says which half of the data is used."""


def in_half(name: str, seed: int) -> bool:
    """Whether a session or conversation of that name belongs to the half of the data that this seed uses: claims rest
    on none that was tuned on."""
    return crc32(name.encode()) % 2 == (seed in TUNE_SEEDS)
