"""Scenarios by name. Seeds 1-5 and half of the sessions are for tuning, seeds 6-15 and the other half for claims.

To add one: a Make (see scenario.py) in `recorded`, `generated` or `eventful`, and a line here.
"""

from __future__ import annotations

from loadtest.simulation import eventful, generated, recorded
from loadtest.simulation.scenario import CLAIM_SEEDS, LOADS, TUNE_SEEDS, Make, Scenario, in_half

__all__ = ["CLAIM_SEEDS", "LOADS", "SCENARIOS", "TUNE_SEEDS", "Make", "Scenario", "in_half"]

SCENARIOS: dict[str, Make] = {
    "mooncake": recorded.mooncake,
    "claude_code": recorded.claude_code,
    "ladder_honest": generated.ladder_honest,
    "ladder_published": generated.ladder_published,
    "one_group": generated.one_group,
    "all_unique": generated.all_unique,
    "cold_burst": generated.cold_burst,
    "working_set_3x": generated.working_set_3x,
    "decode_heavy": generated.decode_heavy,
    "long_prompts": generated.long_prompts,
    "restart": eventful.restart,
    "slow_replica": eventful.slow_replica,
    "cold_join": eventful.cold_join,
    "two_routers": eventful.two_routers,
    "four_routers": eventful.four_routers,
    "heterogeneous": eventful.heterogeneous,
}
"""The claims are made on all of these, at each load."""

LADDERS: dict[str, Make] = {
    "ladder_full_honest": generated.ladder_full_honest,
    "ladder_full_published": generated.ladder_full_published,
}
"""All stages of llm-d's ladder one after the other, 17,000 requests: to be set beside what was published. The load's
name changes nothing."""
