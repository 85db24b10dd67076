"""Two classes of requests on simulated replicas, one of them with deadlines."""

from __future__ import annotations

from loadtest.simulate.results.deadlines import (
    LLMD_SLO,
    PLAIN,
    TOLD,
    UNTOLD,
    WARM,
    DeadlineJob,
    judge,
    lines,
    run_deadlines,
)
from loadtest.simulate.scenarios.mixed import MIXES, mixed_classes
from loadtest.simulate.world.admitted import AdmittedWorld
from loadtest.simulate.world.world import World
from router.core.placement.policies import POLICIES


def test_more_requests_are_in_time_than_first_come_first_served() -> None:
    """At least 1.25 times as many, for at most a tenth of the output tokens, and more than round robin has and llm-d's
    choice by the same deadlines; nobody waits beside an idle replica while there is little to do, and no batch is
    lost."""
    who = ((WARM, TOLD), (WARM, UNTOLD), ("round_robin", PLAIN), (LLMD_SLO, PLAIN))
    rows = [row for mix in MIXES for row in run_deadlines(DeadlineJob(mix, 1, who, requests=500))]
    for mix in MIXES:
        print("", mix, *lines(rows, mix), sep="\n")
    assert [row.ok for row in judge(rows)] == [True] * (3 * len(MIXES) + 1)
    assert not any(row.errors or row.rejected for row in rows)


def test_without_deadlines_every_request_goes_where_it_went() -> None:
    """While no replica is full, the product's admission changes no placement and no time of a world without it."""
    scenario, _ = mixed_classes("half", 2, requests=300)
    workload, setting, make = scenario.workload, scenario.setting, POLICIES["warm"]
    worlds = World(workload, setting, make), AdmittedWorld(workload, setting, make, {})
    plain, admitted = (
        [(each.lease and each.lease.replica, each.ttft_s, each.e2e_s) for each in world.run().sent] for world in worlds
    )
    assert plain == admitted
    assert len(plain) == 300
