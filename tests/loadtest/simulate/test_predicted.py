"""Times to first token that routers predict, against those of simulated replicas under load."""

from __future__ import annotations

import pytest

from loadtest.simulate.results.race import shortened
from loadtest.simulate.scenarios.table import SCENARIOS
from loadtest.simulate.world.world import World
from router.core.placement.policies import POLICIES

LEARNT = 200  # streams after which predictions are judged


@pytest.mark.parametrize("name", ["claude_code", "working_set_3x"])
@pytest.mark.parametrize("load", ["below", "at"])
def test_nine_in_ten_first_tokens_come_within_the_predicted_p90(name: str, load: str) -> None:
    """Between 85 and 95 % do, where replicas are idle and where they are full."""
    scenario = SCENARIOS[name](load, 1)
    result = World(shortened(scenario.workload, 1_200), scenario.setting, POLICIES["warm"]).run()
    within, below, count = 0, 0, 0
    for sent in result.sent[LEARNT:]:
        lease = sent.lease
        if lease is None or lease.first_token_s is None:
            continue
        took_ms = (lease.first_token_s - lease.placed_s) * 1e3
        count += 1
        below += took_ms <= lease.receipt.ttft_ms
        within += took_ms <= lease.receipt.ttft_p90_ms
    print(f"\n{name}, {load}: {below / count:.1%} within the median, {within / count:.1%} within p90, of {count}")
    assert count > 500
    assert 0.85 <= within / count <= 0.95
    assert 0.35 <= below / count <= 0.65
