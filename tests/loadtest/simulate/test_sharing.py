"""Simulated routers that tell each other what they do."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest

from loadtest.common.report import Row
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.results.metrics import row_of
from loadtest.simulate.results.race import shorten_workload
from loadtest.simulate.scenarios.generated import working_set_3x
from loadtest.simulate.scenarios.scenario import Scenario
from router.core.placement.policies import POLICIES

SCENARIO = working_set_3x("below", 1)
WORKLOAD = shorten_workload(SCENARIO.workload, 300)


def _run(scenario: Scenario = SCENARIO, **setting: object) -> tuple[Row, Simulation]:
    workload = shorten_workload(scenario.workload, 300)
    world = Simulation(workload, replace(scenario.setting, **setting), POLICIES["warm"])  # type: ignore[arg-type]  # fields of Setting
    return row_of(replace(scenario, workload=workload, setting=world.setting), world.run()), world


@pytest.mark.long
def test_four_routers_that_share_do_about_as_well_as_one() -> None:
    """Where each knows nothing of the others more prompts wait behind each other's, and fewer find their caches. Means
    of eight workloads: in one of 300 requests p90 is up or down by a fifth after any change."""
    apart, shared, hits = list[float](), list[float](), list[float]()
    for seed in range(1, 9):
        scenario = working_set_3x("below", seed)
        one, alone, together = (
            _run(scenario, **more)[0] for more in ({}, {"routers": 4}, {"routers": 4, "share_delay_s": 0.005})
        )
        apart.append((alone.ttft_p90_s or 0.0) / (one.ttft_p90_s or 1.0))
        shared.append((together.ttft_p90_s or 1e9) / (one.ttft_p90_s or 1.0))
        hits.append((together.token_hit_rate or 0.0) / (one.token_hit_rate or 1.0))
    assert geometric_mean(apart) > 1.3
    assert geometric_mean(shared) < 1.15
    assert geometric_mean(hits) > 0.95


@pytest.mark.parametrize("partition", [None, (5.0, 3.0)])
def test_what_all_believe_is_the_same_in_the_end(partition: tuple[float, float] | None) -> None:
    """No router counts anything as open once nothing is, also after a time in which one was cut off."""
    _, world = _run(routers=3, share_delay_s=0.005, share_partition=partition)
    assert world.channel is not None
    for placer, sharing in zip(world.placers, world.channel.sharing, strict=True):
        assert len(sharing.peers()) == 2
        for member in placer.router.members:
            told = sum(len(other.router.fleet.members[member.id].leases) for other in world.placers) - len(
                member.leases
            )
            assert abs(member.others.open - told) <= 2  # the last messages are still under way


def test_a_router_that_is_cut_off_goes_on_alone_and_comes_back() -> None:
    """During the partition it knows nobody, and nobody knows it; afterwards all know all."""
    setting: ClusterSpec = replace(SCENARIO.setting, routers=3, share_delay_s=0.005, share_partition=(10.0, 20.0))
    world, seen = Simulation(WORKLOAD, setting, POLICIES["warm"]), list[list[int]]()

    def look(_: None) -> None:
        assert world.channel is not None
        seen.append([len(sharing.peers()) for sharing in world.channel.sharing])

    for at_s in (9.0, 20.0, 31.0):
        world.call_at(at_s, look)
    world.run()
    assert seen == [[2, 2, 2], [0, 1, 1], [2, 2, 2]]
