"""What several routers have found of one replica: where three of them have found it dead, it is dead for all.

A router's own breaker opens after three failures of its own requests, so that of eight routers each sends a dead
replica three more. Each says which replicas it has found dead itself, never what it was told; where DEAD_ROUTERS have
said the same within EVIDENCE_S, all others rest the replica at once, for as short a time as their own first finding
would, and then try it as ever. The same evidence counts once: a trial that succeeds is not overruled by it.
"""

from __future__ import annotations

from collections.abc import Iterable

DEAD_ROUTERS = 3  # routers that must have found a replica dead; this one may be one of them
EVIDENCE_S = 2.0  # time for which the words of a router count


class DeathNotices:
    """What other routers have found dead. Numbers that name routers are those of frames."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[frozenset[str], float]] = {}  # router -> replicas, time of the message
        self._taken: set[str] = set()  # replicas that were rested, and of which as many routers still say the same

    def hear(self, origin: int, dead: Iterable[str], now_s: float) -> None:
        """Another router has found these dead, and no others."""
        found = frozenset(dead)
        if found:
            self._said[origin] = (found, now_s)
        else:
            self._said.pop(origin, None)

    def forget(self, origin: int) -> None:
        """A router is not heard any more."""
        self._said.pop(origin, None)

    def agreed(self, own: frozenset[str], now_s: float) -> list[tuple[str, int]]:
        """Replicas that have newly been found dead by DEAD_ROUTERS routers, and by how many others; `own` are found
        dead by this router."""
        counts: dict[str, int] = {}
        for found, at_s in self._said.values():
            if now_s - at_s <= EVIDENCE_S:
                for replica in found:
                    counts[replica] = counts.get(replica, 0) + 1
        agreed = {replica for replica, count in counts.items() if count + (replica in own) >= DEAD_ROUTERS}
        new = sorted(agreed - self._taken)
        self._taken = agreed
        return [(replica, counts[replica]) for replica in new]
