"""Simulated routers that tell each other what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.common.report import Row
from loadtest.simulate.results.figures import row_of
from loadtest.simulate.results.race import shortened
from loadtest.simulate.scenarios.generated import working_set_3x
from loadtest.simulate.world.setting import Setting
from loadtest.simulate.world.world import World
from router.core.placement.policies import POLICIES

SCENARIO = working_set_3x("below", 1)
WORKLOAD = shortened(SCENARIO.workload, 300)


def _run(**setting: object) -> tuple[Row, World]:
    world = World(WORKLOAD, replace(SCENARIO.setting, **setting), POLICIES["warm"])  # type: ignore[arg-type]  # fields of Setting
    scenario = replace(SCENARIO, workload=WORKLOAD, setting=world.setting)
    return row_of(scenario, world.run()), world


def test_four_routers_that_share_do_about_as_well_as_one() -> None:
    """Where each knows nothing of the others more prompts wait behind each other's, and fewer find their caches."""
    one, apart, shared = (_run(**more)[0] for more in ({}, {"routers": 4}, {"routers": 4, "share_delay_s": 0.005}))
    for row in (one, apart, shared):
        assert row.token_hit_rate is not None
        assert row.ttft_p90_s is not None
    assert apart.ttft_p90_s > 1.3 * one.ttft_p90_s  # type: ignore[operator]  # just seen
    assert shared.ttft_p90_s < 1.15 * one.ttft_p90_s  # type: ignore[operator]  # likewise
    assert shared.token_hit_rate > 0.95 * one.token_hit_rate  # type: ignore[operator]  # likewise


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_what_all_believe_is_the_same_in_the_end(loss: float) -> None:
    """However many messages are lost, nobody believes that anything is open once nothing is. With three of ten lost, a
    router of which four in a row are lost is forgotten until it is heard again."""
    _, world = _run(routers=3, share_delay_s=0.005, share_loss=loss)
    assert world.channel is not None
    for placer, sharing in zip(world.placers, world.channel.sharing, strict=True):
        peers = sharing.peers(world.now_s)
        assert len(peers) == 2 or (peers and loss)
        for member in placer.router.members:
            told = sum(len(other.router.fleet.members[member.id].leases) for other in world.placers) - len(
                member.leases
            )
            assert abs(member.others.open - told) <= 2  # the last messages are still under way


def test_a_router_that_is_cut_off_goes_on_alone_and_comes_back() -> None:
    """During the partition it knows nobody, and nobody knows it; afterwards all know all."""
    setting: Setting = replace(SCENARIO.setting, routers=3, share_delay_s=0.005, share_partition=(10.0, 20.0))
    world, seen = World(WORKLOAD, setting, POLICIES["warm"]), list[list[int]]()

    def look(_: None) -> None:
        assert world.channel is not None
        seen.append([len(sharing.peers(world.now_s)) for sharing in world.channel.sharing])

    for at_s in (9.0, 20.0, 31.0):
        world.at(at_s, look)
    world.run()
    assert seen == [[2, 2, 2], [0, 1, 1], [2, 2, 2]]
