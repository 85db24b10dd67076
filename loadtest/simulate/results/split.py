"""Benefit of disaggregated prefill: `python -m loadtest simulate --split`.

The workloads are long prompts that no replica holds, and agents (scenarios/split.py), with the same number of replicas
of the same kind. Rows differ in the replicas' roles and in the policy. All estimate caches from the requests they sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from loadtest.common.report import Row, build_table
from loadtest.fake_engine.peers import PeerLimits
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.split import DisaggSimulation
from loadtest.simulate.policies.llmd_decider import LlmdDecider
from loadtest.simulate.results import linked_replicas
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.pulls import LINKS
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios.split import WORKLOADS
from router.core.placement.policies import Policy
from router.core.placement.policies.warm import Warm
from router.core.types.disagg_types import Role

REQUESTS = 100  # for each replica
SIZE = 8
PROBE_INTERVAL_S = 0.25  # llm-d reads metrics every 50 ms, and its scorers depend on that
SHARES = ("light", "below", "at")


@dataclass(frozen=True, slots=True)
class Entry:
    """Policy of a row, its permission to split requests, and its number of prefill-only replicas of eight (0: no
    roles)."""

    make: Callable[[], Policy]
    split: bool
    prefill: int = 0


AGGREGATED, OURS, OURS_ALIKE = "aggregated", "ours, 2 of 8", "ours, alike"
ROWS = {
    AGGREGATED: Entry(Warm, split=False),
    "llm-d, 2 of 8": Entry(LlmdDecider, split=True, prefill=2),
    OURS: Entry(Warm, split=True, prefill=2),
    "llm-d, 5 of 8": Entry(LlmdDecider, split=True, prefill=5),
    "ours, 5 of 8": Entry(Warm, split=True, prefill=5),
    OURS_ALIKE: Entry(Warm, split=True),
}
"""Row -> its policy and roles.

- aggregated: `warm` on replicas that do both stages
- 2 of 8: llm-d's decider and `warm`, with a quarter of the replicas for prefill
- 5 of 8: the same, with the number of prefill replicas that a rule needs if it prefills all long prompts apart
- alike: `warm` on replicas that each do both stages, and may also prefill for each other
"""
FIGURES: dict[str, Callable[[Row], float | None]] = {
    "time per output token p50, ms": lambda row: row.tpot_p50_ms,
    "time per output token p90, ms": lambda row: row.tpot_p90_ms,
    "TTFT p50, s": lambda row: row.ttft_p50_s,
    "TTFT p90, s": lambda row: row.ttft_p90_s,
    "end-to-end p90, s": lambda row: row.e2e_p90_s,
    "first token in time, %": lambda row: 100 * row.goodput_share if row.goodput_share is not None else None,
    "output tokens/s": lambda row: row.output_tokens_per_s,
    "requests split, %": lambda row: row.got,
}


@dataclass(frozen=True, slots=True)
class SplitJob:
    """One workload on one kind of link at one load for one seed, and the rows to run."""

    workload: str
    link: str
    load: str
    seed: int
    rows: tuple[str, ...] = tuple(ROWS)
    replicas: int = SIZE
    requests: int = REQUESTS
    """For each replica."""


def roles_of(replicas: int, of_eight: int = 2) -> tuple[Role, ...]:
    """Return the roles of the replicas, of which `of_eight` in eight only prefill."""
    prefill = max(1, replicas * of_eight // 8)
    return (Role.PREFILL,) * prefill + (Role.DECODE,) * (replicas - prefill)


def run_split(job: SplitJob) -> list[Row]:
    """Return a row for each entry, in their order."""
    link: PeerLimits = LINKS[job.link]
    setting = ClusterSpec(replicas=job.replicas, seed=job.seed, legs=link, probe_interval_s=PROBE_INTERVAL_S)
    scenario, rows = WORKLOADS[job.workload](job.load, setting, requests=job.requests * job.replicas), list[Row]()
    with freeze_objects():
        for name in job.rows:
            entry = ROWS[name]
            roles = roles_of(job.replicas, entry.prefill) if entry.prefill else ()
            told = replace(scenario.setting, roles=roles, split_told=entry.split)
            world = DisaggSimulation(scenario.workload, told, entry.make)
            row = row_of(replace(scenario, setting=told), world.run())
            row.workload, row.policy, row.case, row.seed = job.workload, name, job.link, job.seed
            row.load_name, row.replicas = job.load, job.replicas
            row.got = 100 * world.splits / row.requests if row.requests else 0.0
            rows.append(row)
    return rows


HEADS = (*linked_replicas.NAMES, *ROWS)


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a row of the table for each workload, link, load and figure, under HEADS."""
    return linked_replicas.lines(rows, WORKLOADS, LINKS, ROWS, FIGURES)


def print_split(console: Console, rows: Sequence[Row]) -> None:
    """Print the table."""
    made = build_table(
        HEADS,
        (),
        "disaggregated prefill by placement: means over seeds",
        left=set(linked_replicas.NAMES),
        no_wrap=False,
    )
    for cells in lines(rows):
        made.add_row(*cells)
    console.print(made)
