"""Accuracy of predicted first tokens: `python -m loadtest simulate --predictions`.

Each stream's receipt has two predicted times: half of such first tokens arrive before the one, and nine in ten before
the other. Both are compared with the simulated engines' times, counted from placement. The first LEARNT streams only
train the router and are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from loadtest.common.report import build_table, percentile
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.results.race import freeze_objects, shorten_workload
from loadtest.simulate.scenarios.registry import SCENARIOS
from router.core.placement.policies import POLICIES

LEARNT = 200  # streams before the first judged prediction
REQUESTS = 1_200
WORKLOADS = ("claude_code", "working_set_3x", "mooncake", "hot_prefix_mix")
WITHIN_P90 = (0.85, 0.95)  # limits for the share within the predicted p90


@dataclass(frozen=True, slots=True)
class PredictionJob:
    """One scenario at one load."""

    name: str
    load: str
    seed: int
    requests: int = REQUESTS


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy of one run's predictions. The ratio is the real time over the predicted median."""

    name: str
    load: str
    streams: int
    within_p50: float
    within_p90: float
    ratio_p50: float
    ratio_p90: float

    @property
    def ok(self) -> bool:
        """True if the share within the predicted p90 is within its limits."""
        low, high = WITHIN_P90
        return low <= self.within_p90 <= high


def run_predictions(job: PredictionJob) -> Calibration:
    """Run `warm` and compare. Raises ValueError if too few streams reached a first token."""
    scenario = SCENARIOS[job.name](job.load, job.seed)
    with freeze_objects():
        result = Simulation(shorten_workload(scenario.workload, job.requests), scenario.setting, POLICIES["warm"]).run()
    below, within, ratios = 0, 0, list[float]()
    for sent in result.sent[LEARNT:]:
        lease = sent.lease
        if lease is None or lease.first_token_s is None:
            continue
        took_ms = (lease.first_token_s - lease.placed_s) * 1e3
        below += took_ms <= lease.receipt.ttft_ms
        within += took_ms <= lease.receipt.ttft_p90_ms
        ratios.append(took_ms / lease.receipt.ttft_ms)
    if not ratios:
        raise ValueError(f"{job.name}: no stream had a first token after the first {LEARNT}")
    count = len(ratios)
    p50, p90 = percentile(ratios, 50) or 0.0, percentile(ratios, 90) or 0.0
    return Calibration(job.name, job.load, count, below / count, within / count, p50, p90)


HEADS = ("scenario", "load", "streams", "within p50 %", "within p90 %", "real / p50: median", "real / p50: p90")


def lines(found: Sequence[Calibration]) -> list[tuple[str, ...]]:
    """Return a line of the table for each run, under HEADS."""
    return [
        (
            *(each.name, each.load, f"{each.streams}", f"{100 * each.within_p50:.1f}", f"{100 * each.within_p90:.1f}"),
            *(f"{each.ratio_p50:.2f}", f"{each.ratio_p90:.2f}"),
        )
        for each in found
    ]


def print_predictions(console: Console, found: Sequence[Calibration]) -> None:
    """Print the table."""
    console.print(build_table(HEADS, lines(found), "first tokens against their predictions", left={"scenario", "load"}))
