"""Deadlines of one tenant beside another tenant's requests, on simulated replicas above saturation."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from itertools import chain

import pytest

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.with_admission import SimulationWithAdmission
from loadtest.simulate.engine.workload import open_workload
from loadtest.simulate.engine.world import SimulatedRequest
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.race import freeze_objects
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.generated import BLOCK_TOKENS, Pieces
from loadtest.simulate.scenarios.priority_mix import mixed_classes
from loadtest.simulate.scenarios.scenario import LOADS

REQUESTS = 2_000
VICTIM, OTHER = "victim", "other"
Asked = list[tuple[float, Pieces, str]]


def prompts() -> Asked:
    """Prompts of 1,200 to 6,000 tokens that nobody shares, at 1.2 times what four replicas sustain."""
    rng = random.Random("deadline_tenants")
    parts = [Pieces(1_000 + n, 0, n, rng.randint(3, 15), 40) for n in range(REQUESTS)]
    turns = generated.turns_of("victim", parts, generated.poisson(rng, REQUESTS, 1.0))
    LOADS.setdefault("1.2", 1.2)
    generated.scale_to_load("victim", "1.2", turns, ClusterSpec(replicas=4), 1.0)
    return [(turn.at_s, part, VICTIM) for turn, part in zip(turns, parts, strict=True)]


def run(asked: Asked, within_s: float | None) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
    """What became of each tenant's requests, where the other tenant's have that deadline."""
    asked = sorted(asked, key=lambda each: each[0])
    turns = generated.turns_of("tenants", [part for _, part, _ in asked], [at_s for at_s, _, _ in asked])
    tenants = {number: tenant for number, (_, _, tenant) in enumerate(asked)}
    due = {number: within_s for number, tenant in tenants.items() if tenant == OTHER and within_s is not None}
    workload = open_workload("tenants", turns, BLOCK_TOKENS)
    with freeze_objects():
        sent = (
            SimulationWithAdmission(workload, ClusterSpec(replicas=4), ROWS["warm"].make, due, tenants=tenants)
            .run()
            .sent
        )
    split: tuple[list[SimulatedRequest], list[SimulatedRequest]] = ([], [])
    for each in sent:
        split[tenants[each.turn.number] == OTHER].append(each)
    return split


def figures(sent: list[SimulatedRequest]) -> tuple[int, float, float]:
    """Requests that were turned away, and the median and p90 of times to the first token in seconds."""
    times = sorted(each.ttft_s for each in sent if each.ttft_s is not None)
    return sum(bool(each.failure) for each in sent), times[len(times) // 2], times[len(times) * 9 // 10]


@cache
def alone() -> tuple[int, float, float]:
    """Those of the victim without the other tenant."""
    return figures(run(prompts(), None)[0])


DEADLINES = [
    pytest.param(2, 1, 0.05, marks=pytest.mark.long),
    (2, 1, 1.0),
    pytest.param(20, 2, 1.0, marks=pytest.mark.long),
    (1, 1, 0.3),
]


@pytest.mark.finding("2026-11-28/2")
@pytest.mark.promise("A tenant's short or rare deadlines have no other tenant's request turned away.", "tenants")
@pytest.mark.parametrize(("every_s", "at_once", "within_s"), DEADLINES)
def test_a_few_deadlines_of_one_tenant_cost_another_next_to_nothing(
    every_s: float, at_once: int, within_s: float
) -> None:
    """Short prompts with a deadline, some a minute: of another tenant's long ones none more is refused, and their first
    tokens come within 1.1 times the time."""
    asked = prompts()
    moments = [every_s * n + 0.5 for n in range(int(asked[-1][0] / every_s))]
    short = [(at_s, Pieces(9_000, 0, 9_000 + n, 1, 1), OTHER) for n, at_s in enumerate(moments * at_once)]
    refused, median_s, p90_s = figures(run(asked + short, within_s)[0])
    print(f"alone {alone()}, beside deadlines {refused, median_s, p90_s}")
    assert refused <= alone()[0] == 0
    assert median_s <= 1.1 * alone()[1]
    assert p90_s <= 1.1 * alone()[2]


def test_a_deadline_that_no_idle_replica_keeps_reserves_nothing() -> None:
    """Every request has the times that it has where the other tenant, or the same one, asks for no such thing."""
    asked = prompts()[: REQUESTS // 2]
    for others in (OTHER, VICTIM):
        moments = [float(n) for n in range(int(asked[-1][0]))]
        short = [(at_s, Pieces(9_000, 0, 9_000 + n, 4, 1), others) for n, at_s in enumerate(moments)]
        dated, plain = (chain(*run(asked + short, within_s)) for within_s in (0.005, None))
        assert [(each.ttft_s, each.e2e_s) for each in dated] == [(each.ttft_s, each.e2e_s) for each in plain]


def kept(within_s: Mapping[int, float], tenants: Mapping[int, str], told: Mapping[int, float]) -> tuple[float, int]:
    """Part of the first tokens within those times, and the number of batches that were refused, in the mix `half`."""
    scenario, _ = mixed_classes("half", 6)
    with freeze_objects():
        world = SimulationWithAdmission(scenario.workload, scenario.setting, ROWS["warm"].make, told, tenants=tenants)
        sent = world.run().sent
    asked = [each for each in sent if each.turn.number in within_s]
    in_time = [each for each in asked if each.ttft_s is not None and each.ttft_s <= within_s[each.turn.number]]
    refused = sum(bool(each.failure) for each in sent if each.turn.number not in within_s)
    return len(in_time) / len(asked), refused


def test_deadlines_are_kept_beside_another_tenants_batches() -> None:
    """Of a tenant that has a tenth of the prefill at least three of four, where first come, first served keeps a few,
    and no batch is refused."""
    _, within_s = mixed_classes("half", 6)
    tenants = dict.fromkeys(within_s, OTHER)
    told, refused = kept(within_s, tenants, within_s)
    untold, _ = kept(within_s, tenants, {})
    print(f"in time {told:.3f}, without deadlines {untold:.3f}, refused {refused}")
    assert told >= 0.75 > 4 * untold
    assert not refused
