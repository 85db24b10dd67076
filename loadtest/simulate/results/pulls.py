"""Benefit of P2P KV transfers between replicas: `python -m loadtest simulate --pulls`.

The workloads are a pool of prefixes and sessions with documents (scenarios/p2p.py). Replicas have CPU memory of
twice their caches, and links between them with published times. Rows differ in the policy, and in whether a transfer
may be ordered. All of them have the same knowledge of caches and tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.peers import PeerLimits
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies.pull_threshold import PullThreshold
from loadtest.simulate.results import linked_replicas
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios.p2p import KV_TOKENS, WORKLOADS
from router.core.placement.policies import Policy
from router.core.placement.policies.least_loaded import LeastLoaded
from router.core.placement.policies.longest_match import LongestMatch
from router.core.placement.policies.warm import Warm

TIER = 2
REQUESTS = 150  # for each replica
SIZE = 8
LINKS = {"rdma": PeerLimits(), "slow": PeerLimits(270e-3, 29e-6)}
"""A link's name -> the cost of a transfer on it.

The costs follow published ratios of transfer to recomputing: those of gpt-oss-120b on H200 with RDMA, and those of
GLM-5.2 (1.25 s and 134 us a token, against 279 us a token for recomputing).
"""
SHARES = ("below", "at", "above")


@dataclass(frozen=True, slots=True)
class Entry:
    """Policy of a row, and its permission to order P2P KV transfers."""

    make: Callable[[], Policy]
    pulls: bool


OURS = "ours"
ROWS = {
    "affinity": Entry(LongestMatch, pulls=False),
    "load": Entry(LeastLoaded, pulls=False),
    "load + pulls": Entry(PullThreshold, pulls=True),
    "ours, no pulls": Entry(Warm, pulls=False),
    OURS: Entry(Warm, pulls=True),
}
"""Row -> its policy: the longest holder, the fewest open leases, the same with llm-d's threshold, and `warm`."""
FIGURES: dict[str, Callable[[Row], float | None]] = {
    "TTFT p50, s": lambda row: row.ttft_p50_s,
    "TTFT p90, s": lambda row: row.ttft_p90_s,
    "end-to-end p90, s": lambda row: row.e2e_p90_s,
    "output tokens/s": lambda row: row.output_tokens_per_s,
    "pulled of prompts, %": lambda row: row.got,
}


@dataclass(frozen=True, slots=True)
class PullJob:
    """One workload on one kind of link at one load for one seed, and the rows to run."""

    workload: str
    link: str
    load: str
    seed: int
    rows: tuple[str, ...] = tuple(ROWS)
    replicas: int = SIZE
    requests: int = REQUESTS
    """For each replica."""


def run_pulls(job: PullJob) -> list[Row]:
    """Return a row for each entry, in their order."""
    tier = TierLimits(TIER * KV_TOKENS)
    setting = ClusterSpec(
        replicas=job.replicas, seed=job.seed, grade="exact", kv_tokens=KV_TOKENS, tier=tier, peers=LINKS[job.link]
    )
    scenario, rows = WORKLOADS[job.workload](job.load, setting, requests=job.requests * job.replicas), list[Row]()
    with freeze_objects():
        for name in job.rows:
            entry = ROWS[name]
            told = replace(scenario.setting, pulls_told=entry.pulls)
            world = Simulation(scenario.workload, told, entry.make)
            result = world.run()
            row = row_of(replace(scenario, setting=told), result)
            row.workload, row.policy, row.case, row.seed = job.workload, name, job.link, job.seed
            row.load_name, row.replicas = job.load, job.replicas
            asked = sum(each.turn.prompt_tokens for each in result.sent)
            row.got = 100 * world.sent_tokens / asked if asked else 0.0
            row.goal = "pulled of prompts, %"
            rows.append(row)
    return rows


HEADS = (*linked_replicas.NAMES, *ROWS)


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of the table for each workload, link, load and figure, under HEADS."""
    return linked_replicas.lines(rows, WORKLOADS, LINKS, ROWS, FIGURES)


def print_pulls(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    made = build_table(
        HEADS, (), "P2P KV transfers by placement: means over seeds", left=set(linked_replicas.NAMES), no_wrap=False
    )
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
