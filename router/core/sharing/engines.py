"""Which engine is meant, and which life of it: routers number replicas and their caches each for itself.

A replica is named by the hash of its id, and the engine that is there by that of its instance, where discovery knows
one. Of a cache that began anew each router sees by itself when (a refused connection, counters that went back, its
events), some within a second of the others. So since when a cache is there says whether two routers mean the same:
where one has seen it begin, and the other still speaks of an older one, that other has not noticed yet.
"""

from __future__ import annotations

from functools import lru_cache

from xxhash import xxh3_64_intdigest

from router.core.fleet.member import Member
from router.core.placement.router import Router

INSTANCES_MAX = 4_096  # engines whose numbers are remembered
NOTICED_S = 3.0  # routers notice a restart within so many seconds of each other: they probe once a second


def number_of(id_: str) -> int:
    """The number of a replica, or of a router: the same everywhere."""
    return xxh3_64_intdigest(id_.encode("utf-8", "surrogatepass"))


@lru_cache(INSTANCES_MAX)
def instance_of(instance: str) -> int:
    """The number of an engine (Replica.instance), 32 bits; 0 where discovery knows none."""
    return (number_of(instance) & 0xFFFFFFFF or 1) if instance else 0


class Caches:
    """Since when each replica has had its cache, as far as this router has seen."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known: dict[str, tuple[int, float, bool]] = {}  # id -> (Member.life, since when, whether it was seen)

    def look(self, now_s: float) -> list[str]:
        """Find the caches that have begun anew, and return their replicas; to be called some times a second."""
        known, members, news = self._known, self._router.fleet.members, []
        for id_, member in members.items():
            before = known.get(id_)
            if before is None or before[0] != member.life:
                known[id_] = member.life, now_s, before is not None
                news.append(id_)
        if len(known) > len(members):
            for id_ in [id_ for id_ in known if id_ not in members]:
                del known[id_]
        return news

    def of(self, member: Member, now_s: float) -> tuple[float, bool]:
        """(since when the replica's cache is there, whether it was seen to begin)."""
        known = self._known.get(member.id)
        return (known[1], known[2]) if known is not None and known[0] == member.life else (now_s, known is not None)

    def outlived(self, member: Member, cache_s: float, now_s: float) -> bool:
        """Whether a cache that another router knows since then is gone, by what was seen here."""
        since_s, began = self.of(member, now_s)
        return began and cache_s < since_s - NOTICED_S
