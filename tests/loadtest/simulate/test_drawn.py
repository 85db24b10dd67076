"""Workloads that the seed draws."""

from __future__ import annotations

import pytest

from loadtest.simulate.engine.capacity import capacity_rps, pooled_hits
from loadtest.simulate.scenarios import random_workloads

BLOCK_TOKENS = 64


@pytest.mark.long
def test_drawn_workloads_are_all_sorts() -> None:
    """Seeds draw clusters of all sizes and calibrations, caches small and large, prompts that share much and nothing,
    and loads light and above what is sustained; every prompt fits its cache, and the load's name multiplies it."""
    made = [random_workloads.draw_scenario("at", seed) for seed in range(1, 21)]
    assert len({each.setting.replicas for each in made}) > 5
    assert len({each.setting.calibration.kv_tokens for each in made}) == len(random_workloads.KINDS)
    hits, loads = [], []
    for each in made:
        kv_tokens, turns = each.setting.kv_tokens, [turn for session in each.workload.sessions for turn in session]
        assert kv_tokens is not None
        assert max(turn.prompt_tokens + turn.output_tokens for turn in turns) < kv_tokens
        assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
        hits.append(sum(pooled_hits(turns, 1 << 30, BLOCK_TOKENS)) / sum(turn.prompt_tokens for turn in turns))
        loads.append(each.load / capacity_rps(turns, each.setting, BLOCK_TOKENS))
    assert min(hits) == 0
    assert max(hits) > 0.9
    assert min(loads) < 0.4
    assert max(loads) > 1.2
    assert random_workloads.draw_scenario("below", 3).load == pytest.approx(0.6 * made[2].load)
