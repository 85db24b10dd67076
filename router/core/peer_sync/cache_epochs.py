"""Identification of engines and cache epochs across routers, which number both independently.

A replica is named by the hash of its id, and its current engine by the hash of its instance, if discovery provides one.
Each router detects a cleared cache by itself (a refused connection, counters that decreased, its events), some within a
second of the others. So the start time of a cache shows if two routers mean the same one. If one router has seen a
cache begin, and another still refers to an older one, that other router has not detected the change yet.
"""

from __future__ import annotations

from functools import lru_cache

from xxhash import xxh3_64_intdigest

from router.core.fleet.member import ReplicaState
from router.core.placement.router import Router

INSTANCES_MAX = 4_096  # engines with a remembered number
NOTICED_S = 3.0  # routers detect a restart within this many seconds of each other, because they probe once a second


def number_of(id_: str) -> int:
    """Return the number of a replica or a router, which is the same on all routers."""
    return xxh3_64_intdigest(id_.encode("utf-8", "surrogatepass"))


@lru_cache(INSTANCES_MAX)
def instance_of(instance: str) -> int:
    """Return the number of an engine (Replica.instance), 32 bits; 0 if discovery provides no instance."""
    return (number_of(instance) & 0xFFFFFFFF or 1) if instance else 0


class CacheEpochs:
    """Start time of each replica's cache, as this router has observed it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        # id -> (Member.life, start time, True if the start was observed)
        self._known: dict[str, tuple[int, float, bool]] = {}

    def look(self, now_s: float) -> list[str]:
        """Find caches with a new epoch, and return their replicas; must be called several times a second."""
        known, members, news = self._known, self._router.fleet.members, []
        for id_, member in members.items():
            before = known.get(id_)
            if before is None or before[0] != member.cache_epoch:
                known[id_] = member.cache_epoch, now_s, before is not None
                news.append(id_)
        if len(known) > len(members):
            for id_ in [id_ for id_ in known if id_ not in members]:
                del known[id_]
        return news

    def get_epoch(self, member: ReplicaState, now_s: float) -> tuple[float, bool]:
        """Return (start time of the replica's cache, True if its start was observed)."""
        known = self._known.get(member.id)
        return (
            (known[1], known[2]) if known is not None and known[0] == member.cache_epoch else (now_s, known is not None)
        )

    def is_older(self, member: ReplicaState, cache_s: float, now_s: float) -> bool:
        """True if the cache that another router knows since `cache_s` is gone, by this router's observations."""
        since_s, began = self.get_epoch(member, now_s)
        return began and cache_s < since_s - NOTICED_S
