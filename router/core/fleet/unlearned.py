"""Replicas whose own speed is not known, and how slow they look all the same.

A speed is learned from first tokens, which are never seen where nothing streams. Such a replica is judged by the age of
what it has not answered, against the mean age over ready replicas, or against how long leases take. Leases of other
routers count, as far as they are told: of few leases a mean says little.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.core.fleet.member import Member
from router.core.learned.means import FleetMeans


class Unlearned:
    """Members whose own speed was not known when last looked at: some may have learned it since."""

    def __init__(self, means: FleetMeans) -> None:
        self._means = means
        self.members: dict[str, Member] = {}

    def slowness(self, ready: Iterable[Member], now_s: float) -> dict[str, float]:
        """How many times slower than its peers a replica looks. Only ready replicas that look slower are named."""
        ages_ms: dict[str, float] = {}
        for member in list(self.members.values()):
            if member.prefill_factor.is_known:
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


def _placed_sum_s(member: Member) -> float:
    """Sum of the times at which all leases that are open there were placed, whoever placed them."""
    return member.placed_sum_s + member.others.placed_sum_s
