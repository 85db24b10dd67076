"""Other scenarios' workloads on another cluster, or on one with faults.

All but one use Claude Code's sessions, for which a lost cache is the most expensive. Faults begin when the caches are
full and are over before any row's run ends, 900 s at the least: the time after them counts as well.
"""

from __future__ import annotations

import random
from dataclasses import replace

from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.scenarios import generated, recorded
from loadtest.simulate.scenarios.scenario import Scenario

FAULT_S = 240.0
RESTARTS, RESTART_S, RESTART_GAP_S = 3, 60.0, 120.0
SLOW_S, SLOW_FACTOR = 300.0, 4.0


def _sessions(name: str, load: str, setting: ClusterSpec) -> Scenario:
    made = recorded.claude_code(load, setting.seed, setting)
    return replace(made, workload=replace(made.workload, name=name))


def restart(load: str, seed: int) -> Scenario:
    """Three of eight replicas restart, one after the other, as in a rollout: each is gone for a minute, then empty."""
    faults = tuple(Fault("restart", FAULT_S + RESTART_GAP_S * i, i, RESTART_S) for i in range(RESTARTS))
    return _sessions("restart", load, ClusterSpec(seed=seed, faults=faults))


def slow_replica(load: str, seed: int) -> Scenario:
    """One of eight replicas takes four times as long for five minutes: a throttled GPU."""
    fault = Fault("slow", FAULT_S, 0, SLOW_S, SLOW_FACTOR)
    return _sessions("slow_replica", load, ClusterSpec(seed=seed, faults=(fault,)))


def cold_join(load: str, seed: int) -> Scenario:
    """Six replicas, to which two empty ones come at once. The load is a share of the capacity of all eight."""
    faults = tuple(Fault("join", FAULT_S, number) for number in (6, 7))
    return _sessions("cold_join", load, ClusterSpec(seed=seed, faults=faults))


def two_routers(load: str, seed: int) -> Scenario:
    """Two routers without knowledge of each other. Clients use them by turns."""
    return _sessions("two_routers", load, ClusterSpec(seed=seed, routers=2))


def four_routers(load: str, seed: int) -> Scenario:
    """Four routers without knowledge of each other. Clients use them by turns."""
    return _sessions("four_routers", load, ClusterSpec(seed=seed, routers=4))


def heterogeneous(load: str, seed: int) -> Scenario:
    """Half of the replicas are other machines. Llama-3.1-70B's on four H100 holds half as much again, and is 5 % faster
    in prefill and 35 % in reading contexts. An 8B's on an A100 holds less than half, and decodes long contexts at half
    the speed. The requests are of 100 groups with prefixes of 4,000 to 20,000 tokens."""
    other, small = CALIBRATIONS["llama-3.1-70b-4xh100"], CALIBRATIONS["llama-3.1-8b-a100"]
    setting = ClusterSpec(seed=seed, others=(other, other, small, small))
    lengths = random.Random(f"heterogeneous:{seed}:lengths").choices(range(10, 51), k=100)

    def part(rng: random.Random, number: int) -> generated.Pieces:
        group = rng.randrange(len(lengths))
        return generated.Pieces(group, lengths[group], number, 1, rng.randint(50, 350))

    return generated.scenario("heterogeneous", load, setting, part)
