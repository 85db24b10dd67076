"""The policy `warm`.

warm_policy  the policy: choice, deferral, P2P transfers
cost         the price: one formula of named terms
tie_break    rules for prices that cannot be distinguished
stages       prices of two replicas against one
constants    all constants, with their reasons
"""

from router.core.placement.policies.warm.warm_policy import Warm

__all__ = ["Warm"]
