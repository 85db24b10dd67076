"""The real router in front of simulated replicas that have CPU memory behind their GPUs."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop
from itertools import product
from statistics import fmean

import pytest

from loadtest.common.report import percentile
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.world import SimulatedRequest, Simulation
from loadtest.simulate.scenarios.tiers import churn
from router.core.placement.policies.warm import Warm

KV_TOKENS = 153_600


def _run(
    setting: ClusterSpec, load: str, *, requests: int, warm_up: int = 0
) -> tuple[Simulation, list[SimulatedRequest]]:
    scenario = churn(load, setting, warm_up=warm_up, requests=requests)
    world = Simulation(scenario.workload, setting, Warm)
    return world, world.run().sent[warm_up:]


def _end(world: Simulation) -> None:
    """Have what is under way at the last answer arrive: the events of a step come some milliseconds behind it."""
    end_s = world.now_s + 1.0
    while world._heap and world._heap[0][0] < end_s:
        world.now_s, _, act, argument = heappop(world._heap)
        act(argument)


@pytest.mark.long
def test_tiers_are_worth_their_price() -> None:
    """Prefixes of three times the GPUs' caches, tiers of twice their size, at the load that the fleet sustains without
    tiers: over three seeds a router that counts tiers needs at most 0.6 of the time to first token of one that does
    not, on average and at p90."""
    means, p90s = [0.0, 0.0], [0.0, 0.0]
    for seed, told in product((1, 2, 3), (True, False)):
        setting = ClusterSpec(replicas=2, seed=seed, grade="exact", kv_tokens=KV_TOKENS, tier=TierLimits(2 * KV_TOKENS))
        _, sent = _run(replace(setting, tier_told=told), "at", warm_up=200, requests=400)
        ttfts = [each.ttft_s for each in sent if each.ttft_s is not None]
        assert len(ttfts) == 400
        means[not told] += fmean(ttfts)
        p90s[not told] += percentile(ttfts, 90) or 0.0
    assert means[0] <= 0.6 * means[1]
    assert p90s[0] <= 0.6 * p90s[1]


@pytest.mark.long
@pytest.mark.parametrize("us_per_token", [20, 40])
def test_the_price_of_a_load_is_learned(us_per_token: int) -> None:
    """After 200 answers from tiers whose links are four and eight times slower than the guess, and on which loads
    queue, each replica's load is believed to take what it takes, to within 10 %."""
    limits = TierLimits(5 * KV_TOKENS, 2e-3, us_per_token / 1e6)
    setting = ClusterSpec(replicas=2, seed=1, grade="exact", kv_tokens=KV_TOKENS, tier=limits)
    world, _ = _run(setting, "below", requests=600)
    tiers = [replica.model.loading.tier for replica in world.replicas.values() if replica.model.loading is not None]
    assert sum(tier.loads for tier in tiers) > 200
    assert sum(tier.queued_loads for tier in tiers) > 20
    fleet, truth_ms = world.placers[0].router.fleet, 1e3 * limits.load_s(12_000)
    for member in fleet.members.values():
        link = member.links.get_or_create("cpu")
        assert link.fit.observations >= 20
        assert member.speeds.loads.model("cpu", link.fit).ms(12_000) == pytest.approx(truth_ms, rel=0.1)


def test_what_is_predicted_is_what_the_engine_finds() -> None:
    """GPU and tier together, to the token, for nearly every answer: a block may leave while a request is on its way."""
    setting = ClusterSpec(replicas=2, seed=1, grade="exact", kv_tokens=KV_TOKENS, tier=TierLimits(2 * KV_TOKENS))
    world, sent = _run(setting, "below", requests=250)
    leases = [(each.lease, each.cached_tokens) for each in sent if each.lease is not None]
    equal = sum(lease.cached_tokens == cached for lease, cached in leases)
    assert equal >= 0.97 * len(leases)
    assert any(lease.to_load for lease, _ in leases)
    _end(world)
    router = world.placers[0].router
    for name, replica in world.replicas.items():
        ledger = router.knowledge.engine_blocks(name)
        assert ledger is not None
        assert replica.model.loading is not None
        assert ledger.tiers["cpu"].blocks == len(replica.model.loading.tier)
        said = router.knowledge.empty(name)
        assert said is not None
        assert said.free_tokens == KV_TOKENS - len(replica.model.pool._keys) * replica.block_tokens


def test_nothing_changes_where_there_are_no_tiers() -> None:
    """Without tiers a router that would take note of them decides as one that would not, request by request."""
    setting = ClusterSpec(replicas=3, seed=2, grade="exact", kv_tokens=KV_TOKENS)
    runs = []
    for told in (True, False):
        _, sent = _run(replace(setting, tier_told=told), "at", requests=150)
        runs.append([(each.lease and each.lease.replica, each.ttft_s, each.e2e_s, each.cached_tokens) for each in sent])
    assert runs[0] == runs[1]
