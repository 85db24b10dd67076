"""Which engine is meant, and which life of it: routers number replicas and their caches each for itself.

A replica is named by the hash of its id, and the engine that is there by that of its instance, where discovery knows
one. Of a cache that began anew each router sees by itself when (a refused connection, counters that went back, its
events), some within a second of the others. So its age says whether two routers mean the same: where one has seen it
begin, and the other still speaks of an older one, that other has not noticed yet.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from router.core.placement.router import Router

NOTICED_S = 3.0  # routers notice a restart within so many seconds of each other: they probe once a second


def number_of(id_: str) -> int:
    """The number of a replica, the same at all routers."""
    return xxh3_64_intdigest(id_.encode("utf-8", "surrogatepass"))


def instance_of(instance: str) -> int:
    """The number of an engine at an address, 32 bits; 0 where discovery knows none."""
    return (number_of(instance) & 0xFFFFFFFF or 1) if instance else 0


class EngineAges:
    """Since when each replica has had its cache, as far as this router has seen."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lives: dict[str, tuple[int, float, bool]] = {}  # id -> (Member.life, since when, whether it was seen)

    def look(self, now_s: float) -> None:
        """Find the caches that have begun anew; to be called with each message."""
        lives, members = self._lives, self._router.fleet.members
        for id_, member in members.items():
            known = lives.get(id_)
            if known is None or known[0] != member.life:
                lives[id_] = member.life, now_s, known is not None
        if len(lives) > len(members):
            for id_ in [id_ for id_ in lives if id_ not in members]:
                del lives[id_]

    def of(self, id_: str, now_s: float) -> tuple[int, bool]:
        """(age of a replica's cache in milliseconds, whether it was seen to begin)."""
        known = self._lives.get(id_)
        return (max(0, int((now_s - known[1]) * 1e3)), known[2]) if known is not None else (0, False)

    def outlived(self, id_: str, age_ms: int, now_s: float) -> bool:
        """Whether another router speaks of a cache of that age, which is gone by what was seen here."""
        own_ms, began = self.of(id_, now_s)
        return began and age_ms > own_ms + NOTICED_S * 1e3
