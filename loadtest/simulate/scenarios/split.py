"""Workloads on replicas that may prefill for each other: long prompts that no replica holds, and agents.

Disaggregated prefill is meant for the first: one long prefill after the other interrupts streams. Agents' turns are
cached except for their new part. So it has little to gain there, and published measurements show a loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.scenarios.generated import Pieces
from loadtest.simulate.scenarios.generated import scenario as made
from loadtest.simulate.scenarios.recorded import claude_code
from loadtest.simulate.scenarios.scenario import Scenario

PROMPT_PIECES = (40, 60)
"""Pieces of a prompt, 400 tokens each: 20,000 on average."""
OUTPUT_TOKENS = (200, 400)
TTFT_LIMIT_S = 5.0
"""A prefill alone takes 1.5 s."""


def prefill_heavy(load: str, setting: ClusterSpec, *, requests: int) -> Scenario:
    """Prompts of 20,000 tokens on average without a common prefix, answers of 300."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, 0, number, rng.randint(*PROMPT_PIECES), rng.randint(*OUTPUT_TOKENS))

    return made("prefill_heavy", load, setting, part, requests=requests, ttft_limit_s=TTFT_LIMIT_S)


def agents(load: str, setting: ClusterSpec, *, requests: int) -> Scenario:
    """Sessions of Claude Code."""
    scenario = claude_code(load, setting.seed, setting)
    return replace(scenario, workload=replace(scenario.workload, requests_max=requests))


WORKLOADS: dict[str, Callable[..., Scenario]] = {"prefill_heavy": prefill_heavy, "agents": agents}
