"""Scenarios by name. Seeds 1-5 and half of the sessions are for tuning, seeds 6-15 and the other half for claims.

To add one, write a Make (see scenario.py) and add a line here. The Make goes into `recorded`, `generated`,
`contention`, `disruptions` or `odd`.
"""

from __future__ import annotations

from loadtest.simulate.scenarios import (
    contention,
    disruptions,
    generated,
    hops,
    odd,
    random_workloads,
    recorded,
    tiers,
    unusual_clients,
)
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, COMMON_LOADS, LOADS, TUNE_SEEDS, Make, Scenario, in_half

__all__ = [
    "APART",
    "CLAIM_SEEDS",
    "GROUPS",
    "LOADS",
    "NAMED",
    "ODD",
    "SCENARIOS",
    "TUNE_SEEDS",
    "Make",
    "Scenario",
    "in_half",
    "loads_of",
]

NAMED: dict[str, Make] = {
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
    "restart": disruptions.restart,
    "slow_replica": disruptions.slow_replica,
    "cold_join": disruptions.cold_join,
    "two_routers": disruptions.two_routers,
    "four_routers": disruptions.four_routers,
    "heterogeneous": disruptions.heterogeneous,
    "hot_prefix_long": contention.hot_prefix_long,
    "hot_prefix_short": contention.hot_prefix_short,
    "hot_prefix_mix": contention.hot_prefix_mix,
    "hot_prefix_4": contention.hot_prefix_4,
    "hot_prefix_32": contention.hot_prefix_32,
    "sample_groups": contention.sample_groups,
    "overfull_chats": contention.overfull_chats,
    "huge_cold": contention.huge_cold,
    "impatient_sessions": contention.impatient_sessions,
    "impatient_unique": contention.impatient_unique,
}
"""Fleets of replicas that are alike, or nearly so."""

ODD: dict[str, Make] = {
    "odd_big_kv": odd.odd_big_kv,
    "odd_one_fast": odd.odd_one_fast,
    "odd_one_slow": odd.odd_one_slow,
    "odd_unequal_slow": odd.odd_unequal_slow,
    "odd_few_slots": odd.odd_few_slots,
    "odd_unchunked": odd.odd_unchunked,
    "odd_no_cache_on_two": odd.odd_no_cache_on_two,
    "odd_far": odd.odd_far,
    "odd_two_models": odd.odd_two_models,
    "odd_cold_join": odd.odd_cold_join,
    "odd_drift": odd.odd_drift,
    "odd_bursts": unusual_clients.odd_bursts,
    "odd_thinking": unusual_clients.odd_thinking,
    "odd_thinking_chats": unusual_clients.odd_thinking_chats,
    "odd_chats_among_agents": unusual_clients.odd_chats_among_agents,
    "odd_stale_metrics": unusual_clients.odd_stale_metrics,
    "odd_two_replicas": unusual_clients.odd_two_replicas,
}
"""Fleets, engines and clients that are unusual in one way each."""

HOPS: dict[str, Make] = {
    "hop_late_requests": hops.hop_late_requests,
    "hop_late_tokens": hops.hop_late_tokens,
    "hop_gathers": hops.hop_gathers,
    "hop_nagle": hops.hop_nagle,
    "hop_thin": hops.hop_thin,
}
"""Fleets with one replica behind a proxy or a link that delays it."""

SCENARIOS: dict[str, Make] = {**NAMED, **ODD}
"""The claims are made on all of these, at each of their loads."""

_ALSO_LIGHT = ("light", *COMMON_LOADS)
_LOADS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ODD, ("below", "at")),
    **dict.fromkeys(HOPS, _ALSO_LIGHT),
    "hot_prefix_long": _ALSO_LIGHT,
    "hot_prefix_short": _ALSO_LIGHT,
    "hot_prefix_mix": _ALSO_LIGHT,
    "hot_prefix_4": _ALSO_LIGHT,
    "hot_prefix_32": ("light", "below", "at"),
    "sample_groups": _ALSO_LIGHT,
    "overfull_chats": _ALSO_LIGHT,
    "huge_cold": _ALSO_LIGHT,
    "impatient_sessions": ("above", "twice"),
    "impatient_unique": ("above", "twice"),
}


def loads_of(name: str) -> tuple[str, ...]:
    """Return the loads at which a scenario is raced."""
    return _LOADS_OF.get(name, COMMON_LOADS)


LADDERS: dict[str, Make] = {
    "ladder_full_honest": generated.ladder_full_honest,
    "ladder_full_published": generated.ladder_full_published,
}
"""All stages of llm-d's ladder one after the other, about 17,000 requests with the warm-up, to compare with published
figures. The load's name has no effect."""

APART: dict[str, Make] = {
    **LADDERS,
    "ladder_reordered": generated.ladder_reordered,
    "ladder_random": generated.ladder_random,
    "tier_churn": tiers.tier_churn,
    "drawn": random_workloads.draw_scenario,
    **HOPS,
}
"""Scenarios without claims about all rules."""

GROUPS: dict[str, tuple[str, ...]] = {
    "named": tuple(NAMED),
    "odd": tuple(ODD),
    "drawn": ("drawn",),
    "hops": tuple(HOPS),
}
"""Scenarios that are run together, by the name of the group."""
