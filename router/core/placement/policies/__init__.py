"""Placement policies by name. A new policy needs a file here and a line in POLICIES (docs/extend/policy.md)."""

from __future__ import annotations

from collections.abc import Callable

from router.core.placement.policies.consistent_hash import ConsistentHash
from router.core.placement.policies.least_loaded import LeastLoaded
from router.core.placement.policies.longest_match import LongestMatch
from router.core.placement.policies.policy import Policy, PullPolicy, RingOrdered, TransferTimes
from router.core.placement.policies.round_robin import RoundRobin
from router.core.placement.policies.two_choices import TwoChoices
from router.core.placement.policies.warm import Warm

POLICIES: dict[str, Callable[[], Policy]] = {
    "warm": Warm,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "two_choices": TwoChoices,
    "consistent_hash": ConsistentHash,
    "longest_match": LongestMatch,
}

__all__ = ["POLICIES", "Policy", "PullPolicy", "RingOrdered", "TransferTimes"]
