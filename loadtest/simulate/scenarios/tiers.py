"""Workloads on replicas with CPU memory behind their GPUs. The routers receive the events of that memory.

The policies are not raced on them, because other rules have no information about tiers.
"""

from __future__ import annotations

import random
from dataclasses import replace

from loadtest.fake_engine.host_tier import TierLimits
from loadtest.simulate.engine.capacity import capacity_rps, fleet_kv_tokens
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import open_workload
from loadtest.simulate.scenarios.generated import BLOCK_TOKENS, PIECE_TOKENS, Pieces, poisson, turns_of
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

CHURN, TIER = 3, 2
"""Sizes of all prefixes together and of a tier, as multiples of the GPUs' caches."""
PREFIX_PIECES = 30
WARM_UP, REQUESTS = 900, 1_500


def tier_churn(load: str, seed: int) -> Scenario:
    """Prefixes of 12,000 tokens requested uniformly, with a question of 400 tokens each. They are three times as many
    as the GPUs' caches hold, and half as many again as the tiers hold. Four replicas, so that each prefix is requested
    about eight times."""
    setting = ClusterSpec(replicas=4, seed=seed, grade="exact")
    tier = TierLimits(TIER * setting.kv_tokens_of(setting.calibration))
    return churn(load, replace(setting, tier=tier), warm_up=WARM_UP, requests=REQUESTS)


def churn(load: str, setting: ClusterSpec, *, warm_up: int, requests: int) -> Scenario:
    """Return such a workload on any cluster. Loads are shares of its capacity without tiers."""
    groups = CHURN * fleet_kv_tokens(setting) // (PREFIX_PIECES * PIECE_TOKENS)
    name, count = f"tier_churn:{setting.seed}", warm_up + requests
    rng = random.Random(name)
    parts = [Pieces(rng.randrange(groups), PREFIX_PIECES, n, 1, rng.randint(50, 350)) for n in range(count)]
    turns = turns_of(name, parts, poisson(rng, count, 1.0))
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS)
    for turn in turns:
        turn.at_s /= rate
    workload = open_workload("tier_churn", turns, BLOCK_TOKENS, warm_up=warm_up)
    return Scenario(workload, setting, rate, "requests/s")
