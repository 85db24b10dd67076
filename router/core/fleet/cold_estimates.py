"""Slowness of replicas with an unknown speed of their own.

A speed is learned from first tokens, which are never seen if no answer streams. Such a replica is judged by the mean
age of its open leases, compared with the mean age over ready replicas, or with the mean duration of leases. Leases of
other routers count if they are reported, because the mean of a few leases is unreliable.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.core.estimators.fleet_means import FleetMeans
from router.core.fleet.member import ReplicaState


class ColdReplicaEstimates:
    """Members with an unknown speed at the last check; some may have learned theirs since."""

    def __init__(self, means: FleetMeans) -> None:
        self._means = means
        self.members: dict[str, ReplicaState] = {}

    def slowness(self, ready: Iterable[ReplicaState], now_s: float) -> dict[str, float]:
        """Return the factor by which a replica looks slower than its peers. Only ready replicas that look slower are
        included."""
        ages_ms: dict[str, float] = {}
        for member in list(self.members.values()):
            if member.own_speed.prefill_factor.is_known:
                del self.members[member.id]
            elif (count := member.open_leases) > 1 and member.ready:
                ages_ms[member.id] = (now_s - _placed_sum_s(member) / count) * 1e3
        if not ages_ms:
            return ages_ms
        sum_ms, busy = 0.0, 0
        for member in ready:
            if count := member.open_leases:
                sum_ms += (now_s - _placed_sum_s(member) / count) * 1e3
                busy += 1
        usual_ms = max(sum_ms / busy, self._means.common.mean_open_ms)
        return {id_: age_ms / usual_ms for id_, age_ms in ages_ms.items() if age_ms > usual_ms > 0}


def _placed_sum_s(member: ReplicaState) -> float:
    """Return the sum of the placement times of all open leases there, of this and other routers."""
    return member.work.placed_sum_s + member.others.placed_sum_s
